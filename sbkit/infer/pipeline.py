"""Many recordings through one engine: threads read and cut, chunks of like length share a batch, words come out."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.decode.best_path import best_path
from sbkit.decode.spans import collapse
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.engine import Engine
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import Transcript

_BATCHES_WAITING = 4  # chunks of so many batches are looked at to find those of like length
_BATCHES_RUNNING = 2  # one that runs, and one that waits for it


@dataclass
class Options:
    """How recordings are cut up and put together.

    batch_seconds : audio in one batch, padding counted; None for what suits the device
    chunk_seconds : the longest that the model hears at once; None for what it was trained on
    readers : threads that decode audio
    """

    batch_seconds: float | None = None
    chunk_seconds: float | None = None
    readers: int = 2


class Done(NamedTuple):
    """A recording's transcript, or why there is none."""

    index: int
    transcript: Transcript | None
    error: AudioError | None


class _Read(NamedTuple):
    """What a reader hands over: a chunk, or the number of chunks or the error that a recording ended with."""

    index: int
    number: int
    chunk: Chunk | None
    error: BaseException | None = None


@dataclass
class _Heard:
    """The frames of one recording as they come in."""

    parts: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """By the number of the chunk: labels [T] and their probabilities [T]."""
    samples: int = 0
    expected: int | None = None

    @property
    def whole(self) -> bool:
        return self.expected is not None and len(self.parts) == self.expected


class Pipeline:
    """Transcribes recordings, in any order that is fast; memory does not grow with their length."""

    def __init__(self, engine: Engine, options: Options | None = None):
        self.engine, self.options = engine, options or Options()
        config = engine.config
        gpu = engine.running.device != "cpu"
        self._chunk_seconds = self.options.chunk_seconds or config.chunk_seconds
        # A CPU is slower on batches that outgrow its caches; a GPU idles on batches that don't fill it.
        budget = self.options.batch_seconds or (480.0 if gpu else 20.0)
        self._budget = max(budget, self._chunk_seconds) * config.sample_rate
        self._frame = config.hop_samples * config.subsampling

    def run(self, recordings: Sequence[Recording]) -> Iterator[Done]:
        """Each recording's result, as soon as it is there."""
        if not recordings:
            return
        stop = threading.Event()
        room = max(8, int(_BATCHES_WAITING * self._budget / (self._chunk_seconds * self.engine.config.sample_rate)))
        read: queue.Queue[_Read | None] = queue.Queue(room)
        turn = iter(range(len(recordings)))
        lock = threading.Lock()
        readers = [threading.Thread(target=self._read, args=(recordings, turn, lock, read, stop), daemon=True)
                   for _ in range(max(1, min(self.options.readers, len(recordings))))]
        for reader in readers:
            reader.start()
        try:
            yield from self._collect(recordings, read, len(readers))
        finally:
            stop.set()
            while any(reader.is_alive() for reader in readers):  # one may wait for room in the queue
                with contextlib.suppress(queue.Empty):
                    read.get(timeout=0.05)

    # ------------------------------------------------------------------ reading

    def _read(self, recordings: Sequence[Recording], turn: Iterator[int], lock: threading.Lock, read: queue.Queue,
              stop: threading.Event) -> None:
        rate = self.engine.config.sample_rate
        while not stop.is_set():
            with lock:
                index = next(turn, None)
            if index is None:
                break
            number = 0
            try:
                for chunk in cut(recordings[index].blocks(rate), rate, self._frame, self._chunk_seconds):
                    if stop.is_set():
                        return
                    read.put(_Read(index, number, chunk))
                    number += 1
                if not number:
                    raise AudioError(recordings[index].name, "holds no audio")
                read.put(_Read(index, number, None))
            except BaseException as error:
                read.put(_Read(index, number, None, error))
        read.put(None)

    # ------------------------------------------------------------------ batches

    def _collect(self, recordings: Sequence[Recording], read: queue.Queue, readers: int) -> Iterator[Done]:
        heard: dict[int, _Heard] = {}
        waiting: list[_Read] = []
        running: deque[tuple[list[_Read], Future]] = deque()
        while readers or waiting or running:
            while readers and (room := _BATCHES_WAITING * self._budget - _samples(waiting)) > 0:
                # Wait for a reader only where there is nothing else to do and less than a batch to begin with.
                idle = not running and room > (_BATCHES_WAITING - 1) * self._budget
                with contextlib.suppress(queue.Empty):
                    item = read.get(block=idle)
                    if item is None:
                        readers -= 1
                    elif item.chunk is not None:
                        waiting.append(item)
                    else:
                        yield from self._ended(item, recordings, heard, waiting)
                    continue
                break
            while waiting and len(running) < _BATCHES_RUNNING:
                batch = self._take(waiting)
                running.append((batch, self.engine.submit([each.chunk.signal for each in batch])))
            if running:
                batch, future = running.popleft()
                for each, log_probs in zip(batch, future.result(), strict=True):
                    self._hear(heard.setdefault(each.index, _Heard()), each, log_probs)
                for index in dict.fromkeys(each.index for each in batch):
                    yield from self._finish(index, recordings, heard)

    def _take(self, waiting: list[_Read]) -> list[_Read]:
        """The longest chunk that waits, and those of like length that fit in a batch with it."""
        waiting.sort(key=lambda each: len(each.chunk.signal), reverse=True)
        longest = len(waiting[0].chunk.signal)
        count = max(1, int(self._budget // longest)) if self.engine.config.batching else 1
        batch, waiting[:count] = waiting[:count], []
        return batch

    # ------------------------------------------------------------------ words

    def _hear(self, heard: _Heard, read: _Read, log_probs: np.ndarray) -> None:
        chunk = read.chunk
        stop = None if chunk.keep is None else chunk.skip + chunk.keep
        kept = log_probs[chunk.skip : stop]
        labels, confidence = best_path(kept[None], np.array([len(kept)]), self.engine.config.blank_id)
        self.engine.vocabulary.check(labels)
        heard.parts[read.number] = labels[0].astype(np.int32), confidence[0]
        heard.samples += len(chunk.signal) - chunk.skip * self._frame if stop is None else chunk.keep * self._frame

    def _ended(self, item: _Read, recordings: Sequence[Recording], heard: dict[int, _Heard],
               waiting: list[_Read]) -> Iterator[Done]:
        if item.error is not None:
            if not isinstance(item.error, AudioError):
                raise item.error
            waiting[:] = [each for each in waiting if each.index != item.index]
            heard[item.index] = _Heard(expected=-1)  # what still runs of it is dropped
            yield Done(item.index, None, item.error)
            return
        heard.setdefault(item.index, _Heard()).expected = item.number
        yield from self._finish(item.index, recordings, heard)

    def _finish(self, index: int, recordings: Sequence[Recording], heard: dict[int, _Heard]) -> Iterator[Done]:
        if not heard[index].whole:
            return
        done = heard.pop(index)
        labels, confidence = (np.concatenate([done.parts[i][column] for i in range(done.expected)])
                              for column in (0, 1))
        recording, config, vocabulary = recordings[index], self.engine.config, self.engine.vocabulary
        spans = collapse(labels[None].astype(np.int64), confidence[None], blank_id=config.blank_id)[0]
        words = vocabulary.words(spans)
        yield Done(index, Transcript(
            recording.id, vocabulary.text(words), words, done.samples / config.sample_rate, config.language,
            config.word_separator is not None), None)


def _samples(waiting: list[_Read]) -> int:
    return sum(len(each.chunk.signal) for each in waiting)
