"""Compiles C code at its first use, and keeps the libraries in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from sbkit.system.console import atomic_write
from sbkit.system.disk import cache_folder

_SECONDS = 120


class Unavailable(Exception):
    """The reason why a library can't be compiled or used on this machine."""


def installed_compiler() -> str | None:
    """Return the path of a C compiler, ``$CC`` if it is set; None if there is none."""
    return next(filter(None, map(shutil.which, [os.environ.get("CC") or "gcc", "gcc", "cc", "clang"])), None)


def find_compiler() -> str:
    compiler = installed_compiler()
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc, cc or clang) on this machine")
    return compiler


def run_compiler(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    if process.returncode:
        messages = process.stderr.splitlines()
        errors = [line for line in messages if "error" in line] or messages
        raise Unavailable(f"{Path(command[0]).name} failed: {errors[0] if errors else process.returncode}")
    return process.stdout


def cached_library(parts: Iterable[str], build: Callable[[Path], Path]) -> Path:
    """Return the path of a compiled library, from the cache or newly built.

    parts : everything that the library depends on: sources, flags, the compiler's version
    build : compiles into an empty folder, and returns the library's path there
    """
    # Only this user may write to the folder, since code from it is run.
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder.resolve()):
        raise Unavailable(f"{folder} belongs to another user, or others may write to it, so no code from it is run")
    key = _digest("|".join(parts).encode())
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # processes that start together compile once
        for path in folder.glob(f"{key}-*.so"):
            if _is_ours(path) and path.is_file() and _digest(path.read_bytes()) == path.stem.split("-")[1]:
                return path
        with tempfile.TemporaryDirectory() as aside:
            content = build(Path(aside)).read_bytes()
        path = folder / f"{key}-{_digest(content)}.so"
        with atomic_write(path, "wb") as out:
            out.write(content)
        path.chmod(0o600)
        return path
    finally:
        os.close(descriptor)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _is_ours(path: Path) -> bool:
    state = path.lstat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o022
