"""The models of a server, by name: clients can only choose from this list, never by path."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.infer.decoding import decoder
from sbkit.infer.engine import AUTO, Engine
from sbkit.serve.batcher import Batcher
from sbkit.serve.errors import broken, unknown_model

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Seconds after which a running batch counts as stuck.
STUCK_SECONDS = 120.0


def named(given: Sequence[str]) -> dict[str, Path]:
    """Parse bundles by name, from ``BUNDLE`` (named after its folder) and ``NAME=BUNDLE``."""
    found: dict[str, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals or Path(each).is_dir():
            name, path = Path(each).resolve().name, each
        if not _NAME.fullmatch(name):
            raise SbkitError(f"{name!r} can't be a model's name", hint="choose one of letters, digits and -._ : "
                                                                      f"NAME={path}")
        if name in found:
            raise SbkitError(f"two bundles are named {name}", hint=f"give them different names: NAME={path}")
        found[name] = Path(path)
    return found


@dataclass
class Options:
    """Options for all bundles, as in ``sbkit transcribe``."""

    model: str = AUTO
    device: str = AUTO
    threads: int | None = None
    batch_seconds: float | None = None
    chunk_seconds: float | None = None
    batching: bool = True
    search: Mapping[str, Any] | None = None


class ServedModel:
    """One bundle, loaded and warm."""

    def __init__(self, name: str, folder: Path, options: Options, told: Callable[[int], None] | None = None):
        self.name, self.created = name, int(time.time())
        self.engine = Engine(folder, options.model, options.device, options.threads)
        config = self.config = self.engine.config
        self.vocabulary = self.engine.vocabulary
        self.chunk_seconds = options.chunk_seconds or config.chunk_seconds
        self.frame_samples = config.hop_samples * config.subsampling
        self.decoder = decoder(self.vocabulary, options.search)
        rows = {} if options.batching else {"rows": 1}
        self.batcher = Batcher(self.engine, options.batch_seconds, told=told, **rows)

    @property
    def fault(self) -> str | None:
        """Why the model will never answer again, or None; the model is not run for it."""
        if self.engine.fault is not None:
            return self.engine.fault
        busy = self.batcher.busy_seconds
        return f"a batch has been running for {busy:.0f} s" if busy > STUCK_SECONDS else None

    def check(self) -> None:
        """Raise ``ApiError`` if the model is broken."""
        if (fault := self.fault) is not None:
            raise broken(fault)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for /health."""
        running = self.engine.running
        return {"asked": running.asked, "device": running.device, "provider": running.provider,
                "model": running.model, "file": running.file, "threads": running.threads,
                "versions": running.versions, "note": running.note, "language": self.config.language,
                "sample_rate": self.config.sample_rate, "fault": self.fault}

    @property
    def listed(self) -> dict[str, Any]:
        """Facts for /v1/models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "sbkit"}


class Registry:
    """All models of the server."""

    def __init__(self, served: Mapping[str, ServedModel]):
        self._served = dict(served)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    def get(self, name: str) -> ServedModel:
        """Look up a model by name."""
        try:
            return self._served[name]
        except KeyError:
            raise unknown_model(name, list(self._served)) from None

    def close(self) -> None:
        """Release all models."""
        for each in self:
            each.engine.close()


def load(bundles: Mapping[str, Path], options: Options, told: Callable[[str, int], None] | None = None) -> Registry:
    """Load all bundles, or raise for the first broken one; ``told`` gets the size of each model's batches."""
    loaded: dict[str, ServedModel] = {}
    try:
        for name, folder in bundles.items():
            loaded[name] = ServedModel(name, folder, options, None if told is None else functools.partial(told, name))
    except BaseException:
        Registry(loaded).close()
        raise
    return Registry(loaded)


