"""The replay of a saved bad batch: a table of every layer, and of each utterance's loss."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import speechbrain as sb

from sbkit.system.console import table
from sbkit.train.bad_batch import files
from sbkit.train.bad_batch.examine import Layer, examine
from sbkit.train.batches import KeptBatch, rows


def replay(brain: sb.Brain, folder: str | os.PathLike[str]) -> str:
    """Run a saved batch through ``brain``; return a table of all layers, and the loss of each utterance alone.

    The brain must have the recipe, modules and precision of the run. It gets the weights saved with the step, if there
    are any. Otherwise its own weights are used, such as those of a checkpoint. The text says which.
    """
    folder, saved = files.find_saved(folder)
    step = saved["step"]
    weights_file = files.weights_of(folder, step)
    if weights_file is not None:
        files.load_weights(brain.modules, weights_file)
    brain.trainer.freezing.apply(step - 1)
    brain.trainer.freezing.train()

    lines = [f"Step {step} of rank {saved['rank']}, {saved['precision']} on {saved['device']}; the {saved['what']} was "
             "not finite.", f"Weights: {_weights_in_words(saved, weights_file)}."]
    scale = saved["scale"] * saved.get("sum_scale", 1.0)
    for micro, kept in files.batches_of(folder, brain.device):
        finding, layers = examine(brain, kept, step, scale)
        lines += ["", table(["", "layer", "kind", "type", "shape", "min", "max", "nan", "inf"],
                            [_cells(layer) for layer in layers]),
                  "", f"micro-batch {micro}: {finding.where}"]
        if not finding.bad:
            continue
        losses = []
        for row, utterance in enumerate(finding.ids):
            alone, _ = examine(brain, KeptBatch(rows(kept.batch, row, row + 1), kept.rng), step, scale)
            losses.append([">" if alone.bad else "", utterance, alone.loss])
        if losses:
            lines += ["", table(["", "utterance", "loss alone"], losses)]
    return "\n".join(lines)


def _weights_in_words(saved: Mapping[str, Any], weights_file: Path | None) -> str:
    late = saved.get("late", 0)
    if weights_file is None:
        return "the checkpoint's, not those of that step"
    if late:
        return f"those after step {saved['step'] + late}"
    return "those of that step"


def _cells(layer: Layer) -> list[object]:
    """Return a row of the table of layers; ``>`` marks those with a value that is not finite."""
    mark = ">" if layer.nan or layer.inf or layer.minus_inf else ""
    low = "" if layer.low is None else f"{layer.low:.3g}"
    high = "" if layer.high is None else f"{layer.high:.3g}"
    shape = "x".join(map(str, layer.shape))
    return [mark, layer.name, layer.kind, layer.dtype, shape, low, high, layer.nan, layer.inf + layer.minus_inf]
