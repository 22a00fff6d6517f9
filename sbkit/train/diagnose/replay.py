"""Replay of a saved culprit: runs the same batch again and shows the values of each layer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from sbkit.errors import SbkitError
from sbkit.score.run_files import CULPRITS
from sbkit.system.console import table
from sbkit.train.diagnose.causes import causes
from sbkit.train.diagnose.culprit import KeptBatch, alone, at_step, bad_ids, describe, moved, runner, some
from sbkit.train.diagnose.inspection import Inspection, Layer, examine
from sbkit.train.diagnose.saved_batch import unpack, utterance_ids

if TYPE_CHECKING:
    from sbkit.train.brain import Brain


def find(folder: str | os.PathLike[str]) -> Path:
    """Return the given folder if it is a culprit, or the newest culprit of a run."""
    folder = Path(folder)
    if (folder / "culprit.json").is_file():
        return folder
    for parent in (folder / CULPRITS, folder):
        saved = [path.parent for path in parent.glob("step-*/culprit.json")]
        if saved:
            return max(saved, key=lambda path: ((path / "culprit.json").stat().st_mtime, path.name))
    raise SbkitError(f"{folder} holds no culprit (looked for {CULPRITS}/step-N-rank-R/culprit.json)",
                     hint="a run saves one when a loss or gradient is not finite")


def replay(brain: Brain, folder: str | os.PathLike[str], *, weights: bool = True) -> str:
    """Run the culprit in ``folder`` through ``brain``; return the report and a table of all layers.

    The brain must have the recipe, modules and precision of the run. With ``weights=True`` it gets the weights saved
    with the report, if there are any (on a GPU they are a step newer than the culprit). Otherwise its own weights are
    used, such as those of a checkpoint. The text says which.
    """
    folder = find(folder)
    saved = read(folder)
    tensors = load_file(folder / "tensors.safetensors")
    exact = weights and _take_weights(brain.modules, folder, saved)
    brain.trainer.freezing.update(saved["step"] - 1)
    brain.trainer.freezing.train()
    lines = [f"Step {saved['step']} of rank {saved['rank']}, {saved['precision']} on {saved['device']}; "
             f"the {saved['what']} was not finite.",
             f"Weights: {_weights(exact, saved)}."]
    with at_step(brain, saved["step"]):
        for one in saved["batches"]:
            lines += ["", *_again(brain, one, tensors, saved)]
    return "\n".join(lines)


def _weights(exact: bool, saved: Mapping[str, Any]) -> str:
    if not exact:
        return "the checkpoint's, not those of that step"
    return f"those {moved(saved)}" if saved.get("late") else "those of that step"


def read(folder: Path) -> dict[str, Any]:
    """Read the JSON file of a culprit."""
    try:
        return json.loads((folder / "culprit.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise SbkitError(f"{folder / 'culprit.json'} is damaged: {error}") from error


def layer_table(layers: list[Layer]) -> str:
    """Return a table of layer outputs in the order of computation; ``>`` marks those that are not finite."""
    rows = [
        [">" if layer.output.bad else "", layer.name, layer.kind, layer.output.dtype,
         "x".join(map(str, layer.output.shape)), _value(layer.output.low), _value(layer.output.high),
         layer.output.nan, layer.output.inf + layer.output.minus_inf]
        for layer in layers
    ]
    return table(["", "layer", "kind", "type", "shape", "min", "max", "nan", "inf"], rows)


def _again(brain: Brain, one: Mapping[str, Any], tensors: Mapping[str, torch.Tensor],
           saved: Mapping[str, Any]) -> list[str]:
    at = f"micro{one['micro']}/"
    batch = unpack(one["tree"], _under(f"{at}batch/", tensors), brain.device)
    suspect = KeptBatch(batch, _under(f"{at}rng/", tensors) or None)
    found = examine(runner(brain), brain.modules, suspect.batch, rng=suspect.rng, device=brain.device,
                    scale=saved["scale"] * saved.get("sum_scale", 1.0), keep_layers=True)
    ids = utterance_ids(suspect.batch)
    if not found.utterance_losses and not found.error:
        found.utterance_losses = alone(brain, suspect)
    told = [layer_table(found.layers), "", f"micro-batch {one['micro']}: {describe(found)}"]
    bad = bad_ids(found, ids)
    if bad:
        told.append(f"utterances where it shows: {some(bad)}")
    told += [f"likely: {cause}" for cause in causes(found, suspect.batch, saved)]
    return [*told, *_losses(found, ids)]


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _losses(found: Inspection, ids: list[str]) -> list[str]:
    if len(ids) != len(found.utterance_losses):
        return []
    return ["", table(["utterance", "loss"], [[i, f"{loss:.4g}"] for i, loss in
                                              zip(ids, found.utterance_losses, strict=True)])]


def _take_weights(modules: torch.nn.Module, folder: Path, saved: Mapping[str, Any]) -> bool:
    """Load the step's weights from its culprits, of any rank; return whether there were any."""
    kept = _kept_weights(folder.parent, saved["step"])
    if kept is None:
        return False
    held = load_file(kept)
    own = {**dict(modules.named_parameters()), **dict(modules.named_buffers())}
    differing = [name for name in {*held, *own}
                 if name not in held or name not in own or held[name].shape != own[name].shape]
    if differing:
        raise SbkitError(f"the culprit belongs to another model: {some(sorted(differing))} differ",
                         hint="replay it with the hyperparams.yaml of its run")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(held[name])
    return True


def _kept_weights(culprits: Path, step: int) -> Path | None:
    """Find the weights that the model had at a step. Steps that were skipped right before it had the same ones."""
    while any(culprits.glob(f"step-{step}-rank-*/culprit.json")):
        kept = sorted(culprits.glob(f"step-{step}-rank-*/model.safetensors"))
        if kept:
            return kept[0]
        step -= 1
    return None


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
