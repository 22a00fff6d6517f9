"""Checkpoint folders on disk: each is complete or absent, because it is written elsewhere, synced and renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import yaml
from speechbrain.utils.checkpoints import CKPT_PREFIX, METAFNAME, PARAMFILE_EXT, Checkpoint
from speechbrain.utils.distributed import get_rank

from sbkit.data.lock import Lock, remove_unheld
from sbkit.errors import SbkitError, first_line, shown
from sbkit.system import disk

logger = logging.getLogger(__name__)

# Checksums. SpeechBrain writes none, and ignores them: it reads only *.ckpt and CKPT.yaml.
SUMS_NAME = f"{CKPT_PREFIX}.sums.json"
WRITING, REPLACED, DELETED = ".tmp-", ".old-", ".del-"  # prefixes of hidden folders, which are never listed
CHUNK = 1 << 22
DAY = 24 * 3600.0
PATIENCE = 2.0  # seconds to wait for another process that tidies up
STOPPING_PATIENCE = 5.0  # seconds: a process that was just stopped may still be saving


class CheckpointError(SbkitError, RuntimeError):
    """An ``SbkitError`` of checkpoints; also a ``RuntimeError``, which SpeechBrain raises here."""


# ---------------------------------------------------------------- writing


def create_hidden(folder: Path, name: str) -> tuple[Path, Lock]:
    """Create the hidden folder for writing checkpoint ``name``; return it and its lock.

    The lock distinguishes a folder of a killed run from one that another process is writing, which is an error: two
    runs would write the same checkpoint.
    """
    path = folder / f"{WRITING}{name}"
    os.makedirs(folder, exist_ok=True)
    until = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process was faster
            if path.exists():
                remove_unheld(path)
            os.mkdir(path)
            lock = Lock(path)
            if lock.acquire() is not False and lock.is_at(path):
                return path, lock
            lock.close()
        if time.monotonic() > until:
            raise CheckpointError("folder-in-use",
                                  f"the checkpoint {folder / name} is being written by another process",
                                  hint="give each run its own output_folder", file=folder)
        time.sleep(0.1)


def write_state(state: object, path: str | os.PathLike[str]) -> None:
    """Save a state through a Python file, so that a full disk is an OSError and other threads can run."""
    with open(path, "wb") as out:
        torch.save(state, out)


def seal(folder: Path, meta: dict[str, Any]) -> None:
    """Sync every file of a folder to disk, then write their checksums and, last, ``CKPT.yaml``."""
    sums = {}
    for file in files_in(folder):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
            sums[file.relative_to(folder).as_posix()] = {
                "bytes": os.fstat(handle.fileno()).st_size, "blake2b": _digest(handle),
            }
    for name, text in ((SUMS_NAME, json.dumps({"files": sums}, indent=1, sort_keys=True)),
                       (METAFNAME, "# yamllint disable\n" + yaml.safe_dump(meta))):
        with open(folder / name, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    for inner in sorted({file.parent for file in files_in(folder)} | {folder}):
        disk.sync_folder(inner)


def publish(written: Path, final: Path) -> None:
    """Rename a sealed folder to its final name, replacing one that exists."""
    replaced = None
    if final.exists():
        replaced = final.with_name(f"{REPLACED}{final.name}")
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(final, replaced)  # after a kill between the two renames, sweep undoes this one
    try:
        os.rename(written, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    disk.sync_folder(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def delete(path: Path) -> None:
    """Delete a checkpoint, by renaming it first, so that it disappears at once."""
    hidden = path.with_name(f"{DELETED}{path.name}")
    if hidden.exists():
        shutil.rmtree(hidden)
    os.rename(path, hidden)
    disk.sync_folder(path.parent)
    shutil.rmtree(hidden)


def sweep(folder: Path) -> list[str]:
    """Remove what a killed run was writing or deleting; return the names of removed folders."""
    removed = []
    for path in sorted(folder.glob(".*")):
        name = path.name
        if not name.startswith((WRITING + CKPT_PREFIX, REPLACED + CKPT_PREFIX, DELETED + CKPT_PREFIX)):
            continue
        checkpoint_name = name[len(WRITING):]  # the prefixes have the same length
        final = path.with_name(checkpoint_name)
        writing = path.with_name(WRITING + checkpoint_name)
        try:
            if name.startswith(REPLACED):
                if writing.exists():
                    with Lock(writing) as lock:
                        if lock.acquire(shared=True) is False:  # another run is between its two renames
                            continue
                if not final.exists():
                    os.rename(path, final)
                    continue
            if remove_unheld(path, unless_older=DAY if path == writing else 0.0):
                removed.append(name)
        except OSError as error:  # a read-only folder, or another process was faster
            logger.debug("could not remove %s: %s", path, error)
    return removed


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and those below it."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(handle: BinaryIO) -> str:
    digest = hashlib.blake2b(digest_size=16)
    while chunk := handle.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def locked_for_training(folder: Path) -> Iterator[None]:
    """Lock a folder of checkpoints inside this context; raise an error if another process trains with them."""
    until = time.monotonic() + STOPPING_PATIENCE
    with Lock(folder) as lock:
        while lock.acquire() is False:
            if time.monotonic() > until:
                raise SbkitError("folder-in-use", f"another process is training with the checkpoints in {folder}",
                                 hint="wait until it ends, or choose another folder for this one", file=folder)
            time.sleep(0.1)
        yield


# ---------------------------------------------------------------- reading


def readable_checkpoints(folders: Iterable[Path]) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return the checkpoints in these folders, and for unreadable ones the reason."""
    readable: list[Checkpoint] = []
    unreadable: dict[Path, str] = {}
    for path in folders:
        try:
            meta = yaml.safe_load((path / METAFNAME).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            unreadable[path] = f"its {METAFNAME} can't be read ({first_line(error)})"
            continue
        if not isinstance(meta, dict):
            unreadable[path] = f"its {METAFNAME} is empty or cut off"
        elif not isinstance(meta.get("unixtime"), (int, float)):
            unreadable[path] = f"its {METAFNAME} has no unixtime"
        else:
            with contextlib.suppress(FileNotFoundError):  # another process deleted it after it was listed
                states = {file.stem: file for file in path.iterdir() if file.suffix == PARAMFILE_EXT}
                readable.append(Checkpoint(path, meta, states))
    return readable, unreadable


def damage(path: Path) -> str | None:
    """Describe what is wrong with the files of a checkpoint; None if nothing is.

    Compares checksums, if there are any. Checkpoints by SpeechBrain have none; in them, empty files and damaged
    archives are found (archives have a CRC for each tensor).
    """
    try:
        sums_file = path / SUMS_NAME
        if sums_file.is_file():
            return _damage_by_sums(path, json.loads(sums_file.read_text(encoding="utf-8"))["files"])
        damages = map(_damage_of_file, filter(Path.is_file, sorted(path.glob(f"*{PARAMFILE_EXT}"))))
        return next(filter(None, damages), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it can't be read ({error})"


def _damage_by_sums(path: Path, sums: dict[str, Any]) -> str | None:
    """Describe how the files of a checkpoint differ from their recorded sizes and checksums; None if they don't."""
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():  # or it is a pipe, which would be waited for
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {shown(expected['bytes'])}"
        with open(file, "rb") as handle:
            if _digest(handle) != expected["blake2b"]:
                return f"{name} does not match its checksum"
    return None


def _damage_of_file(file: Path) -> str | None:
    """Describe what is visibly wrong with a file that has no recorded checksum; None if nothing is."""
    with open(file, "rb") as handle:
        head = handle.read(4)
    if not head:
        return f"{file.name} is empty"
    if head != b"PK\x03\x04":
        return None  # text or another format, which only its loader can check
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error) as error:
        return f"{file.name} is cut off or damaged ({error})"
    return f"{file.name} is damaged (at {shown(broken)})" if broken else None


def wait_for(path: Path, seconds: float) -> None:
    """Wait for a folder on a network disk that another machine created."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= deadline:
            raise CheckpointError("folder-not-shared", f"rank {get_rank() or 0} does not see the checkpoint {path}",
                                  hint="the output folder must be on a disk that all machines share", file=path)
        time.sleep(0.5)
