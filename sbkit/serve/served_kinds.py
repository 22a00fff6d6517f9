"""How a server runs each kind of bundle: a recogniser, a model that outputs tensors, a voice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sbkit.export import layout
from sbkit.infer.decoding import decoder
from sbkit.infer.detector import SpeechDetector
from sbkit.infer.engine import Engine
from sbkit.infer.graph_model import GraphEngine
from sbkit.infer.stream_engine import StreamEngine, has_streaming_graph
from sbkit.infer.voice_engine import SpeechInput, VoiceEngine
from sbkit.serve.batcher import Batcher
from sbkit.serve.served import BundleOptions, Served, device_facts
from sbkit.system.cores import usable_cores

if TYPE_CHECKING:  # of a package that a server alone needs
    from sbkit.serve.metrics import Metrics

#: Seconds of the signal, and symbols of the sentence, for measuring the speed.
_MEASURE_SECONDS = 5.0
_MEASURE_SYMBOLS = 60
#: Symbols in a batch of a voice, padding included.
_SYMBOLS_ON_CPU = 250
_SYMBOLS_ON_GPU = 6000


class ServedRecogniser(Served):
    """A recogniser, loaded and warm."""

    endpoints = "/v1/audio/transcriptions", "/v1/audio/live"
    does = "recognises speech"
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

    endpoints = ("/v1/audio/outputs",)
    does = "outputs tensors"
    engine: GraphEngine

    def _load(self, folder: Path, options: BundleOptions, metrics: Metrics) -> None:
        self.engine = GraphEngine(folder, options.model, options.device, options.threads)
        self.engines.append(self.engine)
        self.config = self.engine.config
        self.batcher = Batcher(self.engine, options.batch_seconds, options.batching,
                               metrics.batches.labels(self.name).observe)
        self.batcher.measure(np.zeros(int(_MEASURE_SECONDS * self.config.sample_rate), np.float32))


class ServedVoice(Served):
    """A voice, loaded and warm."""

    endpoints = ("/v1/audio/speech",)
    does = "synthesises speech"
    engine: VoiceEngine

    def _load(self, folder: Path, options: BundleOptions, metrics: Metrics) -> None:
        self.engine = VoiceEngine(folder, options.model, options.device, options.threads)
        self.engines.append(self.engine)
        self.config = self.engine.config
        symbols = _SYMBOLS_ON_CPU if self.engine.running.device == "cpu" else _SYMBOLS_ON_GPU
        symbols = max(symbols, self.config.max_symbols)  # one text of the greatest length always fits
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
        default = self.config.speakers[0]
        return [{"id": name, "object": "voice", "model": self.name, "language": self.config.language,
                 "default": name == default} for name in self.config.speakers]


#: The class that serves each kind of bundle.
SERVED: layout.ByKind[type[Served]] = layout.ByKind({
    layout.VoiceConfig: ServedVoice,
    layout.GraphConfig: ServedGraph,
    layout.Bundle: ServedRecogniser,  # it refuses what isn't a recogniser, and says what the bundle is for
})


def serve_kind(config: type[layout.Bundle], served: type[Served]) -> None:
    """Let a class of your own serve a kind of bundle; without it, the kind is served as its base class is."""
    SERVED[config] = served
