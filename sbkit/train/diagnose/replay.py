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
from sbkit.train.diagnose.culprit import some, weights_of
from sbkit.train.diagnose.inspection import KeptBatch, Layer, examine
from sbkit.train.diagnose.saved_batch import unpack

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


def read(folder: Path) -> dict[str, Any]:
    """Read the JSON file of a culprit."""
    try:
        return json.loads((folder / "culprit.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise SbkitError(f"{folder / 'culprit.json'} is damaged: {error}") from error


def replay(brain: Brain, folder: str | os.PathLike[str]) -> str:
    """Run the culprit in ``folder`` through ``brain``; return the report and a table of all layers.

    The brain must have the recipe, modules and precision of the run. It gets the weights saved with the report, if
    there are any (on a GPU they are a step newer than the culprit). Otherwise its own weights are used, such as those
    of a checkpoint. The text says which.
    """
    folder = find(folder)
    saved = read(folder)
    step = saved["step"]
    tensors = load_file(folder / "tensors.safetensors")
    exact = _take_weights(brain.modules, folder.parent, step)
    brain.trainer.freezing.update(step - 1)
    brain.trainer.freezing.train()
    weights = f"those {weights_of({'late': 0, **saved})}" if exact else "the checkpoint's, not those of that step"
    lines = [f"Step {step} of rank {saved['rank']}, {saved['precision']} on {saved['device']}; the {saved['what']} was "
             "not finite.", f"Weights: {weights}."]
    for one in saved["batches"]:
        at = f"micro{one['micro']}/"
        batch = unpack(one["tree"], _under(f"{at}batch/", tensors), brain.device)
        scale = saved["scale"]
        found = examine(brain, KeptBatch(batch, _under(f"{at}rng/", tensors) or None), step,
                        scale * saved.get("sum_scale", 1.0))
        lines += ["", layer_table(found.layers), "", f"micro-batch {one['micro']}: {found.where()}"]
        lines += [f"utterances where it shows: {some(found.bad_ids)}"] if found.bad_ids else []
        lines += [f"likely: {cause}"] if (cause := found.cause(scale)) else []
        if found.utterance_losses:
            losses = [[name, f"{loss:.4g}"] for name, loss in zip(found.ids, found.utterance_losses, strict=True)]
            lines += ["", table(["utterance", "loss"], losses)]
    return "\n".join(lines)


def layer_table(layers: list[Layer]) -> str:
    """Return a table of layer outputs in the order of computation; ``>`` marks those that are not finite."""
    rows = [
        [">" if layer.output.bad else "", layer.name, layer.kind, layer.output.dtype,
         "x".join(map(str, layer.output.shape)),
         *("" if value is None else f"{value:.3g}" for value in (layer.output.low, layer.output.high)),
         layer.output.nan, layer.output.inf + layer.output.minus_inf]
        for layer in layers
    ]
    return table(["", "layer", "kind", "type", "shape", "min", "max", "nan", "inf"], rows)


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _take_weights(modules: torch.nn.Module, culprits: Path, step: int) -> bool:
    """Load the step's weights from its culprits, of any rank; return whether there were any."""
    kept: list[Path] = []
    while not kept and any(culprits.glob(f"step-{step}-rank-*/culprit.json")):
        kept = sorted(culprits.glob(f"step-{step}-rank-*/model.safetensors"))
        step -= 1  # steps that were skipped right before it had the same weights
    if not kept:
        return False
    held = load_file(kept[0])
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
