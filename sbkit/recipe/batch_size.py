"""The batch sizes that ``sbkit tune`` found, stored per model, device, precision and amount of memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sbkit.recipe.keys import TaskKeys
from sbkit.recipe.parts import permanently_frozen
from sbkit.recipe.values import unwrapped
from sbkit.system.console import atomic_write
from sbkit.system.disk import cache_folder

#: The recommended share of the largest batch that fits, because memory fragments and some texts are longer.
MARGIN = 0.9


@dataclass(frozen=True)
class BatchSize:
    """The batches that fit into an amount of memory."""

    gib: float
    edges: list[float]
    """Seconds of the longest utterance of each bucket that was tried, ascending."""
    fits: list[int]
    """The number of such utterances that fit at once, for each bucket."""
    most: float
    """Seconds beyond which no larger batch was tried."""
    share: float = MARGIN
    """The recommended share of the largest batch that fits."""

    @property
    def seconds(self) -> int:
        """The recommended ``max_batch_seconds``; 0 if not even one of the longest utterances fits."""
        return int(min(self.most, self.share * self.at_once))

    @property
    def at_once(self) -> float:
        """Seconds of audio that fit at once, whatever the bucket."""
        return min(n * edge for n, edge in zip(self.fits, self.edges, strict=True))


def model_of(modules: Mapping[str, nn.Module]) -> list[Any]:
    """Plain data that identifies a model: its layers and sizes."""
    modules = {name: module for name, module in modules.items() if module is not None}
    sizes = [[name, key, list(t.shape), str(t.dtype)] for name, module in modules.items()
             for key, t in module.state_dict().items()]
    return [*map(repr, modules.values()), sizes]


def result_file(model: list[Any], keys: TaskKeys, precision: str, device: torch.device) -> Path:
    """The file that has the results for a model on a device, with a precision and the keys that affect memory."""
    cuda = device.type == "cuda" and torch.cuda.is_available()
    # A step's memory may depend on the task's own numbers and texts.
    of_task = [name for name, declaration in keys.declared().items()
               if declaration.plain and declaration.by not in ("TrainKeys", "TaskKeys")]
    facts = [
        model, torch.cuda.get_device_name(device) if cuda else device.type, precision, torch.__version__,
        str(keys.activation_checkpointing), {name: vars(keys).get(name) for name in ("sample_rate", *of_task)},
        str(unwrapped(keys.opt_class)[0]),
        keys.moving_average is not None, *([permanently_frozen(keys.freeze)] if keys.freeze else []),
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / "tune" / f"{key}.json"


def cached(path: Path) -> list[BatchSize]:
    """Stored results, ordered by memory; empty if there are none or they can't be read."""
    try:
        stored = [BatchSize(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
        return sorted((size for size in stored if size.seconds >= 0), key=lambda size: size.gib)
    except (OSError, ValueError, TypeError):
        return []


def store(path: Path, result: BatchSize) -> None:
    """Store a result; it replaces an older one for the same amount of memory."""
    others = [size for size in cached(path) if size.gib != result.gib]
    with atomic_write(path) as file:
        json.dump([asdict(size) for size in (*others, result)], file)
