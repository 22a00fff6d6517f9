"""Streams of an engine: samples that wait, state, search and words of each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from sbkit.decode.streaming import StreamResult, StreamSearch, clip
from sbkit.errors import SbkitError
from sbkit.export.layout import Config
from sbkit.export.windows import Window, Windows
from sbkit.infer import samples as pieces

#: A stream's state: an array for each name in config.json, without the dimension of the batch.
State = list[np.ndarray]


class Session:
    """One stream of a ``StreamEngine``, whose ``open`` makes it.

    One thread feeds it, and any thread takes what was heard; the engine's threads do the rest. An error ends this
    stream alone: :meth:`take` and :meth:`feed` raise it from then on.

    config : of the model
    chunk : output frames of a chunk
    state : of a stream that begins
    search : decodes it; nobody else uses it meanwhile
    enter : puts the stream in the line for the next step
    on_heard : is called without arguments, by one of the engine's threads, whenever :meth:`take` has something new to
        give or to raise, and once all that was fed was heard
    """

    def __init__(self, config: Config, chunk: int, state: State, search: StreamSearch,
                 enter: Callable[[Session], None], on_heard: Callable[[], None] | None = None):
        self.chunk, self.state, self.search = chunk, state, search
        self.rate, self.chunk_seconds = config.sample_rate, chunk * config.frame_seconds
        self._windows = Windows(config, chunk)
        assert config.streaming is not None, "asked of models that take streams"
        self.ahead_seconds = config.streaming.ahead * config.frame_seconds
        """How much of a chunk is only looked at, and heard with the next one."""
        self._enter, self._on_heard = enter, on_heard
        self._changed = threading.Condition()
        self._waiting: deque[Window] = deque()
        self._heard: list[StreamResult] = []
        self._error: BaseException | None = None
        self._in_turn = False  # in the line, in a step or in its search
        self._ended = self._over = False
        self._came = 0  # samples

    # ------------------------------------------------------------------ from outside

    @property
    def seconds(self) -> float:
        return self._came / self.rate

    def feed(self, samples: np.ndarray) -> None:
        """Queue the next samples [N], any number of them at the model's rate: floats from -1 to 1, or int16. It never
        waits for a step, so whoever feeds more than a microphone gives looks at :attr:`waiting_seconds`. Refused ones
        leave the stream as it was."""
        samples = pieces.checked(samples)
        self.refuse_more()
        windows = self._windows.feed(pieces.as_floats(samples))
        self._came += len(samples)
        self._queue(windows)

    def finish(self) -> None:
        """Say that the stream ends here. What is left of it is then heard, to the last word."""
        self.refuse_more()
        self._queue(self._windows.finish(), ended=True)

    def take(self, timeout: float | None = None) -> list[StreamResult]:
        """Return what was heard since the last call, in order.

        It waits until there is something, or until all that was fed is heard; ``timeout`` is the most seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._heard or self._error or not self._in_turn, timeout)
            heard, self._heard = self._heard, []
            if self._error is not None and not heard:
                raise self._error
            return heard

    @property
    def busy(self) -> bool:
        """Whether there is something to compute, or something to :meth:`take`."""
        with self._changed:
            return self._in_turn or bool(self._heard) or self._error is not None

    @property
    def over(self) -> bool:
        """Whether it was heard to its end, and all of that was taken."""
        with self._changed:
            return self._over and not self._heard

    @property
    def wanted(self) -> int:
        """How many more samples complete its next chunk: less than that need not be fed by themselves."""
        return self._windows.wanted

    @property
    def waiting_seconds(self) -> float:
        """The seconds of whole chunks that were fed and not heard yet: how far the machine is behind."""
        return len(self._waiting) * self._windows.seconds

    def close(self) -> None:
        """Let go of the stream, wherever it is: nothing more is heard of it, and nobody is told."""
        self._on_heard = None
        self.fail(SbkitError("the stream was closed", hint="open another one"))

    def refuse_more(self) -> None:
        """Raise if nothing can follow: the stream is over, or ended by an error."""
        if self._error is not None:
            raise self._error
        if self._ended:
            raise SbkitError("the stream has ended: it takes no more samples",
                             hint="start a new one, as Stream.reset() does")

    def _queue(self, windows: list[Window], ended: bool = False) -> None:
        with self._changed:
            self._waiting += windows
            self._ended |= ended
            enters = self._again()
        if enters:
            self._enter(self)

    def _again(self) -> bool:
        """Whether it gets into the line now, and isn't there yet; called by whoever holds the lock."""
        there = bool(self._waiting) or (self._ended and not self._over)
        enters = there and not self._in_turn and self._error is None
        self._in_turn |= enters
        return enters

    # ------------------------------------------------------------------ for the engine

    def next(self) -> Window | None:
        """Take the window of its next chunk; None where only the end is left, or nothing any more."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def decode(self, log_probs: np.ndarray | None) -> None:
        """Search the log-probabilities [T, V] of a chunk, or the end (None), and get into the line again."""
        if self._error is not None:
            return self._turn_over([])
        try:
            heard = self.search.feed(log_probs) if log_probs is not None else [self.search.finish()]
        except Exception as error:
            return self.fail(error)
        return self._turn_over([clip(each, self.seconds) for each in heard], over=log_probs is None)

    def fail(self, error: BaseException) -> None:
        """End the stream by an error; the first one stays."""
        with self._changed:
            self._error = self._error or error
            self._waiting.clear()
        self._turn_over([])

    def _turn_over(self, heard: list[StreamResult], over: bool = False) -> None:
        with self._changed:
            self._in_turn, self._over = False, self._over or over
            self._heard += heard
            enters = self._again()
            self._changed.notify_all()
        self._notify()
        if enters:
            self._enter(self)

    def _notify(self) -> None:
        """Call ``on_heard``. If that fails, nobody listens any more: the stream ends, and no other."""
        tell = self._on_heard
        if tell is None:
            return
        try:
            tell()
        except Exception as error:
            self._on_heard = None
            self.fail(error)
