"""One stream, transcribed as its samples come: ``for result in model.stream()(microphone): ...``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sbkit.decode.spans import Word
from sbkit.decode.streaming import StreamResult
from sbkit.errors import SbkitError
from sbkit.infer.decoding import Decoder
from sbkit.infer.samples import Resampler, as_floats, check_samples
from sbkit.infer.session import Session
from sbkit.infer.stream_engine import StreamEngine


class Stream:
    """Transcribes one stream. Results don't depend on how the samples are split into arrays; memory, and time per
    second of audio, don't depend on the stream's length.

    >>> stream = model.stream()                                                   # doctest: +SKIP
    >>> for result in stream(microphone):                                         # doctest: +SKIP
    ...     print(stream.text(result.settled), "|", stream.text(result.partial))

    Streams of one engine share its batches; feed each of them in its own thread.

    engine : runs the model
    decoder : makes the stream's search
    chunk : milliseconds that are decoded at once, one of ``engine.chunks``; None: the middle one
    rate : the samples per second that it is fed; None: the model's
    """

    def __init__(self, engine: StreamEngine, decoder: Decoder[Any], chunk: int | None = None, rate: int | None = None):
        self._engine = engine
        self._decoder = decoder
        self._chunk = chunk
        model_rate = engine.config.sample_rate
        self._resampler = Resampler(model_rate if rate is None else rate, model_rate)
        self._session = self._open()

    def _open(self) -> Session:
        return self._engine.open(self._decoder.stream(), self._chunk)

    @property
    def rate(self) -> int:
        return self._resampler.rate

    @property
    def chunk_seconds(self) -> float:
        """Seconds that are decoded at once: the delay of words, without the time of a step."""
        return self._session.chunk_seconds

    def __call__(self, samples: np.ndarray | Iterable[np.ndarray]) -> Iterator[StreamResult]:
        """Transcribe a new stream from start to end: an array [N], or an iterable of arrays, such as a microphone's.
        Each array is decoded before the next one is taken."""
        self.reset()
        if not isinstance(samples, Iterable) or isinstance(samples, (np.ndarray, str, bytes, bytearray)):
            samples = [samples]  # the only piece, valid or not
        for piece in samples:
            yield from self._feed(piece)
        yield from self._finish()

    def feed(self, samples: np.ndarray, rate: int | None = None) -> list[StreamResult]:
        """Transcribe the next samples [N], any number of them: floats from -1 to 1, or int16.

        Returns new results, none until a chunk is complete. Invalid samples leave the stream unchanged.

        rate : the samples' rate, if known: raises if it isn't the stream's
        """
        if rate is not None and rate != self.rate:
            raise SbkitError("not-samples", f"this stream has {self.rate} samples per second, and these are at {rate}: "
                             "the rate can't change within a stream",
                             hint=f"begin another one: model.stream(rate={rate})")
        return list(self._feed(samples))

    def finish(self) -> list[StreamResult]:
        """Transcribe the rest: the stream ends here. Then :meth:`reset` begins another one."""
        return list(self._finish())

    def reset(self) -> None:
        """Begin a new stream, even if this one hasn't ended."""
        self._session.close()
        self._resampler.reset()
        self._session = self._open()

    def text(self, words: Sequence[Word]) -> str:
        return self._engine.vocabulary.text(words)

    def _feed(self, samples: np.ndarray) -> Iterator[StreamResult]:
        samples = check_samples(samples)  # all of them, before any are decoded
        self._session.check_open()
        size = max(1, round(self.chunk_seconds * self.rate))
        for start in range(0, len(samples), size):
            yield from self._decode(self._resampler(as_floats(samples[start : start + size])))

    def _finish(self) -> Iterator[StreamResult]:
        self._session.check_open()
        yield from self._decode(self._resampler(np.zeros(0, np.float32), last=True))
        self._session.finish()
        yield from self._results()

    def _decode(self, samples: np.ndarray) -> Iterator[StreamResult]:
        self._session.feed(samples)
        yield from self._results()

    def _results(self) -> Iterator[StreamResult]:
        while self._session.busy:
            yield from self._session.take()
