"""Disks: checksums, syncing against power cuts, one message for full or broken disks, the user's cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sbkit.errors import SbkitError

#: Errors of a full, read-only or broken disk, and of exceeded quotas and file sizes.
ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
#: Those of them that more room mends.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
HINT = "make room or raise the quota there, then run the same command again"


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal."""
    with open(path, "rb") as file:
        return sha256_of(file)


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of what is left to read of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- power cuts


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't sync folders
            raise
    finally:
        os.close(handle)


def sync_files(folder: str | os.PathLike[str]) -> None:
    """Sync the files in a folder, and then the folder; for a model's few large files."""
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sync_file_system(path: str | os.PathLike[str]) -> None:
    """Sync all that was written on the disk of ``path``: one wait, however many files there are.

    An fsync for each of a million clips would wait for the disk a million times, for hours. This writes whatever is
    still in memory, which the kernel limits to a few gigabytes. Network disks already have their files: NFS sends
    them when they are closed.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is None:  # not Linux
        os.sync()
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if call(handle):
            number = ctypes.get_errno()
            if number in ERRORS:
                raise OSError(number, os.strerror(number), os.fspath(path))
    finally:
        os.close(handle)


# ---------------------------------------------------------------- full disks


@contextlib.contextmanager
def disk_errors_as_user_error(path: str | os.PathLike[str], called: str = "") -> Iterator[None]:
    """Raise disk errors inside this context as one ``SbkitError`` that names the file.

    path : the file that is written there, or the folder of several
    called : what the message calls it instead, if it may be a different file
    """
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:
        cause = disk_error(error)
        if cause is None:
            raise
        name = cause.filename if cause.filename and os.path.isdir(path) else path
        hint = "choose another place" if cause.errno == errno.EROFS else HINT
        raise SbkitError(code_of(cause), explain(cause, name, called=called if name == path else ""), hint=hint,
                         file=name) from error


@contextlib.contextmanager
def writing_into(folder: str | os.PathLike[str], option: str) -> Iterator[None]:
    """Raise one error if a folder can't be written into, with the option that chooses another one."""
    try:
        with disk_errors_as_user_error(folder):
            yield
    except OSError as error:
        raise SbkitError("not-writable", f"cannot write into {os.fspath(folder)}: {error.strerror or error}",
                         hint=f"choose another place with {option}", file=folder) from error


def disk_error(error: BaseException) -> OSError | None:
    """Return the OSError of a full, read-only or broken disk that caused ``error``, or None.

    Libraries in Rust, such as safetensors, raise their own errors, which end with the kernel's error number.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in ERRORS:
            return cause
        match = re.search(r"\(os error (\d+)\)", str(cause))
        if match is not None and int(match[1]) in ERRORS:
            return OSError(int(match[1]), os.strerror(int(match[1])))
        cause = cause.__cause__ or cause.__context__
    return None


def code_of(error: OSError) -> str:
    """Return the code of a disk error: whether the disk is full, read-only or broken."""
    if error.errno in _FULL:
        return "disk-full"
    return "broken-disk" if error.errno == errno.EIO else "not-writable"


def explain(error: OSError, path: str | os.PathLike[str], needed: float | None = None, called: str = "") -> str:
    """Describe a disk error: the file, the reason, the space needed and the space that is free."""
    what = "could not be read or written" if error.errno == errno.EIO else "could not be written"
    needs = "" if needed is None else f"it needs about {size(needed)}, "
    reason = os.strerror(error.errno or 0)
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if error.errno == errno.EFBIG and largest != resource.RLIM_INFINITY:
        reason += f", as files may only have {size(largest)} here: raise that by ulimit -f"
    left = f"free in {os.fspath(path)}: " if called else "free: "
    try:
        files = os.statvfs(nearest_folder(Path(path)))
    except OSError:
        left += "unknown"
    else:
        left += size(free(Path(path)))
        if files.f_files and not files.f_favail:
            left += ", but it can hold no more files"
    return f"{called or os.fspath(path)} {what}: {reason} ({needs}{left})"


def check_writable(path: Path, option: str) -> None:
    """Raise if a file can't be written, before the work that produces it."""
    try:
        if path.is_dir():
            raise SbkitError("not-a-file", f"{path} is a folder", hint=f"name a file with {option}", file=path)
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable(path, option, error) from error


def unwritable(path: Path, option: str, error: OSError) -> SbkitError:
    """Return the error for a file, named by this option, that can't be written."""
    code = code_of(error) if error.errno in ERRORS else "not-writable"
    return SbkitError(code, f"cannot write {path}: {error.strerror or error}",
                      hint=f"choose another place with {option}", file=path)


def size(count: float) -> str:
    """Format a number of bytes: ``size(1_200_000_000)`` is ``'1.2 GB'``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def check_room(path: str | os.PathLike[str], needed: float, hint: str) -> None:
    """Raise if the disk of ``path`` has less room than ``needed``, before work begins."""
    if needed > free(Path(path)):
        raise SbkitError("disk-full", explain(OSError(errno.ENOSPC, ""), path, needed), hint=hint, file=path)


def link_or_copy(path: Path, name: Path) -> None:
    """Give a file a second name; a copy on file systems without hard links."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copy2(path, name)


def free(path: Path) -> int:
    """Return the bytes that are free on the disk of ``path``, which need not exist yet."""
    file_system = os.statvfs(nearest_folder(path))
    return file_system.f_bavail * file_system.f_frsize


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest of its parents that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def cache_folder() -> Path:
    """Return ``$SBKIT_CACHE``, or ``sbkit`` in the user's cache folder."""
    home = os.environ.get("SBKIT_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbkit"
