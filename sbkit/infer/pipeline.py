"""Transcribes many recordings with one engine: threads read and cut them, chunks of similar length share a batch."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from sbkit.data.audio import AudioError
from sbkit.infer.assembly import Assembly, transcript, words
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.decoding import decoder
from sbkit.infer.engine import Engine
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import Transcript

_BATCHES_WAITING = 4  # batches' worth of chunks to choose similar lengths from
_BATCHES_RUNNING = 2  # one running, and one waiting


@dataclass
class Options:
    """How recordings are cut into chunks and batched.

    batch_seconds : audio in one batch, including padding; None for the device's default
    chunk_seconds : longest chunk; None for the length that the model was trained on
    readers : threads that decode audio
    search : options of ``sbkit.decode.beam.BeamSearch`` (lm, hot_words, ...); None for the best label of each frame
    """

    batch_seconds: float | None = None
    chunk_seconds: float | None = None
    readers: int = 2
    search: Mapping[str, Any] | None = None


class Done(NamedTuple):
    """The result for a recording: a transcript, or the error."""

    index: int  # type: ignore[assignment]  # hides a tuple method that nobody calls
    transcript: Transcript | None
    error: AudioError | None


class _ReadChunk(NamedTuple):
    """A chunk from a reader."""

    recording: int
    number: int
    chunk: Chunk


class _Ended(NamedTuple):
    """The end of a recording from a reader: the number of chunks, and the error if any."""

    recording: int
    chunks: int
    error: BaseException | None = None


class Pipeline:
    """Transcribes recordings in whatever order is fast; memory does not grow with their length."""

    def __init__(self, engine: Engine, options: Options | None = None):
        self.engine, self.options = engine, options or Options()
        config = engine.config
        self._chunk_seconds = config.chunk(self.options.chunk_seconds)
        self._budget = max(self.options.batch_seconds or batch_seconds(engine.running.device),
                           self._chunk_seconds) * config.sample_rate
        self._frame = config.hop_samples * config.subsampling
        self.decoder = decoder(engine.vocabulary, self.options.search)

    def run(self, recordings: Sequence[Recording]) -> Generator[Done, None, None]:
        """Yield each recording's result as soon as it is complete."""
        if not recordings:
            return
        stop = threading.Event()
        room = max(8, int(_BATCHES_WAITING * self._budget / (self._chunk_seconds * self.engine.config.sample_rate)))
        read: queue.Queue[_ReadChunk | _Ended | None] = queue.Queue(room)
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
            while any(reader.is_alive() for reader in readers):  # a reader may be waiting for room in the queue
                with contextlib.suppress(queue.Empty):
                    read.get(timeout=0.05)

    # ------------------------------------------------------------------ reading

    def _read(self, recordings: Sequence[Recording], turn: Iterator[int], lock: threading.Lock,
              read: queue.Queue[_ReadChunk | _Ended | None], stop: threading.Event) -> None:
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
                    read.put(_ReadChunk(index, number, chunk))
                    number += 1
                if not number:
                    raise AudioError(recordings[index].name, "holds no audio")
                read.put(_Ended(index, number))
            except BaseException as error:
                read.put(_Ended(index, number, error))
        read.put(None)

    # ------------------------------------------------------------------ batches

    def _collect(self, recordings: Sequence[Recording], read: queue.Queue[_ReadChunk | _Ended | None], readers: int,
                 ) -> Iterator[Done]:
        heard: dict[int, Assembly] = {}
        ready: dict[int, Assembly] = {}
        waiting: list[_ReadChunk] = []
        running: deque[tuple[list[_ReadChunk], Future[Any]]] = deque()
        while readers or waiting or running:
            while readers and (room := _BATCHES_WAITING * self._budget - sum(
                    len(each.chunk.signal) for each in waiting)) > 0:
                # Wait for a reader only if nothing else is to do and there is less than a batch.
                idle = not running and room > (_BATCHES_WAITING - 1) * self._budget
                if idle and ready:
                    yield from self._finish(recordings, ready)
                with contextlib.suppress(queue.Empty):
                    item = read.get(block=idle)
                    if item is None:
                        readers -= 1
                    elif isinstance(item, _ReadChunk):
                        waiting.append(item)
                    elif item.error is None:
                        heard.setdefault(item.recording, Assembly()).expected = item.chunks
                        _move(item.recording, heard, ready)
                    else:
                        yield self._failed(item.recording, item.error, heard, waiting)
                    continue
                break
            while waiting and len(running) < _BATCHES_RUNNING:
                batch = self._take(waiting)
                running.append((batch, self.engine.submit([each.chunk.signal for each in batch])))
            if running:
                batch, future = running.popleft()
                for each, log_probs in zip(batch, future.result(), strict=True):
                    heard.setdefault(each.recording, Assembly()).add(each.number, each.chunk, log_probs, self._frame,
                                                              self.decoder)
                    _move(each.recording, heard, ready)
            if len(ready) >= self.decoder.at_once:
                yield from self._finish(recordings, ready)
        yield from self._finish(recordings, ready)

    def _take(self, waiting: list[_ReadChunk]) -> list[_ReadChunk]:
        """Take the longest waiting chunk, and those of similar length that fit in a batch with it."""
        waiting.sort(key=lambda each: len(each.chunk.signal), reverse=True)
        longest = len(waiting[0].chunk.signal)
        count = max(1, int(self._budget // longest)) if self.engine.config.batching else 1
        batch, waiting[:count] = waiting[:count], []
        return batch

    # ------------------------------------------------------------------ words

    @staticmethod
    def _failed(recording: int, error: BaseException, heard: dict[int, Assembly], waiting: list[_ReadChunk]) -> Done:
        if not isinstance(error, AudioError):
            raise error
        waiting[:] = [each for each in waiting if each.recording != recording]
        heard[recording] = Assembly(expected=-1)  # its remaining chunks are dropped
        return Done(recording, None, error)

    def _finish(self, recordings: Sequence[Recording], ready: dict[int, Assembly]) -> Iterator[Done]:
        if not ready:
            return
        found = self.decoder.tokens([each.stretches for each in ready.values()])
        done = list(zip(ready.items(), found, strict=True))
        ready.clear()
        for (index, heard), parts in done:
            spoken = words(parts, self.engine.vocabulary)
            made = transcript(recordings[index].id, heard, spoken, self.engine.vocabulary)
            made.warning = recordings[index].warning
            yield Done(index, made, None)


def batch_seconds(device: str) -> float:
    """The default audio in one batch, including padding: larger batches outgrow a CPU's caches, smaller ones don't
    fill a GPU."""
    return 480.0 if device != "cpu" else 20.0


def _move(index: int, heard: dict[int, Assembly], ready: dict[int, Assembly]) -> None:
    if heard[index].complete:
        ready[index] = heard.pop(index)
