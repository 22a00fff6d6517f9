"""Makes what is dear to make once for all test files of a session, which may run in several processes."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder that the first to ask for this name filled; the others wait for it, and don't change it.

    make : fills an empty folder; where it fails, the next to ask tries again
    """
    home = factory.getbasetemp()
    folder, done = home / name, home / f"{name}.done"
    with open(home / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
