"""The report of a step that was not finite: in which utterance, layer and values, and why."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import speechbrain as sb
import torch
from safetensors.torch import save_file
from speechbrain.core import Stage

from sbkit.score.run_files import CULPRITS
from sbkit.system import disk
from sbkit.train.diagnose.causes import causes
from sbkit.train.diagnose.inspection import Inspection, Ran, Values, before, examine, losses_alone
from sbkit.train.diagnose.saved_batch import pack, take_row, utterance_ids
from sbkit.train.distributed import ranks
from sbkit.train.given import MicroBatch
from sbkit.train.precision import losses_in_fp32

logger = logging.getLogger(__name__)

_MOST_WEIGHTS = 4 << 30  # bytes; weights of larger models are only in checkpoints
_NAMED = 12  # utterances named in the text; the file has all


class KeptBatch(NamedTuple):
    """A micro-batch, and the state of the random generators (``rng.capture``) before it was run, if kept."""

    batch: object
    rng: Mapping[str, torch.Tensor] | None = None


def report(
    brain: sb.Brain,
    folder: str | os.PathLike[str],
    suspects: Sequence[Any],
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

    Arguments
    ---------
    brain : has ``modules``, ``device``, ``training_ctx``, ``compute_forward`` and ``compute_objectives``; with
        ``utterance_losses(predictions, batch) -> Tensor [B]``, the report has the loss of each utterance
    folder : the folder of the run
    suspects : this rank's micro-batches: each a ``KeptBatch``, an equivalent pair, or the batch itself
    what : what was not finite: "loss" or "gradient"
    scale, sum_scale : the factors of the loss: the loss scale, and the factor that makes a sum nearly a mean
    lr : the learning rate, for the report
    late : the number of steps done since: on a GPU a step's values are known only after the next step, so the batch is
        run, and saved, with weights that are newer by as many steps
    limit : the maximum number of reports that a rank saves in one run
    """
    suspects = [_suspect(one) for one in suspects]
    context = {"step": step, "epoch": epoch, "rank": ranks.rank(), "what": what, "scale": scale,
               "sum_scale": sum_scale, "lr": None if lr is None else float(lr), "late": late,
               "precision": str(getattr(brain, "precision", "fp32")), "device": str(brain.device)}
    there = Path(folder) / CULPRITS
    if all(ranks.gather_objects(len(_saved_by(there, ranks.rank())) >= limit)):
        return f"{_head(context)} {there} already has reports of {limit} such steps."
    with at_step(brain, step):
        accounts = [_account(brain, suspect, micro, context) for micro, suspect in enumerate(suspects)]
    guilty = [one for one in accounts
              if one["counts"] and (one["findings"]["what"] != "nothing" or one["findings"]["error"])]
    shown = ranks.gather_objects(bool(guilty))
    if not any(shown) and ranks.is_main():  # it can't be reproduced; all micro-batches are saved anyway
        guilty = accounts
    if guilty and len(_saved_by(there, ranks.rank())) < limit:
        first = shown.index(True) if any(shown) else 0
        _save(there, brain.modules if first == ranks.rank() else None, suspects, guilty, context)
    everyone = [account for one in ranks.gather_objects(guilty) for account in one]
    return text(everyone, context, there)


@contextlib.contextmanager
def at_step(brain: sb.Brain, step: int) -> Iterator[None]:
    """Context in which a Brain is at a step, counted from 1, on which what it computes may depend."""
    now, brain.optimizer_step = brain.optimizer_step, step - 1
    try:
        yield
    finally:
        brain.optimizer_step = now


def runner(brain: sb.Brain) -> Callable[[Any], Ran]:
    """Return a function for ``examine`` that computes the loss of a batch as in training, but without DDP."""

    def run(batch: MicroBatch) -> Ran:
        with brain.training_ctx:
            predictions = brain.compute_forward(batch, Stage.TRAIN)
            predictions = losses_in_fp32(predictions, brain.training_ctx)
            loss = brain.compute_objectives(predictions, batch, Stage.TRAIN)
            each = getattr(brain, "utterance_losses", None)
            with torch.no_grad():
                return Ran(loss.total if hasattr(loss, "total") else loss,
                           None if each is None else each(predictions, batch))

    return run


def _suspect(one: object) -> KeptBatch:
    """Convert to a ``KeptBatch``; a batch may itself be a pair (inputs, targets)."""
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Mapping) and "torch" in one[1]:
        return KeptBatch(*one)
    return one if isinstance(one, KeptBatch) else KeptBatch(one)


def _account(brain: sb.Brain, suspect: KeptBatch, micro: int, context: Mapping[str, Any]) -> dict[str, Any]:
    """Run a micro-batch again and return the findings as plain JSON."""
    # These gradients must not be averaged over ranks.
    with brain.no_sync() if hasattr(brain, "no_sync") else contextlib.nullcontext():
        found = examine(runner(brain), brain.modules, suspect.batch, rng=suspect.rng, device=brain.device,
                        scale=context["scale"] * context["sum_scale"])
    ids = utterance_ids(suspect.batch)
    if found.what == "loss" and not found.utterance_losses and not found.error and not ranks.connected():
        found.utterance_losses = alone(brain, suspect)
    counts = getattr(suspect.batch, "weight", 1.0) != 0  # the loss of a placeholder batch does not count
    return {**context, "micro": micro, "counts": counts, "ids": ids, "bad_ids": bad_ids(found, ids),
            "where": describe(found), "likely": causes(found, suspect.batch, context),
            "findings": {**found.as_dict(), "what": found.what}}


def alone(brain: sb.Brain, suspect: KeptBatch) -> list[float]:
    """Return the loss of each utterance run alone, if the batch can be split."""
    singles = [take_row(suspect.batch, row) for row in range(len(utterance_ids(suspect.batch)))]
    if any(single is None for single in singles):
        return []
    return losses_alone(runner(brain), brain.modules, singles, rng=suspect.rng, device=brain.device)


def bad_ids(found: Inspection, ids: Sequence[str]) -> list[str]:
    """Return the ids of utterances with values that are not finite, as far as known."""
    rows: set[int] = set()
    for values in found.inputs.values():
        rows.update(values.rows)
    rows.update(i for i, loss in enumerate(found.utterance_losses) if not math.isfinite(loss))
    layer = found.first_layer
    if not rows and layer is not None and layer.output.shape[:1] == [len(ids)]:
        rows.update(layer.output.rows)
    return [ids[i] for i in sorted(rows) if i < len(ids)]


def describe(found: Inspection) -> str:
    """Describe in one line where values are not finite."""
    layer = found.first_layer
    if found.error and layer is None:
        return f"running the batch again ended with {found.error}"
    if layer is not None:
        taken = ""
        if layer.inputs is not None and layer.inputs.bad:
            taken = f"; its input is already not finite, but {before(found)} is"
        elif layer.inputs is not None:
            taken = f", from an input {layer.inputs.dtype} of at most {layer.inputs.largest:.3g}"
        return (f"the first layer whose output is not finite is {layer.name} ({layer.kind}, call "
                f"{layer.call}): {wrong_values(layer.output)}{taken}")
    if found.what == "loss":
        return f"every layer's output is finite; the loss made of them is {found.loss}"
    if found.what == "gradient":
        names = ", ".join(list(found.gradients)[:4])
        first = (f"; backward first fails after the output of {found.gradient_first}"
                 if found.gradient_first else "")
        more = ", ..." if found.gradient_count > 4 else ""
        return (f"the loss is {found.loss:.4g}, but the gradients of {found.gradient_count} parameters are "
                f"not finite ({names}{more}){first}")
    loss = "none" if found.loss is None else f"{found.loss:.4g}"
    norm = "none" if found.gradient_norm is None else f"{found.gradient_norm:.4g}"
    return f"when run again, everything was finite (loss {loss}, gradient norm {norm})"


def wrong_values(values: Values) -> str:
    """Describe values that are not finite: "12 nan and 3 inf of 4096 values, float16"."""
    named = [(values.nan, "nan"), (values.inf, "inf"), (values.minus_inf, "-inf")]
    counts = " and ".join(f"{count} {name}" for count, name in named if count)
    return f"{counts} of {math.prod(values.shape)} values, {values.dtype}"


def text(accounts: Sequence[Mapping[str, Any]], context: Mapping[str, Any], there: Path) -> str:
    """Return the report as text; ``there`` is the folder of all culprits."""
    lines = [_head(context)]
    for account in accounts:
        lines.append(f"  rank {account['rank']}, micro-batch {account['micro']}: {account['where']}")
        if account["bad_ids"]:
            lines.append(f"    utterances where it shows: {some(account['bad_ids'])}")
        lines.append(f"    utterances of the batch: {some(account['ids'])}")
        lines += [f"    likely: {cause}" for cause in account["likely"]]
        saved = there / name_of(account)
        if saved.is_dir():
            lines.append(f"    saved; examine it with: sbkit replay {saved}")
    return "\n".join(lines)


def _head(context: Mapping[str, Any]) -> str:
    epoch = "" if context["epoch"] is None else f" of epoch {context['epoch']}"
    weights = f" It is examined with the weights {moved(context)}." if context["late"] else ""
    return f"Step {context['step']}{epoch}: the {context['what']} is not finite; the step was skipped.{weights}"


def moved(context: Mapping[str, Any]) -> str:
    """Describe the weights that a late report was made with."""
    late = context["late"]
    return (f"after step {context['step'] + late}, {late} step{'s' * (late > 1)} later: on a GPU the values of a "
            "step are known only then")


def _saved_by(there: Path, rank: int) -> list[Path]:
    return list(there.glob(f"step-*-rank-{rank}")) if there.is_dir() else []


def name_of(context: Mapping[str, Any]) -> str:
    """Return the name of a culprit's folder."""
    return f"step-{context['step']}-rank-{context['rank']}"


def some(names: Sequence[str]) -> str:
    """Join the first names of a long list, and count the others."""
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown or "(no ids)"


def _save(
    there: Path, modules: torch.nn.Module | None, suspects: Sequence[KeptBatch],
    accounts: Sequence[Mapping[str, Any]], context: Mapping[str, Any],
) -> None:
    """Write a culprit's folder under another name and rename it; a full disk loses the report, but not the run.

    modules : save their weights, too, if no culprit of the run has any yet
    """
    final, aside = there / name_of(context), None
    try:
        there.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=there))
        batches, tensors = [], {}
        for account in accounts:
            suspect, at = suspects[account["micro"]], f"micro{account['micro']}/"
            tree, held = pack(suspect.batch)
            tensors.update({f"{at}batch/{name}": t for name, t in held.items()})
            tensors.update({f"{at}rng/{name}": t for name, t in (suspect.rng or {}).items()})
            batches.append({"micro": account["micro"], "tree": tree})
        save_file(tensors, aside / "tensors.safetensors")
        if modules is not None and not any(there.glob("*/model.safetensors")):
            weights = _weights(modules)
            if weights is not None:
                save_file(weights, aside / "model.safetensors")
        with open(aside / "culprit.json", "w", encoding="utf-8") as out:
            json.dump({**context, "batches": batches, "accounts": _jsonable(accounts)}, out, indent=1)
        aside.chmod(0o755)
        shutil.rmtree(final, ignore_errors=True)  # from an earlier attempt at the same step
        aside.rename(final)
    except Exception as error:
        refused = error if isinstance(error, OSError) else disk.refusal(error)  # safetensors has its own error
        if refused is None:
            raise
        logger.warning("The culprit of step %s is not saved: %s", context["step"], disk.explain(refused, final))
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


def _weights(modules: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return parameters and buffers by name, each once; None if they are sharded or too large."""
    named = [*modules.named_parameters(), *modules.named_buffers()]
    if any(hasattr(tensor, "to_local") for _, tensor in named):
        return None
    if sum(tensor.numel() * tensor.element_size() for _, tensor in named) > _MOST_WEIGHTS:
        return None
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named}


def _jsonable(value: object) -> object:
    """Replace nan and inf, which JSON does not have, by strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _jsonable(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return value
