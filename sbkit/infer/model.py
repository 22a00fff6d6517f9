"""The Python API of a recogniser: transcribe recordings and streams."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.decode.hotwords import phrase_boosts
from sbkit.errors import SbkitError
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.decoding import Decoder, decoder
from sbkit.infer.engine import Engine
from sbkit.infer.formats import AUTO
from sbkit.infer.pipeline import Options, Pipeline
from sbkit.infer.recordings import Recording, Source
from sbkit.infer.samples import check_rate
from sbkit.infer.stream import Stream
from sbkit.infer.stream_engine import StreamEngine
from sbkit.infer.transcript import Transcript

if TYPE_CHECKING:
    from typing_extensions import Self


class Model(LoadedBundle[Engine]):
    """A loaded recogniser, which any number of threads may call.

    engine : runs the model
    options : how recordings are cut into chunks and batched
    """

    def __init__(self, engine: Engine, options: Options | None = None):
        super().__init__(engine)
        self._pipeline = Pipeline(engine, options)
        self._lock = threading.Lock()
        self._streams: StreamEngine | None = None
        self._stream_search: tuple[dict[str, Any], Decoder[Any]] | None = None

    @classmethod
    def open(cls, bundle: str | Path, model: str = AUTO, device: str = AUTO, threads: int | None = None,
             compile: str | None = None, options: Options | None = None,
             buckets: Sequence[tuple[int, float]] | None = None) -> Self:
        return cls(Engine(bundle, model, device, threads, compile, buckets), options)

    @overload
    def transcribe(self, audio: list[Source], sample_rate: int | None = None) -> list[Transcript]: ...
    @overload
    def transcribe(self, audio: Source, sample_rate: int | None = None) -> Transcript: ...
    def transcribe(self, audio: Source | list[Source],
                   sample_rate: int | None = None) -> Transcript | list[Transcript]:
        """Transcribe recordings of any format and length.

        audio : a path, the bytes of a file, a binary file, or samples [S]; or a list of these, for a list of
            transcripts in the same order
        sample_rate : the rate of samples; None: the model's

        Raises ``sbkit.data.audio.AudioError`` for the first recording that can't be read.
        """
        if not isinstance(audio, list):
            return self.transcribe([audio], sample_rate)[0]
        if sample_rate is not None:
            sample_rate = check_rate(sample_rate)
        recordings = []
        for source in audio:
            name = Path(source).stem if isinstance(source, (str, os.PathLike)) else ""
            recordings.append(Recording.of(source, name, sample_rate))
        transcripts: dict[int, Transcript] = {}  # by the index of the recording: the pipeline has its own order
        for index, result in self._pipeline.run(recordings):
            if isinstance(result, AudioError):
                raise result
            transcripts[index] = result
        return [transcripts[i] for i in range(len(audio))]

    def transcribe_file(self, path: str | Path) -> str:
        """Return the text of a file, as SpeechBrain's interfaces do."""
        return self.transcribe(path).text

    def stream(self, chunk: int | None = None, rate: int | None = None, lm: str | Path | None = None,
               hot_words: Mapping[str, float] | Sequence[str] | None = None, lm_weight: float | None = None,
               word_score: float | None = None, beam: int | None = None) -> Stream:
        """Transcribe a stream as its samples come, with a bundle that has a streaming graph.

        >>> for result in model.stream()(microphone):                             # doctest: +SKIP
        ...     print(" ".join(word.text for word in result.settled + result.partial))

        Streams that are open at the same time share batches; feed each of them in its own thread.

        chunk : milliseconds that are decoded at once, a size that the model was trained for; None: the middle one
        rate : the samples per second that the stream is fed; None: the model's
        lm, hot_words, lm_weight, word_score, beam : options of ``sbkit.decode.beam.BeamSearch``; without any, streams
            are decoded like recordings
        """
        # Arrays where the first option stands: the samples were meant for the stream that this returns.
        first_arguments = chunk if isinstance(chunk, list) else [chunk]
        if any(isinstance(argument, np.ndarray) for argument in first_arguments):
            raise SbkitError("bad-value", "stream() takes options, not samples",
                             hint="pass the samples to the stream that it returns: model.stream()(arrays)")
        options = {"lm": lm, "hot_words": phrase_boosts(hot_words) or None, "lm_weight": lm_weight,
                   "word_score": word_score, "beam": beam}
        search = {name: value for name, value in options.items() if value is not None}
        with self._lock:
            if self._streams is None:
                running = self.engine.running
                self._streams = StreamEngine(self.engine.folder, running.model, running.requested, self.engine.threads)
            stream_decoder = self._decoder_for(search) if search else self._pipeline.decoder
            return Stream(self._streams, stream_decoder, chunk, rate)

    def _decoder_for(self, search: dict[str, Any]) -> Decoder[Any]:
        """The decoder of a search; the last one is kept, so that its language model is read once."""
        if self._stream_search is None or self._stream_search[0] != search:
            self._stream_search = (search, decoder(self.engine.vocabulary, search))
        return self._stream_search[1]

    def close(self) -> None:
        super().close()
        with self._lock:
            if self._streams is not None:
                self._streams.close()
