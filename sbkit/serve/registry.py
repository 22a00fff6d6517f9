"""The models of a server, by name: clients can only choose from this list, never by path."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.assembly import Assembly, StableWords, make_transcript
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.decoding import decoder
from sbkit.infer.detector import SpeechDetector
from sbkit.infer.engine import Engine
from sbkit.infer.graph_model import GraphEngine
from sbkit.infer.stream_engine import StreamEngine, has_streaming_graph
from sbkit.infer.transcript import Transcript
from sbkit.infer.voice_engine import SpeechInput, VoiceEngine
from sbkit.serve.backlog import Work
from sbkit.serve.batcher import Batcher
from sbkit.serve.errors import ApiError, invalid
from sbkit.serve.job import Job
from sbkit.serve.metrics import Metrics
from sbkit.serve.served import BundleOptions, Served, device_facts, folder_state
from sbkit.system.cores import usable_cores

_log = logging.getLogger(__name__)
RETRY_SECONDS = 60.0  # until a bundle that was refused is tried again: there may be memory by then
_MEASURE_SECONDS = 5.0  # of the signal for measuring the speed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_bundles(arguments: Sequence[str]) -> dict[str, Path]:
    """Parse bundles by name, from ``BUNDLE`` (named after its folder) and ``NAME=BUNDLE``."""
    bundles: dict[str, Path] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).is_dir():  # a folder's own name may have an equals sign
            name, path = Path(argument).resolve().name, argument
        if not _NAME.fullmatch(name):
            raise SbkitError(f"{name!r} can't be a model's name", hint="choose one of letters, digits and -._ : "
                                                                      f"NAME={path}")
        if name in bundles:
            raise SbkitError(f"two bundles are named {name}", hint=f"give them different names: NAME={path}")
        bundles[name] = Path(path)
    return bundles


class ServedModel(Served):
    """A recogniser, loaded and warm."""

    endpoints, does = ("/v1/audio/transcriptions", "/v1/audio/live"), "recognises speech"
    engine: Engine
    streams: StreamEngine | None = None
    """Recognises live sessions; None if the bundle has no streaming graph in the format in use."""

    def _load(self, folder: Path, options: BundleOptions, metrics: Metrics) -> None:
        self.engine = Engine(folder, options.model, options.device, options.threads)
        self.engines.append(self.engine)
        config = self.engine.config
        self.config = config
        self.vocabulary = self.engine.vocabulary
        self.chunk_seconds = config.chunk(options.chunk_seconds)
        self.frame_samples = config.hop_samples * config.subsampling
        self.decoder = decoder(self.vocabulary, options.search)
        self.detector = SpeechDetector(config) if options.vad else None
        self.batcher = Batcher(self.engine, options.batch_seconds, options.batching,
                               metrics.batches.labels(self.name).observe)
        seconds = min(_MEASURE_SECONDS, self.chunk_seconds)
        self.batcher.measure(np.zeros(int(seconds * config.sample_rate), np.float32))

        model = self.engine.running.model
        if has_streaming_graph(config, model):
            max_streams = {} if options.batching else {"max_streams": 1}
            threads = options.threads or max(1, usable_cores() - 1)  # one is left for the connections
            self.streams = StreamEngine(folder, model, options.device, threads,
                                        on_step=metrics.steps.labels(self.name).observe, **max_streams)
            self.engines.append(self.streams)

    @property
    def busy_seconds(self) -> float:
        if self.streams is None:
            return self.batcher.busy_seconds
        return max(self.batcher.busy_seconds, self.streams.busy_seconds)

    @property
    def facts(self) -> dict[str, Any]:
        facts = super().facts
        if self.streams is None:
            return facts | {"streams": None, "chunks_ms": []}
        return facts | {"streams": device_facts(self.streams.running), "chunks_ms": list(self.streams.chunks)}


class ServedGraph(Served):
    """A model that outputs tensors, loaded and warm."""

    endpoints, does = ("/v1/audio/outputs",), "outputs tensors"
    engine: GraphEngine

    def _load(self, folder: Path, options: BundleOptions, metrics: Metrics) -> None:
        self.engine = GraphEngine(folder, options.model, options.device, options.threads)
        self.engines.append(self.engine)
        self.config = self.engine.config
        self.batcher = Batcher(self.engine, options.batch_seconds, options.batching,
                               metrics.batches.labels(self.name).observe)
        self.batcher.measure(np.zeros(int(_MEASURE_SECONDS * self.config.sample_rate), np.float32))


#: Symbols in a batch, padding included; one text of the greatest length always fits.
_SYMBOLS_ON_CPU, _SYMBOLS_ON_GPU = 250, 6000
_MEASURE_SYMBOLS = 60  # of the sentence for measuring the speed


class ServedVoice(Served):
    """A voice, loaded and warm."""

    endpoints, does = ("/v1/audio/speech",), "synthesises speech"
    engine: VoiceEngine

    def _load(self, folder: Path, options: BundleOptions, metrics: Metrics) -> None:
        self.engine = VoiceEngine(folder, options.model, options.device, options.threads)
        self.engines.append(self.engine)
        self.config = self.engine.config
        on_cpu = self.engine.running.device == "cpu"
        symbols = max(self.config.max_symbols, _SYMBOLS_ON_CPU if on_cpu else _SYMBOLS_ON_GPU)
        self.batcher = Batcher(self.engine, batching=options.batching, log=metrics.batches.labels(self.name).observe,
                               budget=symbols, unit="symbols", cost=lambda line: len(line) / line.speed)

        length = min(self.config.max_symbols, _MEASURE_SYMBOLS)
        ids = [1 + number % (len(self.config.symbols) - 1) for number in range(length)]  # all except padding, 0
        self.batcher.measure(SpeechInput(ids))

    @property
    def facts(self) -> dict[str, Any]:
        return super().facts | {"voices": self.config.speakers}

    @property
    def voices(self) -> list[dict[str, Any]]:
        """Facts for /v1/audio/voices; the first is the default."""
        return [{"id": name, "object": "voice", "model": self.name, "language": self.config.language,
                 "default": not number} for number, name in enumerate(self.config.speakers)]


#: The class that serves each kind of bundle.
SERVED: layout.ByKind[type[Served]] = layout.ByKind({
    layout.VoiceConfig: ServedVoice,
    layout.GraphConfig: ServedGraph,
    layout.Bundle: ServedModel,  # it refuses what isn't a recogniser, and says what the bundle is for
})


def serve_kind(config: type[layout.Bundle], served: type[Served]) -> None:
    """Let a class of your own serve a kind of bundle; without it, the kind is served as its base class is."""
    SERVED[config] = served


S = TypeVar("S", bound=Served)


class Registry:
    """All models of the server.

    options, metrics : as they were loaded with, for bundles that take their places
    """

    def __init__(self, served: Mapping[str, Served], options: BundleOptions, metrics: Metrics):
        self._served = dict(served)
        self._options = options
        self._metrics = metrics
        #: The state of each folder at the last call of ``refresh``.
        self._seen = {served.name: served.files for served in self}
        #: The state of each folder whose bundle was refused, and when it is tried again.
        self._refused: dict[str, tuple[list[tuple[str | int, ...]], float]] = {}

    def refresh(self) -> None:
        """Load bundles that replaced served ones, once their folders are the same at two calls.

        New requests get the new model. Requests in flight hold the old one, whose engines end when nobody holds it. A
        bundle that can't be served is refused, and the old one stays.
        """
        for name, served in list(self._served.items()):
            files = folder_state(served.folder)
            complete = files == self._seen[name]  # otherwise it may still be copied
            self._seen[name] = files
            if files == served.files:  # also when the old one was put back
                served.refused = None
                self._refused.pop(name, None)
                continue
            refused_files, retry_at = self._refused.get(name, (None, 0.0))
            if complete and (files != refused_files or time.monotonic() > retry_at):
                self._replace(name, served, files)

    def _replace(self, name: str, old: Served, files: list[tuple[str | int, ...]]) -> None:
        """Load the bundle that is now in the folder of ``old``, and serve it instead, or say why not."""
        try:
            config = layout.read(old.folder)
            kind = SERVED.of(config)
            if kind is not type(old):
                raise SbkitError(f"it {kind.does}, and the model served here {old.does}")
            layout.check_files(old.folder, config)  # takes about a second: a copy may be damaged
            new = kind(name, old.folder, self._options, self._metrics)
        except Exception as error:  # whatever a runtime raises for a broken graph, or without enough memory
            self._refused[name] = files, time.monotonic() + RETRY_SECONDS
            old.refused = str(error) or repr(error)
            _log.error("%s: the bundle now in %s is refused, the one before serves on: %s", name, old.folder,
                       old.refused)
            return
        self._served[name] = new
        _log.info("%s: serving the bundle that is now in %s: %s", name, old.folder, ", ".join(map(str, new.placements)))

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def of(self, kind: type[S]) -> list[S]:
        return [served for served in self if isinstance(served, kind)]

    def working(self, name: str | None, kind: type[S]) -> S:
        """The model that a request names; raises ``ApiError`` also if its device is broken."""
        if not name:
            names = ", ".join(served.name for served in self.of(kind)) or "none"
            raise invalid(f"the field model is missing; this server has {names}", "model")
        served = self.find(name, kind)
        served.check()
        return served

    def find(self, name: str, kind: type[S]) -> S:
        """The model of this name; raises ``ApiError`` if there is none, or if it is of another kind."""
        served = self._served.get(name)
        if served is None:
            raise ApiError(404, f"the model {name[:80]!r} does not exist; this server has {', '.join(self._served)}",
                           param="model", code="model_not_found")
        if not isinstance(served, kind):
            raise invalid(f"the model {name} {served.does}: use it at {' or '.join(served.endpoints)}", "model",
                          "model_not_supported")
        return served

    def close(self) -> None:
        for served in self:
            served.close()


def load(bundles: Mapping[str, Path], options: BundleOptions, metrics: Metrics | None = None) -> Registry:
    """Load all bundles, or raise for the first broken one."""
    metrics = metrics or Metrics()
    kinds = {name: SERVED.of(layout.read(folder)) for name, folder in bundles.items()}
    recognises = any(issubclass(kind, ServedModel) for kind in kinds.values())
    if not recognises and (options.search or options.chunk_seconds or options.batch_seconds or options.vad):
        raise SbkitError("language models, hot words, --vad, --chunk-seconds and --batch-seconds are for recognisers, "
                         "and none is served", hint="leave them out, or serve a recogniser too")
    loaded: dict[str, Served] = {}
    try:
        for name, folder in bundles.items():
            loaded[name] = kinds[name](name, folder, options, metrics)
    except BaseException:
        for served in loaded.values():
            served.close()
        raise
    return Registry(loaded, options, metrics)


_MAX_IN_FLIGHT = 4  # chunks of one recording that are computed at once: a long one must not fill all batches


def recognise(served: ServedModel, blocks: Iterable[np.ndarray], job: Job, work: Work,
              progress: Callable[[str], None] | None = None) -> Transcript:
    """Transcribe a recording given as blocks [S].

    job : cancels it
    work : is updated with the audio that is done
    progress : called with each new piece of text; all pieces joined are the transcript's text
    """
    config = served.config
    assembly = Assembly()
    stable = StableWords(served.decoder, served.vocabulary)
    reported_words = 0
    in_flight: deque[tuple[int, Chunk, Future[Any] | None]] = deque()  # None: a silent chunk, which needs no model

    def add_oldest() -> None:
        number, chunk, future = in_flight.popleft()
        output = chunk.output(None if future is None else job.result(future), config.blank_id, config.width)
        assembly.add(number, chunk, output, served.frame_samples, served.decoder)
        work.done(assembly.samples / config.sample_rate)
        new_stretches, assembly.stretches = assembly.stretches, []
        stable.add(new_stretches)
        report()

    def report() -> None:
        nonlocal reported_words
        new_words = stable.words[reported_words:]
        if new_words and progress is not None:
            progress((served.vocabulary.space if reported_words else "") + served.vocabulary.text(new_words))
            reported_words += len(new_words)

    chunks = cut(blocks, config.sample_rate, served.frame_samples, served.chunk_seconds, served.detector)
    for number, chunk in enumerate(chunks):
        job.check()
        future = None
        if not chunk.silent:
            future = job.watch(served.batcher.submit(chunk.signal, job.client, work))
        in_flight.append((number, chunk, future))
        if len(in_flight) >= _MAX_IN_FLIGHT:
            add_oldest()
    while in_flight:
        add_oldest()
    stable.end()
    report()
    return make_transcript("", assembly, stable.words, served.vocabulary)
