"""What ``sbkit tune`` found by trying, remembered per model, device and precision, and for each amount of memory."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sbkit.recipe.parts import for_good
from sbkit.system.cache import cache_folder
from sbkit.system.console import atomic_write

#: Share of what was found to fit that is recommended: memory fragments, and some texts are longer than others.
MARGIN = 0.9


@dataclass(frozen=True)
class BatchSize:
    """What fits into so much memory."""

    gib: float
    edges: list[float]
    """Seconds of the longest utterance of each bucket that was tried, ascending."""
    fits: list[int]
    """How many of those fit at once."""
    most: float
    """Seconds beyond which nothing was tried."""
    share: float = MARGIN
    """How much of what fits is recommended."""

    @property
    def seconds(self) -> int:
        """The ``max_batch_seconds`` to choose; 0 where not even one of the longest utterances fits."""
        return int(min(self.most, self.share * self.at_once))

    @property
    def at_once(self) -> float:
        """Seconds that fit in each bucket."""
        return min(n * edge for n, edge in zip(self.fits, self.edges, strict=True))


def model_of(modules: Mapping[str, nn.Module]) -> list[Any]:
    """What tells one model from another: its layers and sizes, as the recipe builds them."""
    modules = {name: module for name, module in modules.items() if module is not None}
    sizes = [[name, key, list(t.shape), str(t.dtype)] for name, module in modules.items()
             for key, t in module.state_dict().items()]
    return [*map(repr, modules.values()), sizes]


def place(model: list[Any], keys: Any, precision: str, device: torch.device) -> Path:
    """Where the results for a model are kept."""
    cuda = device.type == "cuda" and torch.cuda.is_available()
    optimizer = keys.opt_class
    while isinstance(optimizer, functools.partial):
        optimizer = optimizer.func
    facts = [
        model, torch.cuda.get_device_name(device) if cuda else device.type, precision, torch.__version__,
        str(keys.activation_checkpointing), keys.numbers_of_the_task(), str(optimizer),
        keys.ema is not None and getattr(keys.ema, "decay", 1) > 0, *([for_good(keys.freeze)] if keys.freeze else []),
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / "tune" / f"{key}.json"


def remembered(path: Path) -> list[BatchSize]:
    """Results by rising memory; none where nothing readable is kept."""
    try:
        stored = [BatchSize(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
        return sorted((one for one in stored if one.seconds >= 0), key=lambda one: one.gib)
    except (OSError, ValueError, TypeError):
        return []


def remember(path: Path, found: BatchSize) -> None:
    """Keep a result, in the place of an older one for as much memory."""
    kept: Iterable[BatchSize] = (one for one in remembered(path) if one.gib != found.gib)
    with atomic_write(path) as file:
        json.dump([asdict(one) for one in (*kept, found)], file)
