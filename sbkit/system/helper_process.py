"""Starts helper processes that import what this process would, and nothing from the working directory.

``python -m`` imports from the working directory first: a stray ``soxr.py`` in a folder of recordings would run in every
helper. ``-P`` forbids that from Python 3.11 on; this module's way works in all versions.
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
#: Longest name in bytes of a temporary folder in which multiprocessing can create its sockets: of 107 in
#: all, ``/pymp-xxxxxxxx/listener-xxxxxxxx`` are 32.
_LONGEST_FOLDER = 75
HOME = str(Path(__file__).resolve().parents[2])
#: Only ``sys`` and ``runpy`` are imported before the path is right; "" means the working directory.
_RUN = ("import sys; sys.path[:] = [entry for entry in sys.path if entry]; home, module = sys.argv[1:3]; "
        "del sys.argv[1:3]; home in sys.path or sys.path.insert(0, home); "
        "import runpy; runpy.run_module(module, run_name='__main__', alter_sys=True)")


def command(module: str) -> list[str]:
    """Return the command that runs one of sbkit's modules; append its arguments."""
    return [sys.executable, "-c", _RUN, HOME, module]


def environment(names: Iterable[str] | None = None) -> dict[str, str]:
    """Return this process's environment, or only the named variables and PYTHONPATH, without empty path entries, which
    mean the working directory."""
    variables = {name: os.environ[name] for name in (os.environ if names is None else names) if name in os.environ}
    variables.pop("PYTHONPATH", None)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


@contextlib.contextmanager
def without_working_directory() -> Iterator[None]:
    """Keep processes that multiprocessing starts (``spawn``, ``forkserver`` and their helpers) inside this context from
    importing from the working directory, before they get this process's ``sys.path``.

    Python 3.10 has no switch for that.
    """
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:  # for a socket's path, as with some job schedulers
        folder = tempfile.tempdir
        tempfile.tempdir = "/tmp"
        with contextlib.suppress(OSError):  # multiprocessing then reports it itself
            multiprocessing.util.get_temp_dir()  # created once per process, and kept
        tempfile.tempdir = folder
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
