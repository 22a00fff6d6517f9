"""Recognises a live session: chunk by chunk with the bundle's streaming graph, or by decoding the tail."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from sbkit.decode.spans import Word
from sbkit.infer.lines import Lines, TranscriptLine
from sbkit.infer.stream_engine import StreamEngine
from sbkit.infer.tail import Tail, tail_lines, tail_words
from sbkit.serve.errors import too_late
from sbkit.serve.job import Job
from sbkit.serve.served_kinds import ServedRecogniser


class Update(NamedTuple):
    """New lines of a session. Times are seconds from the first sample."""

    lines: list[TranscriptLine]
    """Those that are complete, and the current one."""
    seconds: float
    """End of the recognised audio."""


class LiveRecogniser(ABC):
    """Recognises one session. One task feeds samples, another waits for updates; neither waits for the other.

    served : the model
    seconds : time limit for received audio; after that ``next_update`` raises ``ApiError`` 504
    """

    chunk_seconds: float | None = None
    """Seconds of a chunk; None if the model has no streaming graph."""
    ahead_seconds: float | None = None
    """Lookahead in a chunk, which the next chunk begins with; None as above."""

    def __init__(self, served: ServedRecogniser, seconds: float):
        self._served = served
        self._seconds = seconds
        self._changed = asyncio.Event()
        """Set when there may be an update."""
        self._progressed = asyncio.Event()
        """Set when the backlog became shorter."""

    @property
    @abstractmethod
    def wanted(self) -> float:
        """How many more samples are needed for the next step."""

    @property
    @abstractmethod
    def backlog_seconds(self) -> float:
        """Seconds received but not recognised yet."""

    @abstractmethod
    def feed(self, signal: np.ndarray) -> None:
        """Take samples [S] at the model's rate."""

    @abstractmethod
    def finish(self) -> None:
        """Recognise what is left, at the end of the audio."""

    @abstractmethod
    async def next_update(self) -> Update | None:
        """Wait for the next update; None after the end."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all work."""

    async def catch_up(self, seconds: float) -> None:
        """Wait until the backlog is at most ``seconds``; other tasks run in any case."""
        await asyncio.sleep(0)
        while self.backlog_seconds > seconds:
            self._progressed.clear()
            await self._progressed.wait()


class ChunkRecogniser(LiveRecogniser):
    """Recognises a session with the bundle's streaming graph, in batches with all others.

    streams : the engine of the streaming graph
    chunk_ms : one of its chunk sizes; None for its default
    """

    def __init__(self, served: ServedRecogniser, streams: StreamEngine, chunk_ms: int | None, seconds: float):
        super().__init__(served, seconds)
        loop = asyncio.get_running_loop()

        def notify() -> None:
            loop.call_soon_threadsafe(self._changed.set)

        self._session = streams.open(served.decoder.stream(), chunk_ms, notify)
        self.chunk_seconds = self._session.chunk_seconds
        self.ahead_seconds = self._session.ahead_seconds
        self._lines = Lines(served.chunk_seconds)

    @property
    def wanted(self) -> float:
        return self._session.wanted

    @property
    def backlog_seconds(self) -> float:
        return self._session.waiting_seconds

    def feed(self, signal: np.ndarray) -> None:
        with self._served.device_errors():
            self._session.feed(signal)

    def finish(self) -> None:
        with self._served.device_errors():
            self._session.finish()

    async def next_update(self) -> Update | None:
        while True:
            self._changed.clear()
            with self._served.device_errors():
                results = self._session.take(0)
            self._progressed.set()
            if results:
                changed = [line for result in results for line in self._lines.add(result)]
                # Of the versions of the current line, only the last one is new to the client.
                lines = [line for line in changed if line.complete or line is changed[-1]]
                return Update(lines, results[-1].seconds)
            if self._session.finished:
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), self._seconds)
            except (asyncio.TimeoutError, TimeoutError):
                if self._session.busy:
                    raise too_late(self._seconds) from None

    def close(self) -> None:
        self._session.close()


class TailRecogniser(LiveRecogniser):
    """Recognises a session by decoding its unsettled end repeatedly, while more audio arrives."""

    def __init__(self, served: ServedRecogniser, seconds: float, client: str | None):
        super().__init__(served, seconds)
        self._tail = Tail(served.config.sample_rate, served.frame_samples, served.chunk_seconds)
        self._job = Job(client)
        self._audio_ended = False
        self._all_recognised = False

    @property
    def wanted(self) -> float:
        return self._tail.wanted

    @property
    def backlog_seconds(self) -> float:
        return self._tail.undecoded_seconds

    def feed(self, signal: np.ndarray) -> None:
        self._tail.add(signal)
        self._changed.set()

    def finish(self) -> None:
        self._audio_ended = True
        self._changed.set()

    async def next_update(self) -> Update | None:
        while not (self._audio_ended or self._tail.due):
            self._changed.clear()
            await self._changed.wait()
        signal, skip = self._tail.window()
        if self._all_recognised or not len(signal):
            return None
        # Decided before decoding, during which more audio may arrive.
        self._all_recognised = self._audio_ended and not self._tail.undecoded_seconds
        words = await self._words(signal, skip)
        final, partial, seconds = self._tail.finalise(words, len(signal), skip, self._all_recognised)
        self._progressed.set()
        return Update(tail_lines(final, partial), seconds)

    async def _words(self, signal: np.ndarray, skip: int) -> list[Word]:
        """Decode samples [S], without the first ``skip`` frames."""
        submitted = self._served.batcher.submit(signal, self._job.client)
        future = asyncio.wrap_future(self._job.watch(submitted))
        with self._served.device_errors():
            try:
                log_probs = await asyncio.wait_for(future, self._seconds)
            except (asyncio.TimeoutError, TimeoutError):
                raise too_late(self._seconds) from None
        decoder, vocabulary = self._served.decoder, self._served.vocabulary
        return await asyncio.get_running_loop().run_in_executor(
            None, tail_words, log_probs[skip:], decoder, vocabulary)

    def close(self) -> None:
        self._job.cancel()


def live_recogniser(served: ServedRecogniser, chunk_ms: int | None, seconds: float, client: str | None
                    ) -> LiveRecogniser:
    """Return a recogniser for a client's session: with the streaming graph if the bundle has one."""
    if served.streams is None:
        return TailRecogniser(served, seconds, client)
    return ChunkRecogniser(served, served.streams, chunk_ms, seconds)
