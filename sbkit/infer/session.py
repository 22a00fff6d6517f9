"""An engine's streams: waiting samples, state, search and results of each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from sbkit.decode.streaming import StreamResult, StreamSearch, clip
from sbkit.errors import SbkitError
from sbkit.export.layout import Config
from sbkit.export.windows import Window, Windows
from sbkit.infer.samples import as_floats, check_samples

#: A stream's state: an array for each name in config.json, without the batch dimension.
State = list[np.ndarray]


class Session:
    """One stream of a ``StreamEngine``, made by its ``open``.

    One thread feeds it, and any thread takes results; the engine's threads do the rest. An error ends only this stream:
    :meth:`take` and :meth:`feed` raise it from then on.

    config : the model's
    chunk : output frames of a chunk
    state : the state at a stream's start
    search : decodes this stream only
    enqueue : queues the stream for the next step
    on_result : is called without arguments, by one of the engine's threads, when :meth:`take` has something to return
        or to raise, and when all samples are processed
    """

    def __init__(self, config: Config, chunk: int, state: State, search: StreamSearch,
                 enqueue: Callable[[Session], None], on_result: Callable[[], None] | None = None):
        assert config.streaming is not None, "only models for streams have sessions"
        self.chunk = chunk
        self.state = state
        self.search = search
        self.rate = config.sample_rate
        self.chunk_seconds = chunk * config.frame_seconds
        self._windows = Windows(config, chunk)
        self.ahead_seconds = config.streaming.ahead * config.frame_seconds
        """The lookahead: how much of a chunk is decoded with the next one."""
        self._enqueue = enqueue
        self._on_result = on_result
        self._changed = threading.Condition()
        self._waiting: deque[Window] = deque()
        self._results: list[StreamResult] = []
        self._error: BaseException | None = None
        self._queued = False  # for a step, in one, or in its search
        self._ended = False  # it takes no more samples
        self._finished = False  # its end was decoded
        self._samples = 0

    # ------------------------------------------------------------------ calls

    @property
    def seconds(self) -> float:
        return self._samples / self.rate

    def feed(self, samples: np.ndarray) -> None:
        """Queue any number of samples [N] at the model's rate: floats from -1 to 1, or int16. It never waits for a
        step, so feed faster than real time only while :attr:`waiting_seconds` is small. Invalid samples leave the
        stream unchanged."""
        samples = check_samples(samples)
        self.check_open()
        windows = self._windows.feed(as_floats(samples))
        self._samples += len(samples)
        self._add(windows)

    def finish(self) -> None:
        """End the stream: the remaining samples are decoded."""
        self.check_open()
        self._add(self._windows.finish(), ended=True)

    def take(self, timeout: float | None = None) -> list[StreamResult]:
        """Return the results since the last call, in order.

        It waits for a result, until all samples are processed, or for at most ``timeout`` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._error or not self._queued, timeout)
            results = self._results
            self._results = []
            if self._error is not None and not results:
                raise self._error
            return results

    @property
    def busy(self) -> bool:
        """Whether samples are being processed or there is something to :meth:`take`."""
        with self._changed:
            return self._queued or bool(self._results) or self._error is not None

    @property
    def finished(self) -> bool:
        """Whether the stream was decoded to its end and all results were taken."""
        with self._changed:
            return self._finished and not self._results

    @property
    def wanted(self) -> int:
        """The number of samples that complete the next chunk."""
        return self._windows.wanted

    @property
    def waiting_seconds(self) -> float:
        """The seconds of complete chunks that wait to be processed."""
        return len(self._waiting) * self._windows.seconds

    def close(self) -> None:
        """Drop the stream without further results or calls of ``on_result``."""
        self._on_result = None
        self.fail(SbkitError("stream-ended", "the stream was closed", hint="open another one"))

    def check_open(self) -> None:
        """Raise if the stream has ended or failed."""
        if self._error is not None:
            raise self._error
        if self._ended:
            raise SbkitError("stream-ended", "the stream has ended and takes no more samples",
                             hint="start a new one, as Stream.reset() does")

    def _add(self, windows: list[Window], ended: bool = False) -> None:
        with self._changed:
            self._waiting += windows
            self._ended |= ended
            enqueue = self._should_enqueue()
        if enqueue:
            self._enqueue(self)

    def _should_enqueue(self) -> bool:
        """Whether the stream has to be queued now; call it with the lock held."""
        ready = bool(self._waiting) or (self._ended and not self._finished)
        enqueue = ready and not self._queued and self._error is None
        self._queued |= enqueue
        return enqueue

    # ------------------------------------------------------------------ for the engine

    def next(self) -> Window | None:
        """Take the window of the next chunk; None if only the end is left, or nothing."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def decode(self, log_probs: np.ndarray | None) -> None:
        """Search the log-probabilities [T, V] of a chunk, or the end (None), and queue the next chunk."""
        if self._error is not None:
            self._step_done([])
            return
        try:
            results = [self.search.finish()] if log_probs is None else self.search.feed(log_probs)
        except Exception as error:
            self.fail(error)
            return
        self._step_done([clip(result, self.seconds) for result in results], finished=log_probs is None)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error; the first one is kept."""
        with self._changed:
            self._error = self._error or error
            self._waiting.clear()
        self._step_done([])

    def _step_done(self, results: list[StreamResult], finished: bool = False) -> None:
        with self._changed:
            self._queued = False
            self._finished |= finished
            self._results += results
            enqueue = self._should_enqueue()
            self._changed.notify_all()
        callback = self._on_result
        try:
            if callback is not None:
                callback()
        except Exception as error:  # only this stream ends
            self._on_result = None
            self.fail(error)
        if enqueue:
            self._enqueue(self)
