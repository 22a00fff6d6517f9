"""The place of a bundle: made in a room beside it, moved there in one go; what killed exports left is tidied up."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sbkit.data.lock import Lock, remove_unheld
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.system import disk

logger = logging.getLogger(__name__)

_DAY = 24 * 3600.0
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextlib.contextmanager
def room_beside(to: Path) -> Iterator[Path]:
    """An empty folder on the disk where the bundle will be; gone at the end, whatever is in it then."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        aside, lock = _room(to)
    except OSError as error:
        raise SbkitError(f"cannot write into {to.parent}: {error.strerror}",
                         hint="choose another place with --to") from error
    with disk.told(to):  # what is free is what is free without it
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            lock.close()


def publish(aside: Path, to: Path, force: bool) -> None:
    """Sync and move: at ``to`` the new bundle stands whole, or what was there before does, also after a power cut."""
    aside.chmod(0o755)
    disk.sync_files(aside)
    try:
        if not (force and to.exists()):
            os.rename(aside, to)
        elif not _exchange(aside, to):
            _replace(aside, to)
    except OSError as error:
        if disk.refusal(error):
            raise
        raise SbkitError(f"the bundle cannot be moved to {to}: {error.strerror}",
                         hint="choose another place with --to") from error
    disk.sync_folder(to.parent)


def tidy(to: Path) -> None:
    """Put back or remove what an export to the same place left when it was killed, and say so."""
    replaced = layout.replaced(to)
    with contextlib.suppress(OSError):  # another export was quicker, or we may not
        if replaced.exists() and not to.exists():
            os.rename(replaced, to)
            disk.sync_folder(to.parent)
            logger.warning("An export to %s was killed while it replaced the bundle there: that one is back", to)
    for left in (replaced, *to.parent.glob(f".{glob.escape(to.name)}.making-*")):
        with contextlib.suppress(OSError):
            if remove_unheld(left, unless_older=_DAY):
                logger.warning("Removed %s, which an export that was killed had left", left)


def _room(to: Path) -> tuple[Path, Lock]:
    """A folder and its lock, which the kernel drops however this process ends."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f".{to.name}.making-", dir=to.parent))
        with contextlib.suppress(FileNotFoundError):  # another export tidied it away before it was locked
            lock = Lock(path)
            if lock.take() is not False and lock.is_at(path):
                return path, lock
            lock.close()


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; False where the system or the disk can't."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _replace(aside: Path, to: Path) -> None:
    """The same in two steps; a kill between them leaves the old bundle where ``tidy`` and a reader find it."""
    old = layout.replaced(to)
    os.rename(to, old)
    try:
        os.rename(aside, to)
    except BaseException:
        os.rename(old, to)
        raise
    disk.sync_folder(to.parent)
    shutil.rmtree(old, ignore_errors=True)
