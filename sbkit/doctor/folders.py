"""Checks of folders that sbkit reads and writes: permissions, free space, speed, and files from the future."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sbkit.doctor.finding import IN_THE_WAY, NOTE, MachineFinding, note_if
from sbkit.system import disk

_LOW_DISK = 5 << 30
_BLOCK = 1 << 20
_SECONDS = 1.0  # spent on reading, and on writing
_TEST_BYTES = 256 << 20  # most bytes read, and written
#: Below this speed, 8 data workers that read FLAC wait for the disk.
_SLOW = 50e6
_SAMPLED_FILES = 2000  # most files sampled from a data folder
_MAX_CLOCK_SKEW = 60.0  # seconds: tolerated clock difference of machines that share a folder


def caches() -> Iterator[MachineFinding]:
    """Check the caches of sbkit, torch's compiler and Hugging Face, and the temporary folder."""
    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton"
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    for what, folder, variable in (("sbkit's cache", disk.cache_folder(), "SBKIT_CACHE"),
                                   ("Triton's cache", Path(triton), "TRITON_CACHE_DIR"),
                                   ("Hugging Face", Path(hub), "HF_HOME"),
                                   ("temporary", Path(tempfile.gettempdir()), "TMPDIR")):
        free = disk.free(folder)
        if not os.access(disk.nearest_folder(folder), os.W_OK | os.X_OK):
            yield MachineFinding(what, f"{folder} can't be written", NOTE,
                                 f"export {variable}=FOLDER, with a writable folder")
        else:
            yield note_if(free < _LOW_DISK, what, f"{folder}, {_gib(free)} free",
                          f"make room, or export {variable}=FOLDER")


def data(place: Path) -> Iterator[MachineFinding]:
    """Check that a corpus exists, and measure how fast it is read."""
    if not place.exists():
        yield MachineFinding("data", f"{place} does not exist", IN_THE_WAY, "give --data an existing folder or file")
        return
    # Read files across the folder for a second.
    paths = [place] if place.is_file() else list(islice(_files(place), _SAMPLED_FILES))
    step = max(1, len(paths) // 200)
    began, read, files = time.perf_counter(), 0, 0
    for each in paths[::step]:
        try:
            with open(each, "rb", buffering=0) as source:
                while (block := source.read(_BLOCK)) and read < _TEST_BYTES and time.perf_counter() - began < _SECONDS:
                    read += len(block)
            files += 1
        except OSError:
            continue
        if read >= _TEST_BYTES or time.perf_counter() - began >= _SECONDS:
            break
    seconds = time.perf_counter() - began
    if not files:
        yield MachineFinding("data", f"{place}: no file in it can be read", IN_THE_WAY,
                             "is it the right folder, and may this user read it?")
        return
    speed = read / max(seconds, 1e-6)
    yield note_if(speed < _SLOW and seconds > 0.2, "data",
                  f"{place}: {speed / 1e6:.0f} MB/s, {files / max(seconds, 1e-6):.0f} files/s, one reader (cached "
                  "files are faster)",
                  "sbkit shard packs many small files into few large ones; or copy the data to a local disk")


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def output(folder: Path) -> Iterator[MachineFinding]:
    """Check the output folder of runs."""
    if not os.access(disk.nearest_folder(folder), os.W_OK | os.X_OK):
        yield MachineFinding("output", f"{folder} can't be written", IN_THE_WAY,
                             "give --output_folder a writable folder")
        return
    block, written, began = os.urandom(_BLOCK), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=disk.nearest_folder(folder), buffering=0) as file:
        while written < _TEST_BYTES / 4 and time.perf_counter() - began < _SECONDS / 2:
            written += file.write(block)
        os.fsync(file.fileno())  # so that these bytes reached the disk
    speed, free = written / (time.perf_counter() - began), disk.free(folder)
    low = free < _LOW_DISK
    yield note_if(low or speed < _SLOW, "output", f"{folder}: {_gib(free)} free, writes {speed / 1e6:.0f} MB/s",
                  "a checkpoint needs three times its model's size: make room" if low else
                  "checkpoints are slow: use a local disk, or a longer ckpt_interval_minutes")


def time_stamps(run: Path) -> Iterator[MachineFinding]:
    """Check a run for files from the future: a clock was set back, or the machines' clocks differ."""
    if not run.is_dir():
        yield MachineFinding("run", f"{run} does not exist", IN_THE_WAY, "give --run the output folder of a run")
        return
    newest = max((path.lstat().st_mtime for path in islice(_files(run), _SAMPLED_FILES)), default=0.0)
    ahead = newest - time.time()
    wrong = ahead > _MAX_CLOCK_SKEW
    found = (f"the newest file of {run} is {ahead / 60:.0f} min in the future" if wrong else
             f"no file of {run} is in the future" if newest else f"{run} is empty")
    yield note_if(wrong, "clock", found,
                  "set this machine's clock (timedatectl): it decides which checkpoint is the newest")


def _gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB" if size >= 10 << 30 else f"{size / 2**30:.1f} GiB"
