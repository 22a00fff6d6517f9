"""What a disk may do to files: keep them through a power cut once they are synced, and be full, said in one message."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from sbkit.errors import SbkitError

#: What a full, read-only or broken disk answers, and one on which nobody may have more or larger files.
ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
_WORDS = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)}
HINT = "make room or raise the quota there, then run the same command again"


# ---------------------------------------------------------------- power cuts


def sync_folder(path: str | os.PathLike) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't
            raise
    finally:
        os.close(handle)


def sync_files(folder: str | os.PathLike) -> None:
    """Sync the files in a folder, the few large ones of a model, and then the folder."""
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sync_file_system(path: str | os.PathLike) -> None:
    """Sync all that was written on the disk of ``path``: one wait, however many files there are.

    An fsync for each of a million clips would wait for the disk a million times, for hours. This writes out what
    is still in memory, which the kernel keeps to a few gigabytes at most. Network disks have their files already:
    NFS sends them when they are closed.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is None:  # not Linux
        os.sync()
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if call(handle) and (number := ctypes.get_errno()) in ERRORS:
            raise OSError(number, os.strerror(number), os.fspath(path))
    finally:
        os.close(handle)


def uptime_id() -> str:
    """Which start of the machine this is; files of an earlier one that were not synced may hold anything."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


# ---------------------------------------------------------------- full disks


@contextlib.contextmanager
def told(path: str | os.PathLike) -> Iterator[None]:
    """Say in one message which file a disk refused within this block.

    path : the file that is written there, or the folder of several
    """
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:
        found = refusal(error)
        if found is None:
            raise
        name = found.filename if found.filename and os.path.isdir(path) else path
        raise SbkitError(explain(found, name), hint=HINT) from error


def refusal(error: BaseException) -> OSError | None:
    """The OSError of a full, read-only or broken disk behind ``error``, if that is what it was.

    Libraries in other languages have errors of their own, with the kernel's words in them.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in ERRORS:
            return seen
        number = None if isinstance(seen, (OSError, SbkitError)) else _in_words(seen)
        if number is not None:
            return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


def _in_words(error: BaseException) -> int | None:
    return next((number for words, number in _WORDS.items() if words in str(error)), None)


def explain(error: OSError, path: str | os.PathLike, needed: int | None = None) -> str:
    """What the disk did not take, why, what it would need and what is free."""
    what = "could not be read or written" if error.errno == errno.EIO else "could not be written"
    needs = "" if needed is None else f"it needs about {size(needed)}, "
    return f"{os.fspath(path)} {what}: {os.strerror(error.errno or 0)} ({needs}free: {_free(Path(path))})"


def size(count: float) -> str:
    """A number of bytes for people: ``size(1_200_000_000)`` is ``'1.2 GB'``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _free(path: Path) -> str:
    """What is free on the disk that ``path`` is, or would be, on."""
    try:
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        found = os.statvfs(there)
    except OSError:
        return "unknown"
    free = size(found.f_bavail * found.f_frsize)
    return f"{free}, but there are as many files as it can hold" if found.f_files and not found.f_favail else free
