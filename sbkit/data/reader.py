"""Reading, augmenting and encoding micro-batches in worker processes, and the life of such a process."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from sbkit.data.audio import AudioError, prefetch, read_utterance
from sbkit.data.augment import Augment
from sbkit.data.batch import DUMMY_ID, FULL_SCALE, SAMPLE_RATE, Batch, dummy_batch
from sbkit.data.columns import BatchColumns
from sbkit.data.manifest import Manifest
from sbkit.data.nonspeech import UNDER, NonSpeech
from sbkit.data.plan import unit_of
from sbkit.data.shapes import Shape
from sbkit.errors import SbkitError, shown

#: The row's own recording, among the columns of signals.
_RECORDING = ""
#: Seconds that a worker continues after SIGTERM, so that its run can stop in an orderly way.
SECONDS_AFTER_SIGTERM = 20


class SupportsEncode(Protocol):
    """The part of a tokenizer that a loader uses."""

    def encode(self, text: str) -> list[int]: ...


class ReadRequest(NamedTuple):
    """A micro-batch to read: its place in the epoch and its rows of the manifest."""

    epoch: int
    step: int
    micro: int
    micros: int
    rows: np.ndarray
    pass_numbers: np.ndarray | int = 0
    """Which time the run uses each row; each time it is augmented differently."""
    shape: Shape | None = None
    """What the batch is padded to; None: its own shape, rounded."""


class Reader(Dataset[Any]):
    """Dataset that reads one micro-batch per request, in a worker process.

    round_to: batches are padded to a multiple of this many samples (short ones to a half of it and so on), unless they
        would then have more than ``max_samples`` samples in total; 0: no rounding
    least: minimum number of utterances in a batch; if fewer can be read, it becomes a dummy batch, and one that is
        padded to a shape has only rows that aren't real
    columns: further columns of a batch
    nonspeech: makes the rows that it has added to the manifest
    as_stored: leave signals int16 if all of a batch are stored so and nothing changes them; a device converts them
    """

    def __init__(self, manifest: Manifest, tokenizer: SupportsEncode | None, *, augment: Augment | None = None,
                 seed: int = 0, sample_rate: int = SAMPLE_RATE, round_to: int = 0, max_samples: int = 0,
                 columns: BatchColumns | None = None, least: int = 1, nonspeech: NonSpeech | None = None,
                 as_stored: bool = False):
        self.columns = columns or BatchColumns({})
        self._seconds = {name: manifest.seconds(name)
                         for name, column in self.columns.signals.items() if not column.aligned}
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.augment = augment
        self.seed = seed
        self.sample_rate = sample_rate
        self.round_to = round_to
        self.max_samples = max_samples
        self.least = least
        self.nonspeech = nonspeech
        # Stages of augmentation, and columns that share or join recordings, need float32 to compute with.
        self.as_stored = as_stored and not self.columns.signals and (augment is None or not augment.stages)
        # Where rows are segments, their recordings go on.
        self._whole_recordings = not manifest.starts.any()
        self._goes_on: list[tuple[str, str]] = []  # of the batch that is being read
        self.reading = torch.full((1,), -1)
        """The row that each worker process read last, in shared memory."""
        if augment is not None:
            augment.check()
            augment.set_sample_rate(sample_rate)
        self._sharded = len(manifest) > 0 and "?offset=" in manifest.wavs[0] and hasattr(os, "posix_fadvise")

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, request: ReadRequest) -> Batch | Failure:
        try:
            return self.read(request)
        except SbkitError as error:
            return Failure(error, None)
        except Exception as error:  # raised in the main process, with this traceback
            cause = (f"reading a batch failed (epoch {request.epoch}, step {request.step}): {type(error).__name__}: "
                     f"{error}")
            return Failure(SbkitError("task-code-failed", cause), traceback.format_exc())

    def read(self, request: ReadRequest) -> Batch:
        """Read the batch of a request; recordings that can't be read are left out and named in ``batch.damaged``."""
        shape = request.shape
        place: dict[str, Any] = {"step": request.step, "micro": request.micro, "micros": request.micros}
        rows = self._read_rows(request)
        # With too few utterances, none counts.
        count = len(rows.ids) if len(rows.ids) >= self.least else 0
        if shape is None and count == 0:
            dummy = dummy_batch(utterances=self.least, tokens=self.tokenizer is not None, sample_rate=self.sample_rate,
                                **place)
            further = self.columns.dummy(dummy.signals, dummy.signal_lengths)
            return dataclasses.replace(dummy, damaged=rows.damaged, goes_on=rows.goes_on, **further)
        if shape is not None:
            self._fill(rows, count, shape)

        signals = [recordings[0] for recordings in rows.signals]
        is_int16 = self.as_stored and all(signal.dtype == np.int16 for signal in signals[:count])
        signals = [_as_int16(signal) if is_int16 else _as_float32(signal) for signal in signals]
        lengths = [len(signal) for signal in signals]
        width = self._width(lengths, shape)

        def pad(others: Sequence[np.ndarray]) -> torch.Tensor:
            return _pad(others, torch.float32, self._width([len(signal) for signal in others], shape))

        signals_of = {name: [recordings[i] for recordings in rows.signals]
                      for i, name in enumerate(self.columns.signals, 1)}
        further = self.columns.of_rows(rows.texts_of, signals_of, count, pad)

        tokens = self._encoded(rows, count)
        padded_tokens = _pad(tokens, torch.int64, shape.tokens if shape else 0)
        beyond_shape = shape is not None and (
            max(lengths) > width or padded_tokens.shape[1] > shape.tokens or len(rows.ids) > shape.rows)
        return Batch(
            ids=rows.ids, signals=_pad(signals, torch.int16 if is_int16 else torch.float32, width),
            signal_lengths=torch.tensor(lengths), tokens=padded_tokens, beyond_shape=beyond_shape,
            token_lengths=torch.tensor([len(ids) for ids in tokens]), real=torch.arange(len(rows.ids)) < count,
            texts=rows.texts, damaged=rows.damaged, goes_on=rows.goes_on, samples=sum(lengths[:count]),
            sample_rate=self.sample_rate, **place, **further,
        )

    def _read_rows(self, request: ReadRequest) -> _Rows:
        """Read the rows of a request, except those that are damaged."""
        rows = _Rows(texts_of={name: [] for name in self.columns.texts})
        self._goes_on = rows.goes_on
        indices = request.rows.tolist()
        pass_numbers = np.broadcast_to(request.pass_numbers, len(indices)).tolist()
        if self._sharded:
            prefetch(self.manifest.wavs[row] for row in indices)
        for row, pass_number in zip(indices, pass_numbers, strict=True):
            id_ = self.manifest.ids[row]
            try:
                signals = self.signals(row, id_, pass_number, self.as_stored)
            except AudioError as error:
                rows.damaged.append((id_, str(error)))
                continue
            rows.ids.append(id_)
            rows.texts.append(self.manifest.texts[row])
            rows.signals.append(signals)
            for column, texts in rows.texts_of.items():
                texts.append(self.columns.text(self.manifest, column, row))
        return rows

    def _fill(self, rows: _Rows, count: int, shape: Shape) -> None:
        """Keep the first ``count`` rows, and add dummy rows up to those of a shape."""
        missing = max(0, shape.rows - count)
        dummy = dummy_batch(utterances=self.least, tokens=self.tokenizer is not None, sample_rate=self.sample_rate)
        signal = dummy.signals[0, :shape.samples(self.sample_rate)].numpy()
        rows.ids = rows.ids[:count] + [DUMMY_ID] * missing
        rows.texts = rows.texts[:count] + [""] * missing
        rows.signals = rows.signals[:count] + [[signal] * (1 + len(self.columns.signals))] * missing
        for name, texts in rows.texts_of.items():
            rows.texts_of[name] = texts[:count] + [self.columns.texts[name].dummy] * missing

    def _encoded(self, rows: _Rows, count: int) -> list[list[int]]:
        """The tokens of each row: of the first ``count`` those of their texts, of dummy rows one."""
        if self.tokenizer is None:
            return [[] for _ in rows.ids]
        tokens = []
        for id_, text in zip(rows.ids[:count], rows.texts[:count], strict=True):
            try:
                tokens.append(self.tokenizer.encode(text))
            except Exception as error:  # the task's own code
                raise SbkitError("task-code-failed", f"{type(self.tokenizer).__name__}.encode failed on the text of "
                                 f"{id_}, {shown(text)}: {type(error).__name__}: {error}", value=id_) from error
        return tokens + [[1] for _ in rows.ids[count:]]

    def _width(self, lengths: list[int], shape: Shape | None) -> int:
        """The number of samples to which each row of the batch is padded."""
        if shape is not None:
            return shape.samples(self.sample_rate)
        longest = max(lengths)
        unit = max(1, int(unit_of(longest, self.round_to))) if self.round_to else 1
        rounded = -(-longest // unit) * unit
        return rounded if rounded * len(lengths) <= self.max_samples else longest

    def signals(self, row: int, name: str, pass_number: int, as_stored: bool = False) -> list[np.ndarray]:
        """Read the waveforms of one utterance, ``[S]`` float32 each, augmented for this pass: its recording, and those
        of the columns of signals. A recording may be int16 if it is ``as_stored``."""
        manifest = self.manifest
        worker = torch.utils.data.get_worker_info()
        self.reading[worker.id if worker else 0] = row
        start = float(manifest.starts[row])
        duration = float(manifest.durations[row])
        rng = None
        speed = 1.0
        if self.augment is not None:
            rng = self.augment.rng(self.seed, pass_number, name)
            speed = self.augment.speed(rng)

        recording = self._recording(row, name, pass_number, speed, as_stored)
        aligned = {_RECORDING: recording}
        others = {}
        for other, column in self.columns.signals.items():
            if not column.aligned:
                others[other] = self._read(manifest.column(other)[row], 0.0, float(self._seconds[other][row]))
            elif column.or_recording and other not in manifest.meta:
                aligned[other] = recording.copy()
            else:
                aligned[other] = self._read(manifest.column(other)[row], start, duration, speed)

        shortest = min(map(len, aligned.values()))  # their files may differ by some samples
        signals = [signal[:shortest] for signal in aligned.values()]
        if self.augment is not None and rng is not None:
            signals = self.augment.together(signals, rng)
        by_column = others | dict(zip(aligned, signals, strict=True))
        return [by_column[column] for column in (_RECORDING, *self.columns.signals)]

    def _recording(self, row: int, name: str, pass_number: int, speed: float, as_stored: bool) -> np.ndarray:
        """Read a row's recording; with ``nonspeech``, make what is heard in a row without one, or under a recording."""
        manifest = self.manifest
        duration = float(manifest.durations[row])

        def note_rest(recorded: float) -> None:
            what = f"its row says {duration:.2f} s, but {manifest.wavs[row]} has {recorded:.2f} s"
            self._goes_on.append((name, what))

        # Preparation compares some rows with their recordings; here it costs nothing to compare all.
        note = note_rest if self._whole_recordings else None
        if self.nonspeech is None:
            return self._read_row(row, speed, as_stored, note)

        rng = Augment.rng(self.seed, pass_number, f"{name} silence")
        heard_rows = self.nonspeech.rows_of(manifest.wavs[row])
        if heard_rows:  # the row is made
            like, *spoken = heard_rows
            size = round(duration / speed * self.sample_rate)
            utterances = [self._read_row(spoken_row, speed) for spoken_row in spoken]
            return self.nonspeech.signal(size, self.sample_rate, rng, utterances, lambda: self._read_row(like, speed))

        is_under = rng.random() < self.nonspeech.under
        recording = self._read_row(row, speed, as_stored and not is_under, note)
        if not is_under:
            return recording
        return self.nonspeech.signal(len(recording), self.sample_rate, rng, [recording], lambda: recording, UNDER)

    def _read_row(self, row: int, speed: float, as_stored: bool = False,
                  goes_on: Callable[[float], None] | None = None) -> np.ndarray:
        manifest = self.manifest
        return self._read(manifest.wavs[row], float(manifest.starts[row]), float(manifest.durations[row]), speed,
                          as_stored, goes_on)

    def _read(self, wav: str, start: float, duration: float, speed: float = 1.0, as_stored: bool = False,
              goes_on: Callable[[float], None] | None = None) -> np.ndarray:
        return read_utterance(wav, start, duration, sample_rate=self.sample_rate, speed=speed,
                              remote=self.manifest.remote, as_stored=as_stored, goes_on=goes_on)


@dataclass
class _Rows:
    """The rows of a batch, before they are padded."""

    texts_of: dict[str, list[str]]
    """The texts in each further column of texts."""
    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    signals: list[list[np.ndarray]] = field(default_factory=list)
    """Of each row its recording, then those of the columns of signals."""
    damaged: list[tuple[str, str]] = field(default_factory=list)
    goes_on: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Failure:
    """An error in a worker that the main process raises."""

    error: SbkitError
    traceback: str | None


def _as_int16(signal: np.ndarray) -> np.ndarray:
    """A signal as it is stored; only rows that fill a shape are float32."""
    return signal if signal.dtype == np.int16 else np.rint(signal * FULL_SCALE).astype(np.int16)


def _as_float32(signal: np.ndarray) -> np.ndarray:
    return np.divide(signal, FULL_SCALE, dtype=np.float32) if signal.dtype == np.int16 else signal


def _pad(rows: Sequence[np.ndarray | list[int]], dtype: torch.dtype, width: int = 0) -> torch.Tensor:
    """Pad rows with 0 to ``[B, width]``, or wider if a row is longer; in a worker, directly in shared memory."""
    shape = (len(rows), max(width, *map(len, rows)))
    in_worker = torch.utils.data.get_worker_info() is not None and shape[1] > 0
    if in_worker and hasattr(os, "memfd_create"):
        return _pad_in_file(rows, dtype, shape)
    if in_worker:
        storage = torch.UntypedStorage._new_shared(shape[0] * shape[1] * dtype.itemsize)
        padded = torch.empty(0, dtype=dtype).set_(storage, 0, shape, (shape[1], 1))
    else:
        padded = torch.zeros(shape, dtype=dtype)
    view = padded.numpy()
    for i, row in enumerate(rows):
        view[i, : len(row)] = row
    return padded


def _pad_in_file(rows: Sequence[np.ndarray | list[int]], dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    """Pad rows with 0 in a file in memory, which the main process maps.

    They are written as into any file, since the kernel zeroes each page of a mapping before it is overwritten. What
    isn't written reads as 0.
    """
    size = shape[0] * shape[1] * dtype.itemsize
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    file = os.memfd_create("batch")
    try:
        os.ftruncate(file, size)
        for i, row in enumerate(rows):
            data = np.ascontiguousarray(row, kind)
            if os.pwrite(file, data.data, i * shape[1] * kind.itemsize) < data.nbytes:
                raise MemoryError("no memory is left for a batch")
        untyped: Any = torch.UntypedStorage  # with a method that its types lack
        storage = untyped._new_shared_fd_cpu(file, size)
    finally:
        os.close(file)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, (shape[1], 1))


#: Signals that whole process groups get, but only the run should handle.
GROUP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Block signals in worker processes that start in this context, until :func:`init_worker` handles them.

    Otherwise Ctrl-C would kill a worker that is still starting, and its run would wait for it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(run: BaseProcess) -> None:
    run.join()
    os._exit(0)


def init_worker(worker: int) -> None:
    """Set up a worker process: it ignores Ctrl-C, survives SIGTERM for a while, and ends when its run ends.

    Ctrl-C and SIGTERM reach whole process groups, but the run decides when its workers end. Torch's watchdog watches
    the current parent process, which need not be the run.
    """
    run = multiprocessing.parent_process()
    assert run is not None, "this is a worker"
    if multiprocessing.get_start_method() != "forkserver" and os.getppid() != run.pid:
        os._exit(0)  # the run was killed meanwhile; the thread below may not notice if others it forked live
    threading.Thread(target=_end_with, args=(run,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's warning to the run
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the run's terminal
    # Exit code 0: torch raises an error in the run, wherever it is, when a worker is killed.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(SECONDS_AFTER_SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
