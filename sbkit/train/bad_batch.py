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
from collections.abc import Callable, Mapping
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
from sbkit.score.run_files import CULPRITS
from sbkit.system import untrusted
from sbkit.system.console import table
from sbkit.train import rng as rng_state
from sbkit.train.batches import MicroBatch, rows, tensors_in, utterance_ids
from sbkit.train.checkpoint.files import write_state
from sbkit.train.distributed import ranks
from sbkit.train.forward_state import restoring
from sbkit.train.keys import ScriptKeys
from sbkit.train.step import StepResult

logger = logging.getLogger(__name__)

LIMIT = 10  # reports that a rank saves in one run
_MAX_WEIGHTS = 4 << 30  # bytes; weights of larger models are only in checkpoints
_BATCHES, _REPORT, _WEIGHTS = "batches.pt", "culprit.json", "model.safetensors"
_FORMAT = "sbkit culprit"
_FOLDER = FolderKind("a saved culprit", _REPORT, _FORMAT, lambda values: (_BATCHES, _WEIGHTS))
_KNOWN = ("sbkit.", "speechbrain.")  # modules that are imported for a class of a saved batch


class KeptBatch(NamedTuple):
    """A micro-batch, and the state of the random generators (``rng.capture``) before it was run, if kept."""

    batch: MicroBatch
    rng: Mapping[str, torch.Tensor] | None = None


class Layer(NamedTuple):
    """The output of a layer, or another tensor on the way; ``low`` and ``high`` are of its finite values."""

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
    finite = values.isfinite()
    good = values[finite]
    low, high = (float(value) for value in good.float().aminmax()) if good.numel() else (None, None)
    nan = inf = minus_inf = 0
    bad_rows: list[int] = []
    if good.numel() < values.numel():
        nan, inf, minus_inf = (int(each.sum()) for each in (values.isnan(), values == math.inf, values == -math.inf))
        bad_rows = (~finite).flatten(1).any(1).nonzero().flatten().tolist() if values.dim() > 1 else []
    return Layer(name, kind, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), low, high, nan, inf,
                 minus_inf, bad_rows)


def examine(brain: sb.Brain, kept: KeptBatch, step: int, scale: float = 1.0) -> tuple[dict[str, Any], list[Layer]]:
    """Run a batch forward and backward as in training; return the first that is not finite, in words, and all layers.

    Nothing is changed: buffers, gradients and random generators are restored, and no gradients are exchanged. The same
    computations run for every result, because layers may communicate with other ranks (synchronised normalisation).

    step : the number of the step, from 1, on which what the Brain computes may depend
    scale : the factor of the loss
    """
    layers = [measure(tensor, name or "tensor", "batch") for name, tensor in tensors_in(kept.batch)]
    bad_gradients: list[str] = []
    loss, error = 0.0, ""

    def hook_for(name: str) -> Callable[..., None]:
        def note(gradient: torch.Tensor) -> None:
            if not bool(gradient.isfinite().all()):
                bad_gradients.append(f"the output of {name}")

        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            kind, outputs = type(module).__name__, [tensor for _, tensor in tensors_in(output)]
            if not any(layer.nan or layer.inf for layer in layers):  # an operation outside of layers may have begun it
                inputs = [measure(tensor, f"input of {name}", kind) for _, tensor in tensors_in((args, kwargs))]
                layers.extend(layer for layer in inputs if layer.nan or layer.inf)
            measured = [measure(tensor, name, kind) for tensor in outputs]
            if measured:
                layers.append(max(measured, key=lambda layer: layer.nan + layer.inf + layer.minus_inf))
            for tensor in outputs:
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(note)
        return hook

    now, brain.optimizer_step = brain.optimizer_step, step - 1
    brain.write_numbers(step)
    try:
        # Hooks of compiled modules are called without compilation only. To import torch's compiler takes seconds.
        with (torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext(),
              restoring(brain.layer_roots, brain.device), torch.enable_grad(), brain.no_sync()):
            if kept.rng is not None:
                rng_state.restore(dict(kept.rng), brain.device)
            with contextlib.ExitStack() as hooks:  # not in backward, where checkpointed activations are computed again
                for name, module in brain.modules.named_modules():
                    if not name or isinstance(module, (nn.ModuleList, nn.ModuleDict)) or hasattr(module, "_orig_mod"):
                        continue
                    name = name.replace("_orig_mod.", "").removesuffix("._orig_mod")  # which torch.compile inserts
                    hooks.callback(module.register_forward_hook(hook_for(name), with_kwargs=True).remove)
                total = brain.trainer.compute(kept.batch).loss.total
            loss = float(total.detach())
            if total.requires_grad:
                (total * scale).backward()
                bad_gradients += [name for name, parameter in brain.modules.named_parameters()
                                  if parameter.grad is not None and not bool(parameter.grad.isfinite().all())]
    except Exception as problem:  # an error is also a finding
        error = summary(problem)
    finally:
        brain.optimizer_step = now
        brain.write_numbers(now + 1)

    bad_loss = not math.isfinite(loss)
    bad = bool(bad_loss or bad_gradients or error) and as_planned(kept.batch).weight != 0  # 0: a stand-in
    broken = [layer for layer in layers if layer.nan or layer.inf or (layer.minus_inf and layer.kind == "batch")]
    if not broken and bad_loss:
        broken = [layer for layer in layers if layer.minus_inf]  # nothing else explains the loss
    ids, bad_ids = utterance_ids(kept.batch), []
    if not bad:
        where = f"when run again, everything was finite (loss {loss:.4g})"
    elif broken:
        first = broken[0]
        counts = ((first.nan, "nan"), (first.inf, "inf"), (first.minus_inf, "-inf"))
        where = (f"the first that is not finite is {first.name} ({first.kind}): "
                 f"{' and '.join(f'{count} {name}' for count, name in counts if count)} of {math.prod(first.shape)} "
                 f"values, {first.dtype}")
        bad_ids = [ids[row] for row in first.rows] if first.shape[:1] == [len(ids)] else []
    elif error:
        where = f"running the batch again ended with {error}"
    elif bad_loss:
        where = f"every layer's output is finite, but the loss is {loss}"
    else:
        where = f"the loss is {loss:.4g}, but in backward the gradient of {bad_gradients[0]} is not finite"
    return {"ids": ids, "bad_ids": bad_ids, "bad": bad, "where": where, "loss": error or f"{loss:.4g}"}, layers


def report(brain: sb.Brain, folder: str | os.PathLike[str], result: StepResult, epoch: int | None = None) -> str:
    """Find out why a step was not finite; all ranks must call it, and all get the same text.

    Each of this rank's micro-batches is run again, which is slow. Those that show the problem are saved in
    ``folder/culprits/step-N-rank-R``, for ``sbkit rerun``. A full disk, or a batch that can't be pickled, loses the
    report, but not the run.
    """
    culprits, rank, step = Path(folder) / CULPRITS, ranks.rank(), result.number
    what = "gradient" if math.isfinite(result.total) else "loss"
    lines = [f"Step {step}{'' if epoch is None else f' of epoch {epoch}'}: the {what} is not finite; the step was "
             "skipped."]
    if result.late:  # on a GPU, where the values of a step are known only after the next
        lines[0] += f" It was run again with the weights after step {step + result.late}."
    full = len(list(culprits.glob(f"step-*-rank-{rank}"))) >= LIMIT
    if all(ranks.gather_objects(full)):
        return f"{lines[0]} {culprits} already has reports of {LIMIT} such steps."

    accounts = [{"micro": micro, "rank": rank, **examine(brain, kept, step, result.scale * result.sum_scale)[0]}
                for micro, kept in enumerate(result.batches)]
    everyone = ranks.gather_objects(accounts)
    # If it can't be reproduced, all micro-batches of rank 0 are shown and saved.
    guilty = [account for each in everyone for account in each if account["bad"]] or everyone[0]
    own = [account for account in guilty if account["rank"] == rank]
    saved = None
    if own and not full:
        final = culprits / f"step-{step}-rank-{rank}"
        try:
            with temporary_folder(final, _FOLDER) as temporary:
                write_state([{"micro": account["micro"], **result.batches[account["micro"]]._asdict()}
                             for account in own], temporary / _BATCHES)
                tensors = dict([*brain.modules.named_parameters(), *brain.modules.named_buffers()])
                if (guilty[0]["rank"] == rank and not any(culprits.glob(f"*/{_WEIGHTS}"))  # large: once in a run
                        and sum(tensor.nbytes for tensor in tensors.values()) <= _MAX_WEIGHTS):
                    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
                              temporary / _WEIGHTS)
                with open(temporary / _REPORT, "w", encoding="utf-8") as out:
                    json.dump({"format": _FORMAT, "step": step, "epoch": epoch, "rank": rank, "what": what,
                               "scale": result.scale, "sum_scale": result.sum_scale, "late": result.late,
                               "precision": brain.precision,
                               "device": str(brain.device), "accounts": own}, out, indent=1)
                publish(temporary, final, _FOLDER, force=True)  # over that of an earlier attempt at the same step
            saved = str(final)
        except (SbkitError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
            logger.warning("The culprit of step %s is not saved: %s", step,
                           error.message if isinstance(error, SbkitError) else first_line(error))
    places = ranks.gather_objects(saved)
    for account in guilty:
        lines += [f"  rank {account['rank']}, micro-batch {account['micro']}: {account['where']}"]
        lines += [f"    affected utterances: {listed(account['bad_ids'])}" if account["bad_ids"] else
                  f"    utterances of the batch: {listed(account['ids']) or '(no ids)'}"]
    for place in filter(None, places):
        shown = f"sbkit.train.bad_batch.replay(brain, {place!r}) in your script" if isinstance(brain.keys, ScriptKeys) \
            else f"sbkit rerun {place}"  # which builds the Brain from a recipe
        lines.append(f"  saved; every layer, and each utterance's own loss: {shown}")
    return "\n".join(lines)


# ------------------------------------------------------------ replay


def find_saved(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a report, the given one or the newest of a run, and its content."""
    folder = Path(folder)
    found = [path for parent in ("", "step-*/", f"{CULPRITS}/step-*/") for path in folder.glob(parent + _REPORT)]
    if not found and not folder.is_dir():
        raise SbkitError(f"{folder} does not exist", hint="name the output_folder of a run, or a culprit in it")
    if not found:
        raise SbkitError(f"{folder} holds no culprit (looked for {CULPRITS}/step-N-rank-R/{_REPORT})",
                         hint="a run saves one when a loss or gradient is not finite")
    newest = max(found, key=lambda path: (path.stat().st_mtime, path.parent.name))
    try:
        return newest.parent, json.loads(newest.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SbkitError(f"{newest} is damaged: {error}") from error


def replay(brain: sb.Brain, folder: str | os.PathLike[str]) -> str:
    """Run a saved batch through ``brain``; return a table of all layers, and the loss of each utterance alone.

    The brain must have the recipe, modules and precision of the run. It gets the weights saved with the step, if there
    are any. Otherwise its own weights are used, such as those of a checkpoint. The text says which.
    """
    folder, saved = find_saved(folder)
    step = weights_of = saved["step"]
    kept: list[Path] = []
    # Steps that were skipped right before it had the same weights.
    while not kept and any(folder.parent.glob(f"step-{weights_of}-rank-*/{_REPORT}")):
        kept = sorted(folder.parent.glob(f"step-{weights_of}-rank-*/{_WEIGHTS}"))
        weights_of -= 1
    if kept:
        held = load_file(kept[0])
        own = dict([*brain.modules.named_parameters(), *brain.modules.named_buffers()])
        differing = [name for name in {*held, *own}
                     if name not in held or name not in own or held[name].shape != own[name].shape]
        if differing:
            raise SbkitError(f"the culprit belongs to another model: {listed(sorted(differing))} differ",
                             hint="replay it with the hyperparams.yaml of its run")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(held[name])
    brain.trainer.freezing.update(step - 1)
    brain.trainer.freezing.train()

    late = saved.get("late", 0)
    weights = "the checkpoint's, not those of that step" if not kept else (
        f"those after step {step + late}" if late else "those of that step")
    lines = [f"Step {step} of rank {saved['rank']}, {saved['precision']} on {saved['device']}; the {saved['what']} was "
             "not finite.", f"Weights: {weights}."]
    scale = saved["scale"] * saved.get("sum_scale", 1.0)
    for one in load_batches(folder / _BATCHES, brain.device):
        batch, rng = one["batch"], {name: tensor.cpu() for name, tensor in (one["rng"] or {}).items()} or None
        account, layers = examine(brain, KeptBatch(batch, rng), step, scale)
        cells = [[">" if layer.nan + layer.inf + layer.minus_inf else "", layer.name, layer.kind, layer.dtype,
                  "x".join(map(str, layer.shape)),
                  *("" if value is None else f"{value:.3g}" for value in (layer.low, layer.high)),
                  layer.nan, layer.inf + layer.minus_inf] for layer in layers]
        lines += ["", table(["", "layer", "kind", "type", "shape", "min", "max", "nan", "inf"], cells),
                  "", f"micro-batch {one['micro']}: {account['where']}"]
        losses = []
        for row, name in enumerate(account["ids"] if account["bad"] else ()):
            alone, _ = examine(brain, KeptBatch(rows(batch, row, row + 1), rng), step, scale)
            losses.append([">" if alone["bad"] else "", name, alone["loss"]])
        lines += ["", table(["", "utterance", "loss alone"], losses)] if losses else []
    return "\n".join(lines)


def load_batches(path: Path, device: torch.device | str) -> list[dict[str, Any]]:
    """Read the micro-batches: the file can make nothing but tensors, plain values and batches of known classes."""
    classes = []
    try:
        for name in get_unsafe_globals_in_checkpoint(path):
            module, _, attribute = name.rpartition(".")
            if module not in sys.modules and not module.startswith(_KNOWN):
                raise SbkitError(f"the saved batch is a {attribute} of {module}, which is not imported",
                                 hint="replay it with the script that trained the run")
            found = getattr(importlib.import_module(module), attribute, None)
            if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or issubclass(found, PaddedBatch)
                                                   or (issubclass(found, tuple) and hasattr(found, "_fields"))):
                raise SbkitError(f"the saved batch holds a {name}, which is not a batch class")
            classes.append(found)
        with torch.serialization.safe_globals([*classes]):
            batches: list[dict[str, Any]] = untrusted.load_tensors(path, device)
            return batches
    except SbkitError:
        raise
    except Exception as error:  # torch raises all kinds for a damaged file
        raise SbkitError(f"{path} can't be read: {first_line(error)}", hint="was it written by this sbkit?") from error
