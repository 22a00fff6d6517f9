"""Bundles of models that output tensors, made on the spot: a level of each recording, or a quieter recording."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sbkit.export import graph, layout
from sbkit.export.exported import INPUTS
from sbkit.export.layout import GraphConfig, LabelsConfig

RATE = 8000


class Level(nn.Module):
    """The mean of absolute samples, and what is above and below 0.1."""

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        level = signals.abs().sum(1) / lengths
        return torch.stack([0.1 - level, level - 0.1], 1)


class Quieter(nn.Module):
    """Half of each sample."""

    def forward(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * signals, lengths + 0


def make(folder: Path, sound: bool = False, labels: bool = True, thresholds: list[float] | None = None) -> Path:
    """Write the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {"quieter": ("batch", "samples"), "count": ("batch",)} if sound else {"level": ("batch",)}
    example = torch.randn(2, 400), torch.tensor([400, 200])
    program = graph.trace_module(Quieter() if sound else Level(), example, {"signals": (0, 1), "lengths": (0,)})
    graph.write_onnx(program, folder / "model.onnx", INPUTS, outputs, {})
    kind = GraphConfig if thresholds is None else partial(LabelsConfig, thresholds=thresholds)
    config = kind(sample_rate=RATE, outputs=list(outputs), models={"onnx": "model.onnx"},
                  labels=["quiet", "loud"] if labels and not sound else [],
                  lengths={"quieter": "count"} if sound else {})
    config.files = {path.name: layout.fingerprint(path) for path in folder.iterdir()}
    (folder / layout.CONFIG).write_text(config.to_json())
    return folder
