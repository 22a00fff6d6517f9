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
from sbkit.infer.assembly import Assembly, join_tokens, make_transcript
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
    vad : whether words are written only where silero-vad detects speech, and recordings are cut where it doesn't
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


#: What readers have read; None at the end of each reader.
ReadQueue = queue.Queue[_ReadChunk | _EndOfRecording | None]


class Pipeline:
    """Transcribes recordings in the fastest order; memory does not grow with their length."""

    def __init__(self, engine: Engine, options: Options | None = None):
        self.engine = engine
        self.options = options or Options()
        config = engine.config
        self._chunk_seconds = config.chunk(self.options.chunk_seconds)
        seconds = self.options.batch_seconds or batch_seconds(engine.running.device)
        self.budget = max(seconds, self._chunk_seconds) * config.sample_rate
        """Samples in one batch, with padding."""
        self.frame_samples = config.hop_samples * config.subsampling
        """Samples of a frame of the output."""
        self.decoder = decoder(engine.vocabulary, self.options.search)
        self._detector = SpeechDetector(config) if self.options.vad else None

    def run(self, recordings: Sequence[Recording]) -> Generator[PipelineResult, None, None]:
        """Yield each recording's result as soon as it is complete."""
        if not recordings:
            return
        stop = threading.Event()
        size = max(8, int(_BATCHES_WAITING * self.budget / (self._chunk_seconds * self.engine.config.sample_rate)))
        read: ReadQueue = queue.Queue(size)
        indices = iter(range(len(recordings)))
        lock = threading.Lock()
        readers = [threading.Thread(target=self._read, args=(recordings, indices, lock, read, stop), daemon=True)
                   for _ in range(max(1, min(self.options.readers, len(recordings))))]
        for reader in readers:
            reader.start()
        try:
            yield from _Run(self, recordings, read, len(readers)).results()
        finally:
            stop.set()
            while any(reader.is_alive() for reader in readers):  # a full queue may block a reader
                with contextlib.suppress(queue.Empty):
                    read.get(timeout=0.05)

    def _read(self, recordings: Sequence[Recording], indices: Iterator[int], lock: threading.Lock, read: ReadQueue,
              stop: threading.Event) -> None:
        """Read and cut the next recording, and so on; runs in each reader's thread."""
        rate = self.engine.config.sample_rate
        while not stop.is_set():
            with lock:
                index = next(indices, None)
            if index is None:
                break
            number = 0
            try:
                for chunk in cut(recordings[index].blocks(rate), rate, self.frame_samples, self._chunk_seconds,
                                 self._detector):
                    if stop.is_set():
                        return
                    read.put(_ReadChunk(index, number, chunk))
                    number += 1
                if not number:
                    raise AudioError("empty-audio", recordings[index].name, "holds no audio")
                read.put(_EndOfRecording(index, number))
            except BaseException as error:
                read.put(_EndOfRecording(index, number, error))
        read.put(None)


class _Run:
    """One run of a pipeline: which chunks wait, which are computed, and which recordings are complete.

    read : what the readers have read; each puts a None at its end
    readers : how many of them there are
    """

    def __init__(self, pipeline: Pipeline, recordings: Sequence[Recording], read: ReadQueue, readers: int):
        self._engine = pipeline.engine
        self._decoder = pipeline.decoder
        self._budget = pipeline.budget
        self._frame = pipeline.frame_samples
        self._recordings = recordings
        self._read = read
        self._readers = readers
        self._waiting: list[_ReadChunk] = []  # for a batch
        self._running: deque[tuple[list[_ReadChunk], Future[Any]]] = deque()
        self._partial: dict[int, Assembly] = {}  # recordings of which chunks are missing
        self._ready: dict[int, Assembly] = {}  # complete recordings, to be decoded

    def results(self) -> Iterator[PipelineResult]:
        while self._readers or self._waiting or self._running:
            yield from self._receive()
            self._submit_batches()
            self._await_batch()
            if len(self._ready) >= self._decoder.at_once:
                yield from self._decode_ready()
        yield from self._decode_ready()

    def _receive(self) -> Iterator[PipelineResult]:
        """Take what was read until enough chunks wait; yields the errors of recordings."""
        while self._readers:
            free = _BATCHES_WAITING * self._budget - sum(len(part.chunk.signal) for part in self._waiting)
            if free <= 0:
                return
            # Wait for a reader only if there is less than a batch and nothing else to do.
            idle = not self._running and free > (_BATCHES_WAITING - 1) * self._budget
            if idle:
                yield from self._decode_ready()
            try:
                item = self._read.get(block=idle)
            except queue.Empty:
                return
            if item is None:
                self._readers -= 1
            elif isinstance(item, _EndOfRecording):
                yield from self._end_recording(item)
            elif item.chunk.silent:
                self._add(item, None)
            else:
                self._waiting.append(item)

    def _end_recording(self, end: _EndOfRecording) -> Iterator[PipelineResult]:
        if end.error is None:
            self._partial.setdefault(end.recording, Assembly()).expected = end.chunks
            self._check_complete(end.recording)
        elif isinstance(end.error, AudioError):
            self._waiting = [part for part in self._waiting if part.recording != end.recording]
            # Its chunks in running batches are dropped: no number of chunks completes this assembly.
            self._partial[end.recording] = Assembly(expected=-1)
            yield end.recording, end.error
        else:
            raise end.error

    def _submit_batches(self) -> None:
        """Submit the longest waiting chunk, and those of similar length that fit in a batch with it."""
        while self._waiting and len(self._running) < _BATCHES_RUNNING:
            self._waiting.sort(key=lambda part: len(part.chunk.signal), reverse=True)
            longest = len(self._waiting[0].chunk.signal)
            count = rows_within(self._budget, longest) if self._engine.config.batching else 1
            batch = self._waiting[:count]
            del self._waiting[:count]
            self._running.append((batch, self._engine.submit([part.chunk.signal for part in batch])))

    def _await_batch(self) -> None:
        """Wait for the oldest batch, if any, and add its outputs to their recordings."""
        if self._running:
            batch, future = self._running.popleft()
            for part, log_probs in zip(batch, future.result(), strict=True):
                self._add(part, log_probs)

    def _add(self, part: _ReadChunk, log_probs: np.ndarray | None) -> None:
        """Add the output [T, V] for a chunk to its recording; None: the model didn't run on silence."""
        config = self._engine.config
        output = part.chunk.output(log_probs, config.blank_id, config.width)
        assembly = self._partial.setdefault(part.recording, Assembly())
        assembly.add(part.number, part.chunk, output, self._frame, self._decoder)
        self._check_complete(part.recording)

    def _check_complete(self, recording: int) -> None:
        if self._partial[recording].complete:
            self._ready[recording] = self._partial.pop(recording)

    def _decode_ready(self) -> Iterator[PipelineResult]:
        """Yield the transcripts of the complete recordings."""
        if not self._ready:
            return
        ready = self._ready
        self._ready = {}
        vocabulary = self._engine.vocabulary
        tokens = self._decoder.tokens([assembly.stretches for assembly in ready.values()])
        for (index, assembly), parts in zip(ready.items(), tokens, strict=True):
            recording = self._recordings[index]
            result = make_transcript(recording.id, assembly, join_tokens(parts, vocabulary), vocabulary)
            result.warning = recording.warning
            yield index, result
