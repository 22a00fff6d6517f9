"""A step that is not finite: its batch is run again to name the first bad layer, and saved for ``sbkit rerun``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import speechbrain as sb
import torch
from safetensors.torch import load_file, save_file
from speechbrain.dataio.batch import PaddedBatch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from sbkit.data.batch import as_planned
from sbkit.data.publish import FolderKind, publish, temporary_folder
from sbkit.errors import SbkitError, first_line, summary
from sbkit.recipe.report import listed
from sbkit.score.run_files import BAD_BATCHES
from sbkit.system import untrusted
from sbkit.system.console import table
from sbkit.train import rng as rng_state
from sbkit.train.batches import KeptBatch, rows, tensors_in, utterance_ids
from sbkit.train.checkpoint.files import write_state
from sbkit.train.distributed import ranks
from sbkit.train.forward_state import restoring
from sbkit.train.keys import ScriptKeys
from sbkit.train.results import StepResult

logger = logging.getLogger(__name__)

LIMIT = 10  # reports that a rank saves in one run
_MAX_WEIGHTS = 4 << 30  # bytes; weights of larger models are only in checkpoints
_BATCHES, _REPORT, _WEIGHTS = "batches.pt", "bad_batch.json", "model.safetensors"
_FORMAT = "sbkit bad batch"
#: Names of the folder and the report that earlier versions wrote.
_FORMER_FOLDER, _FORMER_REPORT = "culprits", "culprit.json"
_FOLDER = FolderKind("a saved bad batch", _REPORT, _FORMAT, lambda values: (_BATCHES, _WEIGHTS))
_IMPORTED = ("sbkit.", "speechbrain.")  # modules that may be imported for a class of a saved batch


class Layer(NamedTuple):
    """The output of a layer, or another tensor of a forward; ``low`` and ``high`` are of its finite values."""

    name: str
    kind: str  # the layer's class, or "batch"
    dtype: str
    shape: list[int]
    low: float | None
    high: float | None
    nan: int
    inf: int
    minus_inf: int  # counted separately: a mask or a log of 0 may intend it
    rows: list[int]  # indices in the first dimension with a value that is not finite


def measure(tensor: torch.Tensor, name: str, kind: str) -> Layer:
    """Return the range of a tensor, and its counts of values that are not finite."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    is_finite = values.isfinite()
    finite_values = values[is_finite]
    low, high = None, None
    if finite_values.numel():
        low, high = (float(value) for value in finite_values.float().aminmax())
    nan = inf = minus_inf = 0
    bad_rows: list[int] = []
    if finite_values.numel() < values.numel():
        nan = int(values.isnan().sum())
        inf = int((values == math.inf).sum())
        minus_inf = int((values == -math.inf).sum())
        if values.dim() > 1:
            bad_rows = (~is_finite).flatten(1).any(1).nonzero().flatten().tolist()
    return Layer(name, kind, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), low, high, nan, inf,
                 minus_inf, bad_rows)


@dataclasses.dataclass
class _Rerun:
    """What was measured while a batch was run again."""

    layers: list[Layer]
    bad_gradients: list[str] = dataclasses.field(default_factory=list)
    loss: float = 0.0
    error: str = ""


def examine(brain: sb.Brain, kept: KeptBatch, step: int, scale: float = 1.0) -> tuple[dict[str, Any], list[Layer]]:
    """Run a batch forward and backward as in training; return the first that is not finite, in words, and all layers.

    Nothing is changed: buffers, gradients and random generators are restored, and no gradients are exchanged. The same
    computations run for every result, because layers may communicate with other ranks (synchronised normalisation).

    step : the number of the step, from 1, on which what the Brain computes may depend
    scale : the factor of the loss
    """
    rerun = _Rerun([measure(tensor, name or "tensor", "batch") for name, tensor in tensors_in(kept.batch)])
    steps_taken = brain.optimizer_step
    brain.optimizer_step = step - 1
    brain.write_numbers(step)
    try:
        _run_again(brain, kept, scale, rerun)
    except Exception as problem:  # an error is also a finding
        rerun.error = summary(problem)
    finally:
        brain.optimizer_step = steps_taken
        brain.write_numbers(steps_taken + 1)

    is_bad = bool(not math.isfinite(rerun.loss) or rerun.bad_gradients or rerun.error)
    is_dummy = as_planned(kept.batch).is_dummy
    ids = utterance_ids(kept.batch)
    bad_ids: list[str] = []
    if is_bad and not is_dummy:
        where, bad_rows = _locate(rerun, len(ids))
        bad_ids = [ids[row] for row in bad_rows]
    else:
        where = f"when run again, everything was finite (loss {rerun.loss:.4g})"
    account = {"ids": ids, "bad_ids": bad_ids, "bad": is_bad and not is_dummy, "where": where,
               "loss": rerun.error or f"{rerun.loss:.4g}"}
    return account, rerun.layers


def _run_again(brain: sb.Brain, kept: KeptBatch, scale: float, rerun: _Rerun) -> None:
    """Run a batch forward and backward, and add what is measured to ``rerun``, also if it ends with an error."""
    # Hooks of compiled modules are called only without compilation. To import torch's compiler takes seconds.
    with (torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext(),
          restoring(brain.layer_roots, brain.device), torch.enable_grad(), brain.no_sync()):
        if kept.rng is not None:
            rng_state.restore(dict(kept.rng), brain.device)
        with contextlib.ExitStack() as hooks:  # not in backward, where checkpointed activations are computed again
            for name, module in brain.modules.named_modules():
                if not name or isinstance(module, (nn.ModuleList, nn.ModuleDict)) or hasattr(module, "_orig_mod"):
                    continue
                name = name.replace("_orig_mod.", "").removesuffix("._orig_mod")  # which torch.compile inserts
                hook = _measuring_hook(name, rerun)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            total = brain.trainer.compute(kept.batch).loss.total
        rerun.loss = float(total.detach())
        if total.requires_grad:
            (total * scale).backward()
            rerun.bad_gradients += [name for name, parameter in brain.modules.named_parameters()
                                    if parameter.grad is not None and not bool(parameter.grad.isfinite().all())]


def _measuring_hook(name: str, rerun: _Rerun) -> Callable[..., None]:
    """Return a forward hook that adds a layer's output to ``rerun``, and later the gradient of it if that is bad."""
    def check_gradient(gradient: torch.Tensor) -> None:
        if not bool(gradient.isfinite().all()):
            rerun.bad_gradients.append(f"the output of {name}")

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        kind = type(module).__name__
        # Where no layer was bad so far, an operation outside of layers may have been, which the input shows.
        if not any(layer.nan or layer.inf for layer in rerun.layers):
            inputs = [measure(tensor, f"input of {name}", kind) for _, tensor in tensors_in((args, kwargs))]
            rerun.layers.extend(layer for layer in inputs if layer.nan or layer.inf)
        outputs = [tensor for _, tensor in tensors_in(output)]
        measured = [measure(tensor, name, kind) for tensor in outputs]
        if measured:
            rerun.layers.append(max(measured, key=lambda layer: layer.nan + layer.inf + layer.minus_inf))
        for tensor in outputs:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(check_gradient)
    return hook


def _locate(rerun: _Rerun, batch_size: int) -> tuple[str, list[int]]:
    """Say what was not finite first, and in which rows of the batch, as far as this is known."""
    has_bad_loss = not math.isfinite(rerun.loss)
    bad_layers = [layer for layer in rerun.layers
                  if layer.nan or layer.inf or (layer.minus_inf and layer.kind == "batch")]
    if not bad_layers and has_bad_loss:
        bad_layers = [layer for layer in rerun.layers if layer.minus_inf]  # nothing else explains the loss
    if bad_layers:
        first = bad_layers[0]
        counts = {"nan": first.nan, "inf": first.inf, "-inf": first.minus_inf}
        listed_counts = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
        where = (f"the first that is not finite is {first.name} ({first.kind}): {listed_counts} of "
                 f"{math.prod(first.shape)} values, {first.dtype}")
        return where, first.rows if first.shape[:1] == [batch_size] else []
    if rerun.error:
        return f"running the batch again ended with {rerun.error}", []
    if has_bad_loss:
        return f"every layer's output is finite, but the loss is {rerun.loss}", []
    return (f"the loss is {rerun.loss:.4g}, but in backward the gradient of {rerun.bad_gradients[0]} is not finite",
            [])


def report(brain: sb.Brain, folder: str | os.PathLike[str], result: StepResult, epoch: int | None = None) -> str:
    """Find out why a step was not finite; all ranks must call it, and all get the same text.

    Each of this rank's micro-batches is run again, which is slow. Those that show the problem are saved in
    ``folder/bad_batches/step-N-rank-R``, for ``sbkit rerun``. A full disk, or a batch that can't be pickled, loses the
    report, but not the run.
    """
    bad_batches = Path(folder) / BAD_BATCHES
    rank, step = ranks.rank(), result.number
    what = "gradient" if math.isfinite(result.total) else "loss"
    heading = (f"Step {step}{'' if epoch is None else f' of epoch {epoch}'}: the {what} is not finite; the step was "
               "skipped.")
    if result.late:  # on a GPU, where the values of a step are known only after the next
        heading += f" It was run again with the weights after step {step + result.late}."
    is_full = len(list(bad_batches.glob(f"step-*-rank-{rank}"))) >= LIMIT
    if all(ranks.gather_objects(is_full)):
        return f"{heading} {bad_batches} already has reports of {LIMIT} such steps."

    accounts = [{"micro": micro, "rank": rank, **examine(brain, kept, step, result.scale * result.sum_scale)[0]}
                for micro, kept in enumerate(result.batches)]
    accounts_of_ranks = ranks.gather_objects(accounts)
    # If it can't be reproduced, all micro-batches of rank 0 are shown and saved.
    bad_accounts = [account for accounts in accounts_of_ranks for account in accounts if account["bad"]] \
        or accounts_of_ranks[0]
    accounts_here = [account for account in bad_accounts if account["rank"] == rank]
    saved = None
    if accounts_here and not is_full:
        content = {"format": _FORMAT, "step": step, "epoch": epoch, "rank": rank, "what": what,
                   "scale": result.scale, "sum_scale": result.sum_scale, "late": result.late,
                   "precision": brain.precision, "device": str(brain.device), "accounts": accounts_here}
        saved = _save(brain, bad_batches / f"step-{step}-rank-{rank}", result.batches, content,
                      may_save_weights=bad_accounts[0]["rank"] == rank)

    lines = [heading]
    for account in bad_accounts:
        lines.append(f"  rank {account['rank']}, micro-batch {account['micro']}: {account['where']}")
        if account["bad_ids"]:
            lines.append(f"    affected utterances: {listed(account['bad_ids'])}")
        else:
            lines.append(f"    utterances of the batch: {listed(account['ids']) or '(no ids)'}")
    for path in filter(None, ranks.gather_objects(saved)):
        # sbkit rerun builds the Brain from a recipe.
        replays = f"sbkit.train.bad_batch.replay(brain, {path!r}) in your script" \
            if isinstance(brain.keys, ScriptKeys) else f"sbkit rerun {path}"
        lines.append(f"  saved; every layer, and each utterance's own loss: {replays}")
    return "\n".join(lines)


def _save(brain: sb.Brain, folder: Path, batches: Sequence[KeptBatch], content: Mapping[str, Any],
          may_save_weights: bool) -> str | None:
    """Save the micro-batches of a report, and once in a run the weights; return the folder, None if it can't be saved.

    content : of the report's file
    """
    try:
        with temporary_folder(folder, _FOLDER) as temporary:
            write_state([{"micro": account["micro"], **batches[account["micro"]]._asdict()}
                         for account in content["accounts"]], temporary / _BATCHES)
            if may_save_weights and not any(folder.parent.glob(f"*/{_WEIGHTS}")):
                tensors = dict([*brain.modules.named_parameters(), *brain.modules.named_buffers()])
                if sum(tensor.nbytes for tensor in tensors.values()) <= _MAX_WEIGHTS:
                    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
                              temporary / _WEIGHTS)
            with open(temporary / _REPORT, "w", encoding="utf-8") as out:
                json.dump(content, out, indent=1)
            publish(temporary, folder, _FOLDER, force=True)  # over that of an earlier attempt at the same step
    except (SbkitError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
        logger.warning("The bad batch of step %s is not saved: %s", content["step"],
                       error.message if isinstance(error, SbkitError) else first_line(error))
        return None
    return str(folder)


# ------------------------------------------------------------ replay


def find_saved(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a report, the given one or the newest of a run, and its content."""
    folder = Path(folder)
    parents = ("", "step-*/", f"{BAD_BATCHES}/step-*/", f"{_FORMER_FOLDER}/step-*/")
    reports = [path for parent in parents for path in _reports(folder, parent)]
    if not reports and not folder.is_dir():
        raise SbkitError(f"{folder} does not exist", hint="name the output_folder of a run, or a bad batch in it")
    if not reports:
        raise SbkitError(f"{folder} holds no bad batch (looked for {BAD_BATCHES}/step-N-rank-R/{_REPORT})",
                         hint="a run saves one when a loss or gradient is not finite")
    newest = max(reports, key=lambda path: (path.stat().st_mtime, path.parent.name))
    try:
        return newest.parent, json.loads(newest.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SbkitError(f"{newest} is damaged: {error}") from error


def _reports(folder: Path, parent: str) -> list[Path]:
    """Return the files of reports in the folders below ``folder`` that match a pattern, which is empty or ends in /."""
    return [path for name in (_REPORT, _FORMER_REPORT) for path in folder.glob(parent + name)]


def replay(brain: sb.Brain, folder: str | os.PathLike[str]) -> str:
    """Run a saved batch through ``brain``; return a table of all layers, and the loss of each utterance alone.

    The brain must have the recipe, modules and precision of the run. It gets the weights saved with the step, if there
    are any. Otherwise its own weights are used, such as those of a checkpoint. The text says which.
    """
    folder, saved = find_saved(folder)
    step = saved["step"]
    weights_file = _weights_of(folder, step)
    if weights_file is not None:
        _load_weights(brain, weights_file)
    brain.trainer.freezing.apply(step - 1)
    brain.trainer.freezing.train()

    late = saved.get("late", 0)
    if weights_file is None:
        weights = "the checkpoint's, not those of that step"
    elif late:
        weights = f"those after step {step + late}"
    else:
        weights = "those of that step"
    lines = [f"Step {step} of rank {saved['rank']}, {saved['precision']} on {saved['device']}; the {saved['what']} was "
             "not finite.", f"Weights: {weights}."]
    scale = saved["scale"] * saved.get("sum_scale", 1.0)
    for entry in load_batches(folder / _BATCHES, brain.device):
        batch = entry["batch"]
        rng = {name: tensor.cpu() for name, tensor in (entry["rng"] or {}).items()} or None
        account, layers = examine(brain, KeptBatch(batch, rng), step, scale)
        lines += ["", table(["", "layer", "kind", "type", "shape", "min", "max", "nan", "inf"],
                            [_cells(layer) for layer in layers]),
                  "", f"micro-batch {entry['micro']}: {account['where']}"]
        if not account["bad"]:
            continue
        losses = []
        for row, name in enumerate(account["ids"]):
            alone, _ = examine(brain, KeptBatch(rows(batch, row, row + 1), rng), step, scale)
            losses.append([">" if alone["bad"] else "", name, alone["loss"]])
        if losses:
            lines += ["", table(["", "utterance", "loss alone"], losses)]
    return "\n".join(lines)


def _weights_of(folder: Path, step: int) -> Path | None:
    """Return the file of the weights of a step; steps that were skipped right before it had the same ones."""
    while _reports(folder.parent, f"step-{step}-rank-*/"):
        files = sorted(folder.parent.glob(f"step-{step}-rank-*/{_WEIGHTS}"))
        if files:
            return files[0]
        step -= 1
    return None


def _load_weights(brain: sb.Brain, path: Path) -> None:
    saved = load_file(path)
    tensors = dict([*brain.modules.named_parameters(), *brain.modules.named_buffers()])
    differing = [name for name in {*saved, *tensors}
                 if name not in saved or name not in tensors or saved[name].shape != tensors[name].shape]
    if differing:
        raise SbkitError(f"the bad batch belongs to another model: {listed(sorted(differing))} differ",
                         hint="replay it with the hyperparams.yaml of its run")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def _cells(layer: Layer) -> list[object]:
    """Return a row of the table of layers."""
    is_bad = layer.nan + layer.inf + layer.minus_inf
    low, high = ("" if value is None else f"{value:.3g}" for value in (layer.low, layer.high))
    return [">" if is_bad else "", layer.name, layer.kind, layer.dtype, "x".join(map(str, layer.shape)), low, high,
            layer.nan, layer.inf + layer.minus_inf]


def load_batches(path: Path, device: torch.device | str) -> list[dict[str, Any]]:
    """Read the micro-batches: the file can make nothing but tensors, plain values and batches of known classes."""
    classes: list[Any] = []
    try:
        for name in get_unsafe_globals_in_checkpoint(path):
            module, _, attribute = name.rpartition(".")
            if module not in sys.modules and not module.startswith(_IMPORTED):
                raise SbkitError(f"the saved batch is a {attribute} of {module}, which is not imported",
                                 hint="replay it with the script that trained the run")
            kind = getattr(importlib.import_module(module), attribute, None)
            if not _is_batch_class(kind):
                raise SbkitError(f"the saved batch holds a {name}, which is not a batch class")
            classes.append(kind)
        with torch.serialization.safe_globals(classes):
            batches: list[dict[str, Any]] = untrusted.load_tensors(path, device)
            return batches
    except SbkitError:
        raise
    except Exception as error:  # torch raises all kinds for a damaged file
        raise SbkitError(f"{path} can't be read: {first_line(error)}", hint="was it written by this sbkit?") from error


def _is_batch_class(kind: object) -> bool:
    if not isinstance(kind, type):
        return False
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or issubclass(kind, PaddedBatch) or is_named_tuple
