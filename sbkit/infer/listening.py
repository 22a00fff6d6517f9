"""Transcribes a microphone or a program's samples, and shows the words as they come."""

from __future__ import annotations

import signal
import sys
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
from sbkit.infer.captions import Captions, Json, Plain, TerminalCaptions
from sbkit.infer.decoding import decoder
from sbkit.infer.formats import ModelRequest
from sbkit.infer.inputs import STDIN
from sbkit.infer.lines import Lines
from sbkit.infer.sound_sources import Microphone, Pcm
from sbkit.infer.stream import Stream
from sbkit.infer.stream_engine import StreamEngine
from sbkit.system.untrusted import standard_input

_STOPPED = 128 + signal.SIGINT


@dataclass(frozen=True)
class ListenRequest(SearchRequest, ModelRequest):
    """What to listen to, and how.

    source : ``-`` for 16-bit PCM from standard input; None for the microphone
    rate : samples per second; None: the model's, or what the microphone has
    microphone : its number or a part of its name
    chunk : milliseconds that are decoded at once; None: the model's middle size
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
        self._pressed = self._defers = False
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


def listen(request: ListenRequest) -> int:
    """Listen until the samples end or Ctrl-C, and return the exit code."""
    if request.source not in (STDIN, None):
        missing = "" if Path(request.source).exists() else ", and there is no such file"
        raise SbkitError(f"listen takes a microphone, or - for standard input, but not {request.source}{missing}",
                         hint=f"files are for: sbkit transcribe {request.bundle} {request.source}; or, if it is "
                              f"raw 16-bit PCM: sbkit listen {request.bundle} - < {request.source}")
    if request.source == STDIN and request.microphone is not None:
        raise SbkitError(f"- reads standard input, so it can't also use the microphone {request.microphone}",
                         hint="leave out one of them")
    search = request.search  # raises before a model is loaded
    with CtrlC() as ctrl_c:
        try:
            with StreamEngine(request.bundle, request.model, request.device, request.threads, max_streams=1) as engine:
                return _listen(engine, request, search, ctrl_c)
        except KeyboardInterrupt:  # while the model is loaded, or the rest is decoded
            return _STOPPED


def _listen(engine: StreamEngine, request: ListenRequest, search: dict[str, Any] | None, ctrl_c: CtrlC) -> int:
    source: Pcm | Microphone
    if request.source == STDIN:
        rate = request.rate or engine.config.sample_rate
        pcm = standard_input("16-bit PCM", f"arecord -t raw -f S16_LE -r {rate} | sbkit listen BUNDLE -")
        source = Pcm(open(pcm.fileno(), "rb", closefd=False), rate)  # noqa: SIM115  not ours to close
    else:
        source = Microphone(request.rate, engine.config.sample_rate, request.microphone)
    stream = Stream(engine, decoder(engine.vocabulary, search), request.chunk, source.rate)
    print(f"{engine.running}\nlistening to {source.name} at {source.rate} Hz in chunks of "
          f"{1000 * stream.chunk_seconds:g} ms; Ctrl-C ends it", file=sys.stderr)
    captions: Captions = Json(engine.vocabulary.text, sys.stdout) if request.json else \
        TerminalCaptions(engine.vocabulary.space, sys.stdout) if sys.stdout.isatty() else \
        Plain(engine.vocabulary.text, sys.stdout)
    lines, code = Lines(engine.config.chunk_seconds), 0
    failed: SbkitError | None = None

    def show(results: list[StreamResult]) -> None:
        for each in results:
            for line in lines.add(each):
                captions.show(line)

    try:
        try:
            for samples in ctrl_c.defer_during(source):
                show(stream.feed(samples))
        except KeyboardInterrupt:
            code = _STOPPED
        except SbkitError as error:  # of the source: what it recorded is still decoded
            failed = error
        rest = stream.finish()
        show(rest)
        captions.end(rest[-1].seconds)
    finally:
        captions.close()
    if source.warning is not None:  # after the line in progress
        print(source.warning, file=sys.stderr)
    if failed is not None:
        raise failed
    return code
