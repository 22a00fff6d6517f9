"""Publishes a folder atomically: it is built in a temporary folder beside its place, then moved there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sbkit.data.lock import Lock, remove_unheld
from sbkit.errors import SbkitError
from sbkit.system import disk

logger = logging.getLogger(__name__)

#: Files that are synced one by one.
_FEW = 100
_DAY = 24 * 3600.0
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextlib.contextmanager
def temporary_folder(to: Path) -> Iterator[Path]:
    """Make a temporary folder on the disk of ``to``; it is removed at the end."""
    with disk.writing_into(to.parent, "--to"):
        to.parent.mkdir(parents=True, exist_ok=True)
        while True:  # the lock ends with this process, even if it is killed
            temporary = Path(tempfile.mkdtemp(prefix=f".{to.name}.making-", dir=to.parent))
            with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
                lock = Lock(temporary)
                if lock.acquire() is not False and lock.is_at(temporary):
                    break
                lock.close()
    with disk.disk_errors_as_user_error(to):  # reports free space after the temporary folder is gone
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            lock.close()


def publish(temporary: Path, to: Path, force: bool, keep: Path | None = None) -> None:
    """Move the folder to ``to`` so that the old or the new one is complete there, even after a power cut.

    keep : where to move the folder that is replaced, instead of the one there, which may be ``temporary`` itself
    """
    temporary.chmod(0o755)
    # A few files are synced one by one; if there are many, or subfolders, the file system.
    inside = list(itertools.islice(temporary.iterdir(), _FEW + 1))
    if len(inside) > _FEW or any(each.is_dir() for each in inside):
        disk.sync_file_system(temporary)
    else:
        disk.sync_files(temporary)
    try:
        if not (force and to.exists()):
            os.rename(temporary, to)
        else:
            if keep is not None and keep != temporary:
                # The new folder goes by the place of the kept one, so that neither it nor the served one is ever gone.
                if not (keep.exists() and exchange(temporary, keep)):
                    shutil.rmtree(keep, ignore_errors=True)
                    os.rename(temporary, keep)
                temporary = keep
            if not exchange(temporary, to):
                old = replaced(to)
                os.rename(to, old)  # if this is killed now, ``clean_up`` restores it
                try:
                    os.rename(temporary, to)
                except BaseException:
                    os.rename(old, to)
                    raise
                disk.sync_folder(to.parent)
                if keep is None:
                    shutil.rmtree(old, ignore_errors=True)
                else:
                    os.rename(old, keep)
    except OSError as error:
        if disk.disk_error(error):
            raise
        raise SbkitError(f"{to} cannot be put in place: {error.strerror}",
                         hint="choose another place with --to") from error
    disk.sync_folder(to.parent)


def clean_up(to: Path) -> None:
    """Restore or remove what a killed process left here, with a warning."""
    before = replaced(to)
    with contextlib.suppress(OSError):  # another process did it first, or we lack the permission
        if before.exists() and not to.exists():
            os.rename(before, to)
            disk.sync_folder(to.parent)
            logger.warning("A process was killed while it replaced %s; the old version is restored", to)
    for left in (before, *to.parent.glob(f".{glob.escape(to.name)}.making-*")):
        with contextlib.suppress(OSError):
            if remove_unheld(left, unless_older=_DAY):
                logger.warning("Removed %s, left by a process that was killed", left)


def previous(folder: str | Path) -> Path:
    """Return the path where the bundle is kept that ``sbkit improve`` replaced."""
    path = Path(folder).resolve()
    return path.with_name(f"{path.name}.previous")


def replaced(folder: str | Path) -> Path:
    """Return the path of the old folder during a replacement, on disks that can't exchange two folders."""
    path = Path(folder).resolve()
    return path.with_name(f".{path.name}.replaced")


def exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; returns False if the system or the disk can't."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
