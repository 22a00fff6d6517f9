"""The report, the batch on disk and the replay of a step that was not finite: utterances, layers, values, and why."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch
from safetensors.torch import load_file, save_file
from speechbrain.dataio.batch import PaddedBatch
from torch.serialization import get_unsafe_globals_in_checkpoint

from sbkit.data.publish import publish, temporary_folder
from sbkit.errors import SbkitError, first_line
from sbkit.recipe.report import listed
from sbkit.score.run_files import CULPRITS
from sbkit.system import disk, untrusted
from sbkit.system.console import table
from sbkit.train.checkpoint.files import write_state
from sbkit.train.diagnose.inspection import KeptBatch, Layer, examine, run_utterances_alone
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

_BATCHES = "batches.pt"
_MAX_WEIGHTS = 4 << 30  # bytes; weights of larger models are only in checkpoints


def report(
    brain: sb.Brain,
    folder: str | os.PathLike[str],
    batches: Sequence[KeptBatch],
    *,
    step: int,
    epoch: int | None = None,
    what: str = "loss",
    scale: float = 1.0,
    sum_scale: float = 1.0,
    lr: float | torch.Tensor | None = None,
    late: int = 0,
    limit: int = 10,
) -> str:
    """Find out why a step was not finite; all ranks must call it, and all get the same text.

    Runs each of this rank's micro-batches again and examines every layer, which is slow. The model, its gradients and
    the random generators are restored afterwards. Micro-batches that show the problem are saved in
    ``folder/culprits/step-N-rank-R``, for ``sbkit replay``.

    batches : this rank's micro-batches
    what : what was not finite: "loss" or "gradient"
    scale, sum_scale : the factors of the loss: the loss scale, and the factor that makes a sum nearly a mean
    late : the number of steps done since: on a GPU a step's values are known only after the next step, so the batch is
        run, and saved, with weights that are newer by as many steps
    limit : the maximum number of reports that a rank saves in one run
    """
    context = {"step": step, "epoch": epoch, "rank": ranks.rank(), "what": what, "scale": scale,
               "sum_scale": sum_scale, "lr": None if lr is None else float(lr), "late": late,
               "precision": brain.precision, "device": str(brain.device)}
    culprits = Path(folder) / CULPRITS
    full = len(list(culprits.glob(f"step-*-rank-{ranks.rank()}"))) >= limit
    of_epoch = "" if epoch is None else f" of epoch {epoch}"
    head = f"Step {step}{of_epoch}: the {what} is not finite; the step was skipped."
    head += f" It is examined with the weights {weights_of(context)}." if late else ""
    if all(ranks.gather_objects(full)):
        return f"{head} {culprits} already has reports of {limit} such steps."
    accounts: list[dict[str, Any]] = []
    guilty: list[dict[str, Any]] = []
    inspections = [examine(brain, kept, step, scale * sum_scale) for kept in batches]
    run_utterances_alone(brain, batches, inspections, step)
    for micro, (kept, found) in enumerate(zip(batches, inspections, strict=True)):
        accounts.append({"micro": micro, "rank": ranks.rank(), "ids": found.ids, "bad_ids": found.bad_ids,
                         "where": found.where(), "likely": found.cause(scale)})
        # the loss of a placeholder batch does not count
        if getattr(kept.batch, "weight", 1.0) != 0 and (found.what != "nothing" or found.error):
            guilty.append(accounts[-1])
    shown = ranks.gather_objects(bool(guilty))
    if not any(shown) and ranks.is_main():  # it can't be reproduced; all micro-batches are saved anyway
        guilty = accounts
    if guilty and not full:
        first = shown.index(True) if any(shown) else 0
        _save(culprits, brain.modules if first == ranks.rank() else None, batches, guilty, context)
    lines = [head]
    for account in (account for one in ranks.gather_objects(guilty) for account in one):
        lines.append(f"  rank {account['rank']}, micro-batch {account['micro']}: {account['where']}")
        if account["bad_ids"]:
            lines.append(f"    affected utterances: {listed(account['bad_ids'])}")
        lines.append(f"    utterances of the batch: {listed(account['ids']) or '(no ids)'}")
        lines += [f"    likely cause: {account['likely']}"] if account["likely"] else []
        saved = culprits / f"step-{step}-rank-{account['rank']}"
        if saved.is_dir():
            lines.append(f"    saved; examine it with: sbkit replay {saved}")
    return "\n".join(lines)


def weights_of(context: Mapping[str, Any]) -> str:
    """Describe the weights that a report was made with."""
    late = context["late"]
    return "of that step" if not late else (
        f"after step {context['step'] + late}, {late} step{'s' * (late > 1)} later: on a GPU the values of a step are "
        "known only then")


def _save(
    culprits: Path, modules: torch.nn.Module | None, batches: Sequence[KeptBatch],
    accounts: Sequence[Mapping[str, Any]], context: Mapping[str, Any],
) -> None:
    """Write a culprit's folder; a full disk, or a batch that can't be pickled, loses the report, but not the run.

    modules : save their weights, too, if no culprit of the run has any yet
    """
    final = culprits / f"step-{context['step']}-rank-{context['rank']}"
    try:
        culprits.mkdir(parents=True, exist_ok=True)
        with temporary_folder(final) as temporary:
            write_state([{"micro": account["micro"], **batches[account["micro"]]._asdict()} for account in accounts],
                        temporary / _BATCHES)
            if modules is not None and not any(culprits.glob("*/model.safetensors")):
                named = [*modules.named_parameters(), *modules.named_buffers()]
                if sum(tensor.numel() * tensor.element_size() for _, tensor in named) <= _MAX_WEIGHTS:
                    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in named},
                              temporary / "model.safetensors")
            with open(temporary / "culprit.json", "w", encoding="utf-8") as out:
                json.dump({**context, "accounts": accounts}, out, indent=1)
            publish(temporary, final, force=True)  # over that of an earlier attempt at the same step
    except (SbkitError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
        reason = error.message if isinstance(error, SbkitError) else first_line(error)
        logger.warning("The culprit of step %s is not saved: %s", context["step"],
                       disk.explain(error, final) if isinstance(error, OSError) else reason)


# ------------------------------------------------------------ replay


def find_culprit(folder: str | os.PathLike[str]) -> Path:
    """Return the given folder if it is a culprit, or the newest culprit of a run."""
    folder = Path(folder)
    if (folder / "culprit.json").is_file():
        return folder
    for parent in (folder / CULPRITS, folder):
        saved = [path.parent for path in parent.glob("step-*/culprit.json")]
        if saved:
            return max(saved, key=lambda path: ((path / "culprit.json").stat().st_mtime, path.name))
    if not folder.is_dir():
        raise SbkitError(f"{folder} does not exist", hint="name the output_folder of a run, or a culprit in it")
    raise SbkitError(f"{folder} holds no culprit (looked for {CULPRITS}/step-N-rank-R/culprit.json)",
                     hint="a run saves one when a loss or gradient is not finite")


def read_culprit(folder: Path) -> dict[str, Any]:
    """Read the JSON file of a culprit."""
    try:
        return json.loads((folder / "culprit.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise SbkitError(f"{folder / 'culprit.json'} is damaged: {error}") from error


def replay(brain: sb.Brain, folder: str | os.PathLike[str]) -> str:
    """Run the culprit in ``folder`` through ``brain``; return the report and a table of all layers.

    The brain must have the recipe, modules and precision of the run. It gets the weights saved with the report, if
    there are any (on a GPU they are a step newer than the culprit). Otherwise its own weights are used, such as those
    of a checkpoint. The text says which.
    """
    folder = find_culprit(folder)
    saved = read_culprit(folder)
    step = saved["step"]
    exact = _load_weights(brain.modules, folder.parent, step)
    brain.trainer.freezing.update(step - 1)
    brain.trainer.freezing.train()
    weights = f"those {weights_of({'late': 0, **saved})}" if exact else "the checkpoint's, not those of that step"
    lines = [f"Step {step} of rank {saved['rank']}, {saved['precision']} on {saved['device']}; the {saved['what']} was "
             "not finite.", f"Weights: {weights}."]
    for one in load_batches(folder / _BATCHES, brain.device):
        scale = saved["scale"]
        kept = KeptBatch(one["batch"], {name: tensor.cpu() for name, tensor in (one["rng"] or {}).items()} or None)
        found = examine(brain, kept, step, scale * saved.get("sum_scale", 1.0))
        run_utterances_alone(brain, [kept], [found], step)
        lines += ["", layer_table(found.layers), "", f"micro-batch {one['micro']}: {found.where()}"]
        lines += [f"affected utterances: {listed(found.bad_ids)}"] if found.bad_ids else []
        lines += [f"likely cause: {cause}"] if (cause := found.cause(scale)) else []
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


def _load_weights(modules: torch.nn.Module, culprits: Path, step: int) -> bool:
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
        raise SbkitError(f"the culprit belongs to another model: {listed(sorted(differing))} differ",
                         hint="replay it with the hyperparams.yaml of its run")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(held[name])
    return True


def load_batches(path: Path, device: torch.device | str) -> list[dict[str, Any]]:
    """Read the micro-batches: the file can make nothing but tensors, plain values and batches of known classes."""
    try:
        with torch.serialization.safe_globals([*map(_class, get_unsafe_globals_in_checkpoint(path))]):
            found: list[dict[str, Any]] = untrusted.load_tensors(path, device)
            return found
    except SbkitError:
        raise
    except Exception as error:  # torch raises all kinds for a damaged file
        raise SbkitError(f"{path} can't be read: {first_line(error)}", hint="was it written by this sbkit?") from error


# The modules of classes in a batch are only imported with these prefixes.
_KNOWN = ("sbkit.", "speechbrain.")


def _class(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    if module not in sys.modules and not module.startswith(_KNOWN):
        raise SbkitError(f"the saved batch is a {attribute} of {module}, which is not imported",
                         hint="replay it with the script that trained the run")
    found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or issubclass(found, PaddedBatch)
                                           or (issubclass(found, tuple) and hasattr(found, "_fields"))):
        raise SbkitError(f"the saved batch holds a {name}, which is not a batch class")
    return found
