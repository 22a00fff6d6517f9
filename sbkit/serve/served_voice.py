"""A voice of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sbkit.infer.voice_engine import SpeechInput, VoiceEngine
from sbkit.serve.batcher import Batcher
from sbkit.serve.served import BundleOptions, Log, Served

#: Symbols in a batch, padding included, on a CPU and on a GPU; one text of the greatest length always fits.
_SYMBOLS = {True: 250, False: 6000}
_SENTENCE = 60  # symbols of the one that speed is measured with


class ServedVoice(Served):
    """A voice, loaded and warm."""

    endpoints = ("/v1/audio/speech",)

    def __init__(self, name: str, folder: Path, options: BundleOptions, log: Log | None = None,
                 stepped: Log | None = None):
        super().__init__(name, folder, options, log, stepped)
        self.engine = VoiceEngine(folder, options.model, options.device, options.threads)
        self.config = self.engine.config
        symbols = max(self.config.max_symbols, _SYMBOLS[self.engine.running.device == "cpu"])
        self.batcher = Batcher(self.engine, budget=symbols, log=log, batching=options.batching, unit="symbols",
                               cost=lambda line: len(line) / line.speed)
        sentence = min(self.config.max_symbols, _SENTENCE)
        self._measure(SpeechInput([1 + number % (len(self.config.symbols) - 1) for number in range(sentence)]))

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for /health."""
        return super().facts | {"voices": self.config.speakers}

    @property
    def voices(self) -> list[dict[str, Any]]:
        """Facts for /v1/audio/voices; the first is the default."""
        return [{"id": name, "object": "voice", "model": self.name, "language": self.config.language,
                 "default": not number} for number, name in enumerate(self.config.speakers)]
