"""Running statistics of a normalisation, which SpeechBrain keeps beside its state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sbkit.runs.initial.files import STATISTICS


def counted(modules: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that count statistics over a whole corpus, by path."""
    for path, module in modules.named_modules():
        if getattr(module, "norm_type", "") == "global" and hasattr(module, "_load_statistics_dict"):
            yield path, module


def load_statistics(modules: nn.Module, found: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Give the modules under these paths what another run had counted."""
    for path, module in counted(modules):
        if path in found:
            values = dict(found[path])
            module._load_statistics_dict({**values, "count": int(values["count"])})


def named(head: str) -> dict[str, str]:
    """What the statistics of a module are called, by what they are called in it."""
    return {name: f"{head}.{name}" for name in sorted(STATISTICS)}
