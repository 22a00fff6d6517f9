"""How a helper process of sbkit's is started: it imports what this process would, and nothing from where it stands.

``python -m`` imports from the working directory first: a ``soxr.py`` that somebody left in a folder of recordings
would run in every helper. ``-P`` forbids that from Python 3.11 on; what is done here works in all versions.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_SWITCH = "PYTHONSAFEPATH"
#: Bytes of a temporary folder's name that leave room for a socket's below it, which multiprocessing makes: of 107 in
#: all, ``/pymp-xxxxxxxx/listener-xxxxxxxx`` are 32.
_LONGEST_FOLDER = 75
_HOME = str(Path(__file__).resolve().parents[2])
#: ``sys`` and ``runpy`` apart, nothing is imported before the path is right; "" stands for the working directory.
_RUN = ("import sys; sys.path[:] = [each for each in sys.path if each]; home, module = sys.argv[1:3]; "
        "del sys.argv[1:3]; home in sys.path or sys.path.insert(0, home); "
        "import runpy; runpy.run_module(module, run_name='__main__', alter_sys=True)")


def command(module: str) -> list[str]:
    """The words that run one of sbkit's modules; what it is to be told follows them."""
    return [sys.executable, "-c", _RUN, _HOME, module]


def environment(names: Iterable[str] | None = None) -> dict[str, str]:
    """This process's environment, or of it what is named and PYTHONPATH, whose empty places would stand for the
    working directory."""
    passed = dict(os.environ) if names is None else {name: os.environ[name] for name in names if name in os.environ}
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    passed.pop("PYTHONPATH", None)
    return passed | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


@contextlib.contextmanager
def away_from_here() -> Iterator[None]:
    """Processes that multiprocessing starts within it (``spawn``, ``forkserver``, and what it starts beside a pool that
    is made) import nothing from the working directory before they are given this process's ``sys.path``.

    Python 3.10 knows no such switch.
    """
    _place_sockets()
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _place_sockets() -> None:
    """Have multiprocessing keep its sockets in /tmp where TMPDIR, as some job schedulers set it, is too long a name."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        with contextlib.suppress(OSError):  # then it says itself what is too long
            multiprocessing.util.get_temp_dir()  # made once in a process, and kept
        tempfile.tempdir = before
