"""One stream, heard as its samples come: ``for heard in model.stream()(microphone): ...``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sbkit.decode.spans import Word
from sbkit.decode.streaming import StreamResult
from sbkit.errors import SbkitError
from sbkit.infer import samples as pieces
from sbkit.infer.decoding import Decoder
from sbkit.infer.samples import Resampler
from sbkit.infer.session import Session
from sbkit.infer.stream_engine import StreamEngine


class Stream:
    """Hears one stream. What it hears doesn't depend on how the samples are cut into pieces; memory, and time per
    second of audio, don't depend on how long it goes on.

    >>> stream = model.stream()                                                   # doctest: +SKIP
    >>> for heard in stream(microphone):                                          # doctest: +SKIP
    ...     print(stream.text(heard.settled), "|", stream.text(heard.partial))

    Streams of one engine share its steps, each fed by a thread of its own.

    engine : steps it
    decoder : makes its search
    chunk : milliseconds that are heard at once, one of ``engine.chunks``; None: the one in their middle
    rate : samples per second of what it is fed; None: the model's
    """

    def __init__(self, engine: StreamEngine, decoder: Decoder, chunk: int | None = None, rate: int | None = None):
        self._engine, self._decoder, self._chunk = engine, decoder, chunk
        own = engine.config.sample_rate
        self._resampler = Resampler(own if rate is None else rate, own)
        self._session = self._opened()

    def _opened(self) -> Session:
        return self._engine.open(self._decoder.stream(), self._chunk)

    @property
    def rate(self) -> int:
        return self._resampler.rate

    @property
    def chunk_seconds(self) -> float:
        """Seconds that are heard at once: words come that late, and the time of a step later."""
        return self._session.chunk_seconds

    def __call__(self, samples: np.ndarray | Iterable[np.ndarray]) -> Iterator[StreamResult]:
        """Hear a fresh stream from its first sample to its end: an array [N], or arrays as they come, such as those of
        a microphone. Each is heard before the next one is asked for."""
        self.reset()
        for piece in pieces.pieces_of(samples):
            yield from self._feed(piece)
        yield from self._finish()

    def feed(self, samples: np.ndarray, rate: int | None = None) -> list[StreamResult]:
        """Hear the next samples [N], any number of them: floats from -1 to 1, or int16.

        Returns what is new: nothing until a chunk is complete. Refused samples leave the stream as it was.

        rate : checked, where the samples know theirs: it can't change within a stream
        """
        if rate is not None and rate != self.rate:
            raise SbkitError(f"this stream has {self.rate} samples per second, and these are at {rate}: the rate can't "
                             "change within a stream", hint=f"begin another one: model.stream(rate={rate})")
        return list(self._feed(samples))

    def finish(self) -> list[StreamResult]:
        """Hear what is left: the stream ends here. Then :meth:`reset` begins another one."""
        return list(self._finish())

    def reset(self) -> None:
        """Begin a fresh stream, wherever this one is."""
        self._session.close()
        self._resampler.reset()
        self._session = self._opened()

    def text(self, words: Sequence[Word]) -> str:
        return self._engine.vocabulary.text(words)

    def _feed(self, samples: np.ndarray) -> Iterator[StreamResult]:
        samples = pieces.checked(samples)  # all of it, before any of it is heard
        self._session.refuse_more()
        size = max(1, round(self.chunk_seconds * self.rate))
        for start in range(0, len(samples), size):
            yield from self._heard(self._resampler(pieces.as_floats(samples[start : start + size])))

    def _finish(self) -> Iterator[StreamResult]:
        self._session.refuse_more()
        yield from self._heard(self._resampler(np.zeros(0, np.float32), last=True))
        self._session.finish()
        yield from self._taken()

    def _heard(self, samples: np.ndarray) -> Iterator[StreamResult]:
        self._session.feed(samples)
        yield from self._taken()

    def _taken(self) -> Iterator[StreamResult]:
        while self._session.busy:
            yield from self._session.take()
