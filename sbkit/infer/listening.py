"""Transcribes a microphone or a program's samples, and shows the words as they come."""

from __future__ import annotations

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from sbkit.decode.search_options import SearchRequest
from sbkit.decode.streaming import StreamResult
from sbkit.errors import SbkitError
from sbkit.export.layout import Config
from sbkit.infer import formats
from sbkit.infer.captions import Captions, Json, Plain, TerminalCaptions
from sbkit.infer.decoding import Decoder, decoder
from sbkit.infer.engine import Engine
from sbkit.infer.formats import ModelRequest
from sbkit.infer.inputs import STDIN
from sbkit.infer.lines import Lines, TranscriptLine
from sbkit.infer.sound_sources import Microphone, Pcm
from sbkit.infer.stream import Stream
from sbkit.infer.stream_engine import StreamEngine, has_streaming_graph
from sbkit.infer.tail import TailStream
from sbkit.system.untrusted import standard_input

_STOPPED = 128 + signal.SIGINT


@dataclass(frozen=True)
class ListenRequest(SearchRequest, ModelRequest):
    """What to listen to, and how.

    source : ``-`` for 16-bit PCM from standard input; None for the microphone
    rate : samples per second; None: the model's, or what the microphone has
    microphone : its number or a part of its name
    chunk : milliseconds that are decoded at once, of a model with a streaming graph; None: the model's middle size
    json : write JSON lines for programs
    """

    bundle: Path
    source: str | None = None
    rate: int | None = None
    microphone: str | None = None
    chunk: int | None = None
    json: bool = False


class CtrlC(AbstractContextManager["CtrlC"]):
    """Lets Ctrl-C interrupt the wait for an item, but not its processing."""

    def __enter__(self) -> CtrlC:
        self._pressed = False
        self._defers = False
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def defer_during(self, items: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the items, and defer Ctrl-C while one is processed; pressed twice, it interrupts anyway."""
        for item in items:
            self._defers = True
            yield item
            self._defers = False
            if self._pressed:
                raise KeyboardInterrupt

    def _press(self, _signum: int, _frame: FrameType | None) -> None:
        if self._pressed or not self._defers:
            raise KeyboardInterrupt
        self._pressed = True


class _LiveTranscriber(ABC):
    """Turns samples into lines."""

    delay: str
    """When words come, for the user."""

    @abstractmethod
    def feed(self, samples: np.ndarray) -> list[TranscriptLine]:
        """Take the next samples [N], and return the lines that changed."""

    @abstractmethod
    def finish(self) -> list[TranscriptLine]:
        """Transcribe the rest at the end of the samples."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """The seconds that were transcribed."""


class _ByChunks(_LiveTranscriber):
    """Uses a streaming graph, chunk by chunk."""

    def __init__(self, engine: StreamEngine, decoder: Decoder[Any], chunk: int | None, rate: int):
        self._stream = Stream(engine, decoder, chunk, rate)
        self._lines = Lines(engine.config.chunk_seconds)
        self._seconds = 0.0
        self.delay = f"in chunks of {1000 * self._stream.chunk_seconds:g} ms"

    def feed(self, samples: np.ndarray) -> list[TranscriptLine]:
        return self._changed(self._stream.feed(samples))

    def finish(self) -> list[TranscriptLine]:
        return self._changed(self._stream.finish())

    @property
    def seconds(self) -> float:
        return self._seconds

    def _changed(self, results: list[StreamResult]) -> list[TranscriptLine]:
        if results:
            self._seconds = results[-1].seconds
        return [line for result in results for line in self._lines.add(result)]


class _ByTail(_LiveTranscriber):
    """Uses a model for whole recordings, line by line."""

    delay = "whose lines are decoded again and again, because the model has no streaming graph"

    def __init__(self, engine: Engine, decoder: Decoder[Any], rate: int):
        self._stream = TailStream(engine, decoder, rate)

    def feed(self, samples: np.ndarray) -> list[TranscriptLine]:
        return self._stream.feed(samples)

    def finish(self) -> list[TranscriptLine]:
        return self._stream.finish()

    @property
    def seconds(self) -> float:
        return self._stream.seconds


def _open(request: ListenRequest) -> StreamEngine | Engine:
    """Load the model that transcribes live speech, as ``sbkit serve`` chooses it."""
    config = Config.read(request.bundle)
    model = formats.choose(request.bundle, config.models, request.model)
    if has_streaming_graph(config, model):
        return StreamEngine(request.bundle, model, request.device, request.threads, max_streams=1)
    if request.chunk is not None:
        raise SbkitError("no-streaming-graph", f"{request.bundle} has no streaming graph, so --chunk has no effect",
                         hint="leave out --chunk", file=request.bundle, key="--chunk")
    return Engine(request.bundle, model, request.device, request.threads)


def listen(request: ListenRequest) -> int:
    """Listen until the samples end or Ctrl-C, and return the exit code."""
    if request.source not in (STDIN, None):
        missing = "" if Path(request.source).exists() else ", and there is no such file"
        raise SbkitError("bad-option", "listen takes a microphone, or - for standard input, but not "
                         f"{request.source}{missing}",
                         hint=f"to transcribe a file: sbkit transcribe {request.bundle} {request.source}; if it is raw "
                              f"16-bit PCM: sbkit listen {request.bundle} - < {request.source}")
    if request.source == STDIN and request.microphone is not None:
        raise SbkitError("conflicting-options", f"- reads standard input, but --microphone {request.microphone} is "
                         "given too", hint="leave out one of them", key="--microphone")
    search = request.search  # raises before a model is loaded
    with CtrlC() as ctrl_c:
        try:
            with _open(request) as engine:
                return _listen(engine, request, search, ctrl_c)
        except KeyboardInterrupt:  # while the model is loaded, or the rest is decoded
            return _STOPPED


def _listen(engine: StreamEngine | Engine, request: ListenRequest, search: dict[str, Any] | None,
            ctrl_c: CtrlC) -> int:
    source: Pcm | Microphone
    if request.source == STDIN:
        rate = request.rate or engine.config.sample_rate
        pcm = standard_input("16-bit PCM", f"arecord -t raw -f S16_LE -r {rate} | sbkit listen BUNDLE -")
        source = Pcm(open(pcm.fileno(), "rb", closefd=False), rate)  # noqa: SIM115  not ours to close
    else:
        source = Microphone(request.rate, engine.config.sample_rate, request.microphone)
    model_decoder = decoder(engine.vocabulary, search)
    transcriber: _LiveTranscriber
    if isinstance(engine, StreamEngine):
        transcriber = _ByChunks(engine, model_decoder, request.chunk, source.rate)
    else:
        transcriber = _ByTail(engine, model_decoder, source.rate)
    print(f"{engine.running}\nlistening to {source.name} at {source.rate} Hz {transcriber.delay}; Ctrl-C ends it",
          file=sys.stderr)
    captions: Captions
    if request.json:
        captions = Json(engine.vocabulary.text, sys.stdout)
    elif sys.stdout.isatty():
        captions = TerminalCaptions(engine.vocabulary.space, sys.stdout)
    else:
        captions = Plain(engine.vocabulary.text, sys.stdout)
    code = 0
    failed: SbkitError | None = None

    def show(lines: list[TranscriptLine]) -> None:
        for line in lines:
            captions.show(line)

    try:
        try:
            for samples in ctrl_c.defer_during(source):
                show(transcriber.feed(samples))
        except KeyboardInterrupt:
            code = _STOPPED
        except SbkitError as error:  # of the source: what it recorded is still decoded
            failed = error
        show(transcriber.finish())
        captions.end(transcriber.seconds)
    finally:
        captions.close()
    if source.warning is not None:  # after the line in progress
        print(source.warning, file=sys.stderr)
    if failed is not None:
        raise failed
    return code
