"""One checkpoint on its way to the disk, and the thread that takes it there."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import PARAMFILE_EXT, Checkpoint

from sbkit.data.lock import Lock
from sbkit.train.checkpoint import files
from sbkit.train.checkpoint import state as states
from sbkit.train.distributed import ending


@dataclass
class PendingCheckpoint:
    """What a checkpoint will hold: states that still have to be written, beside the files of other hooks."""

    final: Path
    meta: dict[str, Any]
    end_of_epoch: bool
    verbosity: int
    folder: Path | None = None  # the hidden one that is written to
    names: dict[str, str] = field(default_factory=dict)  # recoverable -> its file's name
    _lock: Lock | None = None
    _states: dict[str, tuple[Any, Callable[[], None]]] = field(default_factory=dict)

    @property
    def result(self) -> Checkpoint:
        """The checkpoint that will stand."""
        return Checkpoint(self.final, self.meta, {name: self.final / file for name, file in self.names.items()})

    def begin(self) -> None:
        """Make the hidden folder."""
        self.folder, self._lock = files.begin(self.final.parent, self.final.name)

    def add(self, name: str, state: Any, copy: str | None) -> None:
        """Take the state dict of a recoverable.

        copy: what may change before it is written: "all" of it, its "numbers" but no tensor, or nothing (None)
        """
        self._states[name] = states.snapshot(state, tensors=copy == "all") if copy else (state, lambda: None)

    def write(self) -> None:
        """Write what is left and let the checkpoint appear under its name."""
        assert self.folder is not None, "it has begun"
        for name, (state, ready) in self._states.items():
            ready()
            files.write_state(state, self.folder / f"{name}{PARAMFILE_EXT}")
        files.seal(self.folder, self.meta)
        files.publish(self.folder, self.final)
        self._release()

    def discard(self) -> None:
        """Leave nothing half-written behind."""
        if self.folder is not None:
            files.remove(self.folder)
        self._release()

    def needed(self) -> int:
        """Bytes of the whole checkpoint, as far as they are known."""
        beside = 0 if self.folder is None else files.bytes_in(self.folder, but=self._states)
        return beside + sum(states.size_of(state) for state, _ in self._states.values())

    def _release(self) -> None:
        self._states.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class Writer:
    """Runs one job at a time in the background; the interpreter waits for it at exit.

    What a job raises is raised by the next ``look`` or ``settle``; if none follows, it is said at exit.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        atexit.register(_report, weakref.ref(self))

    def start(self, job: Callable[[], Any]) -> None:
        """Run ``job`` in the background."""
        self.settle()
        thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            job()
        else:
            self._thread = thread
            ending.let_finish(thread)

    def settle(self) -> None:
        """Wait for the job; raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def look(self) -> None:
        """Raise what the job raised, if it has; wait for nothing."""
        if self._error is not None:
            self.settle()

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error


def _report(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is not None and writer._error is not None:
        print(f"error: {writer._error}", file=sys.stderr, flush=True)


def plain(value: Any) -> Any:
    """A meta value as YAML has it: SpeechBrain writes a tensor or a numpy number as something it can't read.

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
