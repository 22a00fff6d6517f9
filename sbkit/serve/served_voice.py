"""A voice of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbkit.infer.voice_engine import SpeechInput, VoiceEngine
from sbkit.serve.batcher import Batcher
from sbkit.serve.served import Served

#: Symbols in a batch, padding included, on a CPU and on a GPU; one text of the greatest length always fits.
_SYMBOLS = {True: 250, False: 6000}
_SENTENCE = 60  # symbols of the one that speed is measured with


class ServedVoice(Served):
    """A voice, loaded and warm.

    Arguments
    ---------
    model, device, threads : as for ``VoiceEngine``
    batching : False runs each sentence by itself
    told : called with the sentences in each batch
    """

    endpoints = ("/v1/audio/speech",)

    def __init__(self, name: str, folder: Path, model: str, device: str, threads: int | None, batching: bool = True,
                 told: Callable[[int], None] | None = None):
        super().__init__(name)
        self.engine = VoiceEngine(folder, model, device, threads)
        self.config = self.engine.config
        symbols = max(self.config.max_symbols, _SYMBOLS[self.engine.running.device == "cpu"])
        self.batcher = Batcher(self.engine, budget=symbols, told=told, batching=batching, unit="symbols",
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
