"""Findings of the doctor, and running checks so that a broken check gives a finding too."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sbkit.errors import summary

OK, NOTE, IN_THE_WAY = "ok", "note", "in the way"
#: A check that takes longer is abandoned: a network folder may never answer.
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class MachineFinding:
    """One finding: what was checked, what was found, and what to do about it."""

    what: str
    found: str
    verdict: str = OK
    """``ok``, ``note`` (sbkit runs, perhaps slower or without a part) or ``in the way``."""
    fix: str = ""


def note_if(wrong: object, what: str, found: str, fix: str) -> MachineFinding:
    """A finding that is a note with what to do if something is wrong, and otherwise ok."""
    return MachineFinding(what, found, NOTE, fix) if wrong else MachineFinding(what, found)


Check = Callable[[], Iterable[MachineFinding]]


def run_check(what: str, check: Check, timeout: float = TIMEOUT_SECONDS) -> list[MachineFinding]:
    """Run a check and return its findings; a failure or a timeout is a finding too."""
    found: list[MachineFinding] = []

    def run() -> None:
        try:
            found.extend(check())
        except Exception as error:  # anything may be broken; that is what the doctor is for
            found.append(MachineFinding(what, f"unknown: {summary(error)}", NOTE))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    seen = list(found)
    if thread.is_alive():
        seen.append(MachineFinding(what, f"no answer within {timeout:g} s", NOTE,
                                   "is a network folder or the driver stuck?"))
    return [replace(each, found=anonymised(each.found), fix=anonymised(each.fix)) for each in seen]


def anonymised(text: str) -> str:
    """Replace the home folder, user and host: the output gets pasted into public places."""
    text = text.replace(str(Path.home()), "~") if Path.home() != Path("/") else text
    with contextlib.suppress(OSError, KeyError):  # a container's user without a name
        text = re.sub(rf"(?<=/){re.escape(getpass.getuser())}(?=/|\b)", "USER", text)
    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])", "HOST", text)
