"""Run a saved culprit again: the same batch, layer by layer, with the values each layer gave."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sbkit.errors import SbkitError
from sbkit.score.run_files import CULPRITS
from sbkit.system.console import table
from sbkit.train.diagnose.causes import causes
from sbkit.train.diagnose.culprit import Suspect, alone, bad_ids, describe, moved, runner, some
from sbkit.train.diagnose.inspection import Findings, Layer, examine
from sbkit.train.diagnose.saved_batch import unpack, utterance_ids


def find(folder: str | os.PathLike[str]) -> Path:
    """The culprit's folder: the one given, or the newest of a run."""
    folder = Path(folder)
    if (folder / "culprit.json").is_file():
        return folder
    for parent in (folder / CULPRITS, folder):
        saved = [path.parent for path in parent.glob("step-*/culprit.json")]
        if saved:
            return max(saved, key=lambda path: ((path / "culprit.json").stat().st_mtime, path.name))
    raise SbkitError(f"{folder} holds no culprit (looked for {CULPRITS}/step-N-rank-R/culprit.json)",
                     hint="a run saves one when a loss or gradient is not finite")


def replay(brain: Any, folder: str | os.PathLike[str], *, weights: bool = True) -> str:
    """Run the culprit in ``folder`` through ``brain``; what the report said, and a table of all layers.

    The brain must be the run's: same YAML, same modules, in the run's precision. The weights of the moment of the
    report, on a card a step later, are taken from the culprit's folder (``weights=True``) where they were kept;
    otherwise the brain's are used as they are, those of a checkpoint that is. The text says which.
    """
    folder = find(folder)
    saved = read(folder)
    tensors = load_file(folder / "tensors.safetensors")
    exact = weights and _take_weights(brain.modules, folder, saved)
    brain.stepper.freezing.at(saved["step"] - 1)
    brain.stepper.freezing.train()
    lines = [f"Step {saved['step']} of rank {saved['rank']}, {saved['precision']} on {saved['device']}; "
             f"the {saved['what']} was not finite.",
             f"Weights: {_weights(exact, saved)}."]
    for one in saved["batches"]:
        lines += ["", *_again(brain, one, tensors, saved)]
    return "\n".join(lines)


def _weights(exact: bool, saved: Mapping[str, Any]) -> str:
    if not exact:
        return "the checkpoint's, not those of that step"
    return f"those {moved(saved)}" if saved.get("late") else "those of that step"


def read(folder: Path) -> dict[str, Any]:
    """A culprit's JSON."""
    try:
        return json.loads((folder / "culprit.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise SbkitError(f"{folder / 'culprit.json'} is damaged: {error}") from error


def layer_table(layers: list[Layer]) -> str:
    """Every layer's output, in the order in which it was computed; ``>`` marks those not finite."""
    rows = [
        [">" if layer.output.bad else "", layer.name, layer.kind, layer.output.dtype,
         "x".join(map(str, layer.output.shape)), _value(layer.output.low), _value(layer.output.high),
         layer.output.nan, layer.output.inf + layer.output.minus_inf]
        for layer in layers
    ]
    return table(["", "layer", "kind", "type", "shape", "min", "max", "nan", "inf"], rows)


def _again(brain: Any, one: Mapping[str, Any], tensors: Mapping[str, torch.Tensor],
           saved: Mapping[str, Any]) -> list[str]:
    at = f"micro{one['micro']}/"
    batch = unpack(one["tree"], _under(f"{at}batch/", tensors), brain.device)
    suspect = Suspect(batch, _under(f"{at}rng/", tensors) or None)
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


def _losses(found: Findings, ids: list[str]) -> list[str]:
    if len(ids) != len(found.utterance_losses):
        return []
    return ["", table(["utterance", "loss"], [[i, f"{loss:.4g}"] for i, loss in
                                              zip(ids, found.utterance_losses, strict=True)])]


def _take_weights(modules: torch.nn.Module, folder: Path, saved: Mapping[str, Any]) -> bool:
    """Load what the step's own folder, or another rank's of the same step, kept."""
    kept = sorted(folder.parent.glob(f"step-{saved['step']}-rank-*/model.safetensors"))
    if not kept:
        return False
    held = load_file(kept[0])
    own = {**dict(modules.named_parameters()), **dict(modules.named_buffers())}
    differing = [name for name in {*held, *own}
                 if name not in held or name not in own or held[name].shape != own[name].shape]
    if differing:
        raise SbkitError(f"the culprit was saved by another model: {some(sorted(differing))} differ",
                         hint="replay it with the hyperparams.yaml of its run")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(held[name])
    return True


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
