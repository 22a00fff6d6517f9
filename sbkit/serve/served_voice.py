"""A voice of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbkit.infer.voice_engine import VoiceEngine
from sbkit.serve.batcher import Batcher
from sbkit.serve.served import Served

#: Symbols in a batch, padding included, on a CPU and on a GPU; one text of the greatest length always fits.
_SYMBOLS = {True: 250, False: 6000}


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
        rows = {} if batching else {"rows": 1}
        self.batcher = Batcher(self.engine, budget=symbols, told=told, **rows)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for /health."""
        return super().facts | {"voices": self.config.speakers}

    @property
    def voices(self) -> list[dict[str, Any]]:
        """Facts for /v1/audio/voices; the first is the default."""
        return [{"id": name, "object": "voice", "model": self.name, "language": self.config.language,
                 "default": not number} for number, name in enumerate(self.config.speakers)]
