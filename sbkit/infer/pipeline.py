"""Transcribes many recordings with one engine: threads read and cut them, chunks of similar length are batched."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.infer.assembly import Assembly, transcript, words
from sbkit.infer.batches import batch_seconds, rows_within
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.decoding import decoder
from sbkit.infer.detector import SpeechDetector
from sbkit.infer.engine import Engine
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import Transcript

_BATCHES_WAITING = 4  # chunks to choose similar lengths from, in batches
_BATCHES_RUNNING = 2  # one runs while the next is queued


@dataclass
class Options:
    """How recordings are cut into chunks and batched.

    batch_seconds : audio in one batch, including padding; None: the device's default
    chunk_seconds : longest chunk; None: the length that the model was trained on
    readers : threads that decode audio
    search : options of ``sbkit.decode.beam.BeamSearch`` (lm, hot_words, ...); None: greedy decoding
    vad : whether words are written only where silero-vad hears somebody speak, and recordings are cut where it doesn't
    """

    batch_seconds: float | None = None
    chunk_seconds: float | None = None
    readers: int = 2
    search: Mapping[str, Any] | None = None
    vad: bool = False


#: A recording's number, and its transcript or its error.
PipelineResult = tuple[int, Transcript | AudioError]


class _ReadChunk(NamedTuple):
    """A chunk from a reader."""

    recording: int
    number: int
    chunk: Chunk


class _EndOfRecording(NamedTuple):
    """The end of a recording from a reader: its number of chunks, and the error, if any."""

    recording: int
    chunks: int
    error: BaseException | None = None


class Pipeline:
    """Transcribes recordings in the fastest order; memory does not grow with their length."""

    def __init__(self, engine: Engine, options: Options | None = None):
        self.engine, self.options = engine, options or Options()
        config = engine.config
        self._chunk_seconds = config.chunk(self.options.chunk_seconds)
        self._budget = max(self.options.batch_seconds or batch_seconds(engine.running.device),
                           self._chunk_seconds) * config.sample_rate
        self._frame = config.hop_samples * config.subsampling
        self.decoder = decoder(engine.vocabulary, self.options.search)
        self._detector = SpeechDetector(config) if self.options.vad else None

    def run(self, recordings: Sequence[Recording]) -> Generator[PipelineResult, None, None]:
        """Yield each recording's result as soon as it is complete."""
        if not recordings:
            return
        stop = threading.Event()
        size = max(8, int(_BATCHES_WAITING * self._budget / (self._chunk_seconds * self.engine.config.sample_rate)))
        read: queue.Queue[_ReadChunk | _EndOfRecording | None] = queue.Queue(size)
        indices = iter(range(len(recordings)))
        lock = threading.Lock()
        readers = [threading.Thread(target=self._read, args=(recordings, indices, lock, read, stop), daemon=True)
                   for _ in range(max(1, min(self.options.readers, len(recordings))))]
        for reader in readers:
            reader.start()
        try:
            yield from self._collect(recordings, read, len(readers))
        finally:
            stop.set()
            while any(reader.is_alive() for reader in readers):  # a full queue may block a reader
                with contextlib.suppress(queue.Empty):
                    read.get(timeout=0.05)

    # ------------------------------------------------------------------ reading

    def _read(self, recordings: Sequence[Recording], indices: Iterator[int], lock: threading.Lock,
              read: queue.Queue[_ReadChunk | _EndOfRecording | None], stop: threading.Event) -> None:
        rate = self.engine.config.sample_rate
        while not stop.is_set():
            with lock:
                index = next(indices, None)
            if index is None:
                break
            number = 0
            try:
                for chunk in cut(recordings[index].blocks(rate), rate, self._frame, self._chunk_seconds,
                                 self._detector):
                    if stop.is_set():
                        return
                    read.put(_ReadChunk(index, number, chunk))
                    number += 1
                if not number:
                    raise AudioError(recordings[index].name, "holds no audio")
                read.put(_EndOfRecording(index, number))
            except BaseException as error:
                read.put(_EndOfRecording(index, number, error))
        read.put(None)

    # ------------------------------------------------------------------ batches

    def _collect(self, recordings: Sequence[Recording], read: queue.Queue[_ReadChunk | _EndOfRecording | None],
                 readers: int) -> Iterator[PipelineResult]:
        partial: dict[int, Assembly] = {}
        ready: dict[int, Assembly] = {}
        waiting: list[_ReadChunk] = []
        running: deque[tuple[list[_ReadChunk], Future[Any]]] = deque()
        while readers or waiting or running:
            while readers and (free := _BATCHES_WAITING * self._budget - sum(
                    len(each.chunk.signal) for each in waiting)) > 0:
                # Wait for a reader only if there is less than a batch and nothing else to do.
                idle = not running and free > (_BATCHES_WAITING - 1) * self._budget
                if idle and ready:
                    yield from self._finish(recordings, ready)
                with contextlib.suppress(queue.Empty):
                    item = read.get(block=idle)
                    if item is None:
                        readers -= 1
                    elif isinstance(item, _ReadChunk) and item.chunk.silent:
                        self._add(item, None, partial, ready)
                    elif isinstance(item, _ReadChunk):
                        waiting.append(item)
                    elif item.error is None:
                        partial.setdefault(item.recording, Assembly()).expected = item.chunks
                        if partial[item.recording].complete:
                            ready[item.recording] = partial.pop(item.recording)
                    elif isinstance(item.error, AudioError):
                        waiting[:] = [each for each in waiting if each.recording != item.recording]
                        partial[item.recording] = Assembly(expected=-1)  # its remaining chunks are dropped
                        yield item.recording, item.error
                    else:
                        raise item.error
                    continue
                break
            while waiting and len(running) < _BATCHES_RUNNING:
                # The longest waiting chunk, and those of similar length that fit in a batch with it.
                waiting.sort(key=lambda each: len(each.chunk.signal), reverse=True)
                count = rows_within(self._budget, len(waiting[0].chunk.signal)) if self.engine.config.batching else 1
                batch, waiting[:count] = waiting[:count], []
                running.append((batch, self.engine.submit([each.chunk.signal for each in batch])))
            if running:
                batch, future = running.popleft()
                for each, log_probs in zip(batch, future.result(), strict=True):
                    self._add(each, log_probs, partial, ready)
            if len(ready) >= self.decoder.at_once:
                yield from self._finish(recordings, ready)
        yield from self._finish(recordings, ready)

    def _add(self, part: _ReadChunk, log_probs: np.ndarray | None, partial: dict[int, Assembly],
             ready: dict[int, Assembly]) -> None:
        """Add the output [T, V] for a chunk to its recording; None: it didn't run, because nobody speaks."""
        config = self.engine.config
        assembly = partial.setdefault(part.recording, Assembly())
        assembly.add(part.number, part.chunk, part.chunk.output(log_probs, config.blank_id, config.width), self._frame,
                     self.decoder)
        if assembly.complete:
            ready[part.recording] = partial.pop(part.recording)

    # ------------------------------------------------------------------ words

    def _finish(self, recordings: Sequence[Recording], ready: dict[int, Assembly]) -> Iterator[PipelineResult]:
        if not ready:
            return
        tokens = self.decoder.tokens([each.stretches for each in ready.values()])
        done = list(zip(ready.items(), tokens, strict=True))
        ready.clear()
        for (index, assembly), parts in done:
            vocabulary = self.engine.vocabulary
            found = transcript(recordings[index].id, assembly, words(parts, vocabulary), vocabulary)
            found.warning = recordings[index].warning
            yield index, found
