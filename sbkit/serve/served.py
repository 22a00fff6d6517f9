"""What all models of a server have: a name, an engine, batches, a state of health."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sbkit.infer.bundle_engine import BatchEngine, BundleEngine
from sbkit.infer.device import Placement
from sbkit.infer.formats import ModelRequest
from sbkit.serve.batcher import Batcher
from sbkit.serve.errors import SERVER, ApiError

if TYPE_CHECKING:  # of a package that a server alone needs
    from sbkit.serve.metrics import Metrics

#: Seconds after which a running batch counts as stuck.
STUCK_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class BundleOptions(ModelRequest):
    """Options for all bundles, as in ``sbkit transcribe``.

    batching : False runs every signal by itself
    search : options of a search with a language model and hot words
    vad : whether recordings' words are written only where silero-vad hears somebody speak
    """

    batch_seconds: float | None = None
    chunk_seconds: float | None = None
    batching: bool = True
    search: Mapping[str, Any] | None = None
    vad: bool = False


def device_facts(placement: Placement) -> dict[str, Any]:
    """Facts for /health, where the requested device is called ``asked``."""
    facts = asdict(placement)
    return {"asked": facts.pop("requested"), **facts}


#: What differs once a folder was replaced: names, inodes, sizes and times of its files.
FolderState = list[tuple[str | int, ...]]


def folder_state(folder: Path) -> FolderState:
    """Read the state of a folder; empty if it is gone."""
    try:
        with os.scandir(folder) as entries:
            stats = {entry.name: entry.stat() for entry in entries}
    except OSError:
        return []
    return sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())


class Served(ABC):
    """One bundle, loaded and warm. ``sbkit.serve.served_kinds.SERVED`` says which subclass serves which kind."""

    #: Paths of the API that the model serves.
    endpoints: ClassVar[tuple[str, ...]]
    #: What it does, for the error of a request for something else.
    does: ClassVar[str]
    engine: BatchEngine
    batcher: Batcher

    def __init__(self, name: str, folder: Path, options: BundleOptions, metrics: Metrics):
        self.name = name
        self.folder = folder
        self.created = int(time.time())
        self.files = folder_state(folder)
        """The state of the folder before it was read."""
        self.refused: str | None = None
        """Why the bundle that is in the folder now is not served instead of this one."""
        self.engines: list[BundleEngine] = []
        """Those that are open, ``engine`` first."""
        try:
            self._load(folder, options, metrics)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _load(self, folder: Path, options: BundleOptions, metrics: Metrics) -> None:
        """Load ``engine`` and ``batcher``, and measure the speed, so that even the first request is refused if it can't
        finish in time; each engine is added to ``engines``."""

    @property
    def busy_seconds(self) -> float:
        return self.batcher.busy_seconds

    def close(self) -> None:
        for engine in reversed(self.engines):
            engine.close()

    @property
    def fault(self) -> str | None:
        """Why the model can't run any more, or None; asking doesn't run it."""
        for engine in self.engines:
            if engine.fault is not None:
                return engine.fault
        if self.busy_seconds > STUCK_SECONDS:
            return f"a batch has been running for {self.busy_seconds:.0f} s"
        return None

    def check(self) -> None:
        """Raise ``ApiError`` if the model can't run any more."""
        fault = self.fault
        if fault is not None:
            raise ApiError(503, "device_fault", f"the device failed ({fault}); the server has to be restarted",
                           type=SERVER, headers={"x-should-retry": "false"})

    @contextlib.contextmanager
    def device_errors(self) -> Iterator[None]:
        """Raise the error of :meth:`check` for any error of this block, if the device is broken."""
        try:
            yield
        except Exception:
            self.check()
            raise

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for /health."""
        return {**device_facts(self.engine.running), "language": self.engine.config.language,
                "sample_rate": self.engine.config.sample_rate, "endpoints": self.endpoints, "fault": self.fault,
                "refused_bundle": self.refused is not None}

    @property
    def placements(self) -> list[Placement]:
        return [engine.running for engine in self.engines]

    @property
    def listed(self) -> dict[str, Any]:
        """Facts for /v1/models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "sbkit",
                "endpoints": self.endpoints}
