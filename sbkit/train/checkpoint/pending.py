"""A checkpoint that is being written, and the thread that writes it."""

from __future__ import annotations

import atexit
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import PARAMFILE_EXT, Checkpoint

from sbkit.data.lock import Lock
from sbkit.errors import SbkitError
from sbkit.train.batches import tensors_in
from sbkit.train.checkpoint import files
from sbkit.train.checkpoint.snapshot import snapshot
from sbkit.train.distributed import ending


@dataclass
class PendingCheckpoint:
    """The contents of a future checkpoint: states still to be written, and files that hooks have written."""

    final: Path
    meta: dict[str, Any]
    end_of_epoch: bool
    verbosity: int
    earlier: Sequence[Checkpoint] = ()  # those that are there already
    folder: Path | None = None  # the hidden folder that is written to
    names: dict[str, str] = field(default_factory=dict)  # recoverable -> its file's name
    _lock: Lock | None = None
    _states: dict[str, tuple[Any, Callable[[], None]]] = field(default_factory=dict)

    @property
    def result(self) -> Checkpoint:
        """The future checkpoint."""
        return Checkpoint(self.final, self.meta, {name: self.final / file for name, file in self.names.items()})

    def begin(self) -> None:
        """Create the hidden folder."""
        self.folder, self._lock = files.create_hidden(self.final.parent, self.final.name)

    def add(self, name: str, state: object, copy: str | None) -> None:
        """Add the state dict of a recoverable.

        copy : what to copy because it may change before it is written: "all", "numbers" (all but tensors) or None
        """
        self._states[name] = snapshot(state, tensors=copy == "all") if copy else (state, lambda: None)

    def write(self) -> None:
        """Write the remaining states and publish the checkpoint under its name."""
        assert self.folder is not None, "begin was called"
        for name, (state, ready) in self._states.items():
            ready()
            files.write_state(state, self.folder / f"{name}{PARAMFILE_EXT}")
        files.seal(self.folder, self.meta)
        files.publish(self.folder, self.final)
        self._release()

    def discard(self) -> None:
        """Delete the hidden folder and release the states."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def size(self) -> int:
        """Return the size of the checkpoint in bytes, as far as it is known."""
        written_files = [] if self.folder is None else files.files_in(self.folder)
        by_hooks = sum(file.stat().st_size for file in written_files
                       if file.name.removesuffix(PARAMFILE_EXT) not in self._states)
        to_write = sum(tensor.nbytes for state, _ in self._states.values() for _, tensor in tensors_in(state))
        return by_hooks + to_write

    def _release(self) -> None:
        self._states.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class BackgroundWriter:
    """Runs one job at a time in a background thread; the interpreter waits for it at exit.

    An error of a job sets ``failed`` and is raised by the next ``wait``, or else printed at exit.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.failed = False
        atexit.register(_report, weakref.ref(self))

    def start(self, job: Callable[[], Any]) -> None:
        """Run a job in the background, after the previous one has ended."""
        self.wait()
        thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            job()
        else:
            self._thread = thread
            ending.writing.add(thread)

    def wait(self) -> None:
        """Wait for the job, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            self.failed = False
            raise error

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
            self.failed = True


def _report(reference: weakref.ref[BackgroundWriter]) -> None:
    writer = reference()
    if writer is not None and writer._error is not None:
        error = writer._error
        print(error.shown if isinstance(error, SbkitError) else f"error: {error}", file=sys.stderr, flush=True)


def plain(value: object) -> Any:  # what YAML has for it
    """Convert a meta value to plain YAML types: SpeechBrain writes tensors and numpy numbers in a form it can't read.

    >>> import numpy as np
    >>> plain({"WER": np.float32(0.5), "shape": (2, 3)})
    {'WER': 0.5, 'shape': [2, 3]}
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, numpy numbers and arrays
        return value.tolist()
    return str(value)
