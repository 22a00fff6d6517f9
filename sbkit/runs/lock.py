"""Lock on an output folder: one run at a time. The holder is recorded there, with facts that show that it is alive.

``.held-1.json`` in the folder gives host, process, command and time. The next holder creates a file with the next
number, which only one process can do: two that find a dead holder at the same time can't both take over. Whether a
holder is alive is decided by the first of these that gives an answer:

- a kernel lock on the file, released when the process ends; other machines see it too if NFS passes it on;
- the holder's process, on the same machine;
- the modification time of the file, which the holder renews every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

from sbkit.data.lock import Lock
from sbkit.errors import SbkitError
from sbkit.score.run_files import DEAD_AFTER, HELD
from sbkit.system import disk, processes
from sbkit.system.console import remove_partials
from sbkit.system.environment import command
from sbkit.train.distributed import ending, ranks

logger = logging.getLogger(__name__)

BEAT = 10.0  # seconds between heartbeats
#: Seconds until a holder that is waited for is told, and until a run that doesn't end is an error: one that was just
#: stopped may still be saving.
TOLD_AFTER, PATIENCE = 5.0, 60.0
_POLL_SECONDS = 0.2
_LONGEST = 200  # characters of a command that are shown


class RunLock:
    """Context in which only this process, or the job that it belongs to, writes into a run's folder.

    Rank 0 holds the lock for all ranks. Another run is an error; a preparation is waited for.

    folder : the run's folder
    runs : whether the holder is a run or only a preparation
    option : which names the folder
    """

    def __init__(self, folder: Path, runs: bool = True, option: str = "--output_folder"):
        self.folder = folder
        self.option = option
        self._facts = {
            "host": socket.gethostname(), "pid": os.getpid(), "born": processes.born(os.getpid()),
            "machine": processes.machine(), "namespace": processes.namespace(),
            "runs": runs, "command": command(),
        }
        self._number = 0
        self._lock: Lock | None = None
        self._over = threading.Event()

    def __enter__(self) -> RunLock:
        ranks.run_on_main(self._acquire)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None and self._lock.handle is not None:  # else another rank, or a fork of this process
            ending.finish_writing()
            self._over.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                self._write(ended=time.time())
            self._lock.close()

    # ------------------------------------------------------------ taking it

    def _acquire(self) -> None:
        with disk.writing_into(self.folder, self.option):
            self.folder.mkdir(parents=True, exist_ok=True)
            while not self._follow(self._newest()):  # another process was quicker, or has removed its new folder again
                self.folder.mkdir(parents=True, exist_ok=True)
            remove_partials(self.folder)
        self._thread = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._thread.start()

    def _newest(self) -> int:
        """The number of the folder's last holder, 0 if there was none."""
        numbers = (path.name.split("-")[1].removesuffix(".json") for path in self.folder.glob(HELD.format("*")))
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def _path(self, number: int) -> Path:
        return self.folder / HELD.format(number)

    def _follow(self, before: int) -> bool:
        """Take the folder once its holder ``before`` has ended; False if another process did."""
        if before:
            self._wait_for_end(_LockHolder(self._path(before)))
        path = self._path(before + 1)
        try:
            lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except (FileExistsError, FileNotFoundError):
            return False
        self._lock = lock
        self._number = before + 1
        try:
            self._facts["locked"] = bool(lock.acquire(wait=True))  # others lock it only for a moment, to check
            self._write(since=time.strftime("%Y-%m-%d %H:%M:%S"))
            is_alone = self._newest() == self._number  # otherwise another one has held it meanwhile
        except BaseException:
            self._release()
            raise
        if not is_alone:
            self._release()
            return False
        for number in range(self._number):
            self._path(number).unlink(missing_ok=True)
        return True

    def _wait_for_end(self, holder: _LockHolder) -> None:
        """Wait until a holder has ended; raise if it is a run that doesn't end soon."""
        began = time.monotonic()
        has_warned = False
        while holder.alive is not False:
            waited = time.monotonic() - began
            is_run = holder.alive and holder.facts.get("runs", True)
            if is_run and waited > PATIENCE:
                raise SbkitError("folder-in-use", f"{self.folder} is in use by another run: {holder}",
                                 hint=f"wait for it, end it, or choose another place with {self.option}",
                                 file=self.folder)
            if not has_warned and waited > TOLD_AFTER:
                has_warned = True
                if is_run:
                    what = f"is training there, waiting {PATIENCE:.0f} s for its end"
                elif holder.alive:
                    what = "is working there, waiting for it"
                else:
                    what = "held it, waiting to see whether it still runs"
                logger.warning("%s: %s %s", self.folder, holder, what)
            time.sleep(_POLL_SECONDS)
            holder.refresh()

    @property
    def _held(self) -> Lock:
        assert self._lock is not None, "it is held"
        return self._lock

    def _release(self) -> None:
        self._path(self._number).unlink(missing_ok=True)
        self._held.close()
        self._lock = None

    def _write(self, **more: Any) -> None:
        self._facts |= more
        text = json.dumps(self._facts, indent=1).encode()
        os.ftruncate(self._held.descriptor, 0)
        os.pwrite(self._held.descriptor, text, 0)
        os.fsync(self._held.descriptor)

    # ------------------------------------------------------------ holding it

    def _renew(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):  # the disk may be unreachable for a moment
                newest = self._newest()
                # Another process has taken the folder, or a new folder of the same name.
                if newest > self._number or (newest == self._number and not self._held.is_at(self._path(newest))):
                    ending.exit_with_error(
                        "folder-in-use", f"{self.folder} was taken over by another run, because this one had not "
                        f"renewed its lock for {DEAD_AFTER:g} s; this run ends here")
                os.utime(self._held.descriptor)


class _LockHolder:
    """The holder of a folder, as read from its file.

    alive : whether the holder is alive; None if only time can tell
    """

    def __init__(self, path: Path):
        self.path = path
        self.facts: dict[str, Any] = {}
        self.alive: bool | None = None
        self._first: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the file again and update ``alive``."""
        try:
            with Lock(self.path) as lock:
                free = lock.acquire(shared=True)
                try:
                    self.facts = dict(json.loads(self.path.read_text(encoding="utf-8")))
                except ValueError:  # the holder has just started
                    self.facts = {}
                self.alive = self._is_alive(free, os.fstat(lock.descriptor).st_mtime_ns)
        except FileNotFoundError:  # another process has taken the folder
            self.alive = False

    def _is_alive(self, free: bool | None, beat: int) -> bool | None:
        if free is False:
            return True
        if "ended" in self.facts:
            return False
        if self.facts.get("machine") == processes.machine():
            if self.facts["locked"] and free:
                return False
            if self.facts["namespace"] == processes.namespace():
                return processes.born(self.facts["pid"]) == self.facts["born"]
        with tempfile.TemporaryFile(dir=self.path.parent) as file:  # by the file system's clock: machines' may differ
            now = os.fstat(file.fileno()).st_mtime_ns
        if abs(now - beat) > DEAD_AFTER * 1e9:
            return False
        self._first = self._first or beat
        return True if beat != self._first else None

    def __str__(self) -> str:
        if not self.facts:
            return "a process that has just started"
        shown = textwrap.shorten(self.facts["command"], _LONGEST, placeholder=" ...")
        return f"process {self.facts['pid']} on {self.facts['host']} since {self.facts['since']} ({shown})"
