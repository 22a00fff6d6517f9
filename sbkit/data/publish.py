"""Publishes a folder atomically: it is built in a temporary folder beside its place, then moved there.

What is replaced may be somebody's work, so a folder is replaced only if sbkit wrote it (``FolderKind``), and of its
files only those that it lists are ever deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import itertools
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.data.lock import Lock, remove_unheld
from sbkit.errors import SbkitError, printable
from sbkit.system import disk, untrusted

logger = logging.getLogger(__name__)

#: Files that are synced one by one.
_FEW = 100
_DAY = 24 * 3600.0
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_MAX_RECORD = 1 << 28  # bytes of a record: the names of a million recordings
_NAMED = 5  # files that an error names
#: Modes of a published folder, and of one that waits for its exchange: the sticky bit moves along with the folder.
_PUBLISHED = 0o755
_WAITING = 0o755 | stat.S_ISVTX


@dataclass(frozen=True)
class FolderKind:
    """What tells folders that sbkit writes from others.

    what : such a folder, for messages
    record : the file in it that describes it
    format : the value of ``format`` in the record
    files : returns the names of the other files, from the record's values
    """

    what: str
    record: str
    format: str
    files: Callable[[Mapping[str, Any]], Iterable[Any]]

    def listed(self, folder: Path) -> set[str] | None:
        """Return the paths in ``folder`` that its record lists, itself included; None if it isn't of this kind."""
        try:
            values = untrusted.read_json(folder / self.record, _MAX_RECORD)
            if not isinstance(values, dict) or values.get("format") != self.format:
                return None
            names = [name for name in self.files(values) if isinstance(name, str)]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        return {self.record, *names}

    def others(self, folder: Path) -> list[str]:
        """Return the paths in ``folder`` that its record doesn't list; all of them if it isn't of this kind."""
        listed = self.listed(folder) or set()
        folders = {str(parent) for name in listed for parent in Path(name).parents}
        others = []
        for path in _walk(folder):
            name = str(path.relative_to(folder))
            expected = folders if path.is_dir() and not path.is_symlink() else listed
            if name not in expected:
                others.append(name)
        return sorted(others)

    def check_replaceable(self, folder: Path) -> None:
        """Raise unless ``folder`` is missing, empty, or of this kind and without files of others."""
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():
            raise SbkitError("output-exists", f"{folder} is a file", hint=f"name a folder for {self.what}", file=folder)
        others = self.others(folder)
        if not others:
            return
        if self.listed(folder) is None:
            raise SbkitError("output-exists", f"{folder} is neither {self.what} nor empty, so it is not replaced",
                             hint="choose another folder", file=folder)
        raise SbkitError("output-exists", f"{folder} has files that are not part of {self.what}: {_some(others)}, so "
                         "it is not replaced", hint="move them elsewhere, or choose another folder", file=folder)

    def remove(self, folder: Path) -> None:
        """Delete a folder of this kind, or an empty one; with files of others in it, it stays, with a warning."""
        if others := self.others(folder):
            logger.warning("%s has files that are not part of %s, so it is kept: %s", folder, self.what, _some(others))
            return
        # The record goes last, so that what a kill leaves is still known by it.
        for path in reversed([path for path in _walk(folder) if path != folder / self.record]):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
        (folder / self.record).unlink(missing_ok=True)
        folder.rmdir()

    def remove_unfinished(self, folder: Path) -> None:
        """Delete a folder of ``temporary_folder``: half written it has no record yet, later it may be the old one."""
        if self.listed(folder) is None:
            shutil.rmtree(folder)
        else:
            self.remove(folder)


def _walk(folder: Path) -> list[Path]:
    """All paths below a folder, each after the folder that it is in; links are not followed."""
    return [Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return printable(", ".join(names[:_NAMED])) + rest


@contextlib.contextmanager
def temporary_folder(to: Path, kind: FolderKind) -> Iterator[Path]:
    """Make a temporary folder on the disk of ``to``; at the end it is removed, or what ``publish`` exchanged it for."""
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
            if lock.is_at(temporary):
                shutil.rmtree(temporary, ignore_errors=True)
            elif temporary.exists():
                with contextlib.suppress(OSError):
                    kind.remove(temporary)
            lock.close()


def publish(temporary: Path, to: Path, kind: FolderKind, force: bool, keep: Path | None = None,
            ready: Callable[[], None] | None = None) -> None:
    """Move the folder to ``to`` so that the old or the new one is complete there, even after a power cut.

    force : whether a folder of this kind at ``to`` is replaced; any other one is refused
    keep : where to move the folder that is replaced, instead of the one there, which may be ``temporary`` itself
    ready : is called when the new folder is complete on the disk, before anything is moved
    """
    temporary.chmod(_PUBLISHED)
    # A few files are synced one by one; if there are many, or subfolders, the file system.
    inside = list(itertools.islice(temporary.iterdir(), _FEW + 1))
    if len(inside) > _FEW or any(path.is_dir() for path in inside):
        disk.sync_file_system(temporary)
    else:
        disk.sync_files(temporary)
    if ready is not None:
        ready()
    try:
        if not (force and to.exists()):
            os.rename(temporary, to)
        else:
            # Making the new folder may have taken an hour, in which others have put their files there.
            for path in (to, *([] if keep is None else [keep])):
                kind.check_replaceable(path)
            _replace(temporary, to, kind, keep)
    except OSError as error:
        if disk.disk_error(error):
            raise
        raise SbkitError("not-writable", f"the new version cannot be moved to {to}: {error.strerror}",
                         hint="choose another place with --to", file=to) from error
    disk.sync_folder(to.parent)


def _replace(temporary: Path, to: Path, kind: FolderKind, keep: Path | None) -> None:
    """Put ``temporary`` in the place of ``to``.

    Whatever ends this, names say which folder is which, for ``clean_up``: what is to be kept is in ``kept_meanwhile``
    from the instant in which it leaves its place.
    """
    if keep is None or keep == temporary:
        if exchange(temporary, to):
            return
    else:
        waiting = kept_meanwhile(to)
        temporary.chmod(_WAITING)
        os.rename(temporary, waiting)
        try:
            exchanged = exchange(waiting, to)
        except BaseException:
            os.rename(waiting, temporary)
            raise
        if exchanged:
            to.chmod(_PUBLISHED)
            _put_in_keep(to, kind, keep)
            return
        os.rename(waiting, temporary)
        temporary.chmod(_PUBLISHED)
    # Two renames; for a moment nothing is at ``to``.
    old = replaced(to) if keep is None else kept_meanwhile(to)
    os.rename(to, old)
    try:
        os.rename(temporary, to)
    except BaseException:
        os.rename(old, to)
        raise
    disk.sync_folder(to.parent)
    if keep is None:
        with contextlib.suppress(OSError):
            kind.remove(old)
    else:
        _put_in_keep(to, kind, keep)


def _put_in_keep(to: Path, kind: FolderKind, keep: Path) -> None:
    """Move the folder that was replaced to ``keep``, instead of the one there."""
    if keep.exists():
        kind.check_replaceable(keep)
        os.rename(keep, replaced(to))
    os.rename(kept_meanwhile(to), keep)
    disk.sync_folder(to.parent)
    if replaced(to).exists():
        with contextlib.suppress(OSError):
            kind.remove(replaced(to))


def clean_up(to: Path, kind: FolderKind) -> None:
    """Restore, finish or remove what a killed process left here, with a warning."""
    waiting = kept_meanwhile(to)  # what is to become ``previous``
    before = replaced(to)
    with contextlib.suppress(OSError):  # another process did it first, or we lack the permission
        # Killed just after the exchange. A folder of the user's own may have this bit, too, and keeps it.
        if to.is_dir() and stat.S_IMODE(to.stat().st_mode) == _WAITING and kind.listed(to) is not None:
            to.chmod(_PUBLISHED)
        if waiting.exists() and not waiting.stat().st_mode & stat.S_ISVTX:
            if to.exists():
                _put_in_keep(to, kind, previous(to))
                logger.warning("A process was killed after it replaced %s; the old version is in %s", to, previous(to))
            else:
                _restore(waiting, to)
        if before.exists() and not to.exists():
            _restore(before, to)
    leftovers = [(path, kind.remove_unfinished) for path in to.parent.glob(f".{glob.escape(to.name)}.making-*")]
    leftovers.append((before, kind.remove))
    if waiting.exists() and waiting.stat().st_mode & stat.S_ISVTX:  # complete, and never published
        leftovers.append((waiting, kind.remove))
    for left, remove in leftovers:
        with contextlib.suppress(OSError):
            if remove_unheld(left, unless_older=_DAY, remove=remove):
                logger.warning("Removed %s, left by a process that was killed", left)


def _restore(old: Path, to: Path) -> None:
    os.rename(old, to)
    disk.sync_folder(to.parent)
    logger.warning("A process was killed while it replaced %s; the old version is restored", to)


def previous(folder: str | Path) -> Path:
    """Return the path where the bundle is kept that ``sbkit improve`` replaced."""
    path = Path(folder).resolve()
    return path.with_name(f"{path.name}.previous")


def replaced(folder: str | Path) -> Path:
    """Return the path of a folder that is about to be deleted, on disks that can't exchange two folders."""
    path = Path(folder).resolve()
    return path.with_name(f".{path.name}.replaced")


def kept_meanwhile(folder: str | Path) -> Path:
    """Return the path of the old folder on its way to ``previous``."""
    path = Path(folder).resolve()
    return path.with_name(f".{path.name}.kept")


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
