"""One line of what the doctor found, and looking for it so that whatever is broken gives a line as well."""

from __future__ import annotations

import getpass
import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

OK, NOTE, IN_THE_WAY = "ok", "note", "in the way"
#: A check that takes longer is left alone: a network folder may never answer.
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    what: str
    found: str
    verdict: str = OK
    """``ok``, ``note`` (sbkit runs, perhaps slower or without a part) or ``in the way``."""
    mend: str = ""


@dataclass(frozen=True)
class Scope:
    """Of the doctor: what to look at besides the machine."""

    data: Path | None = None
    run: Path | None = None


Check = Callable[[Scope], Iterable[Finding]]


def look(what: str, check: Check, asked: Scope, patience: float = PATIENCE_SECONDS) -> list[Finding]:
    """What a check finds; that it failed or doesn't answer is a finding."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(check(asked))
        except Exception as error:  # whatever is broken here: it's what the doctor is asked about
            found.append(Finding(what, f"can't be told: {first_line(error)}", NOTE))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    seen = list(found)
    if thread.is_alive():
        seen.append(Finding(what, f"no answer within {patience:g} s", NOTE, "is a network folder or the driver stuck?"))
    return [replace(each, found=without_names(each.found), mend=without_names(each.mend)) for each in seen]


def first_line(error: BaseException) -> str:
    """What an error says, shortly."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def without_names(text: str) -> str:
    """Home folder, user and host left out: this is pasted where everybody reads it."""
    text = text.replace(str(Path.home()), "~") if Path.home() != Path("/") else text
    text = re.sub(rf"(?<=/){re.escape(_user())}(?=/|\b)", "USER", text)
    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])", "HOST", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "\0"
