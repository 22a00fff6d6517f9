"""The report of a step that was not finite, and its batch on disk: which utterance, layer and values, and why."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch
from safetensors.torch import save_file

from sbkit.score.run_files import CULPRITS
from sbkit.system import disk
from sbkit.train.diagnose.inspection import KeptBatch, examine
from sbkit.train.diagnose.saved_batch import pack
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

_MAX_WEIGHTS = 4 << 30  # bytes; weights of larger models are only in checkpoints
_NAMED = 12  # utterances named in the text; the file has all


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

    Arguments
    ---------
    folder : the folder of the run
    batches : this rank's micro-batches
    what : what was not finite: "loss" or "gradient"
    scale, sum_scale : the factors of the loss: the loss scale, and the factor that makes a sum nearly a mean
    lr : the learning rate, for the file
    late : the number of steps done since: on a GPU a step's values are known only after the next step, so the batch is
        run, and saved, with weights that are newer by as many steps
    limit : the maximum number of reports that a rank saves in one run
    """
    context = {"step": step, "epoch": epoch, "rank": ranks.rank(), "what": what, "scale": scale,
               "sum_scale": sum_scale, "lr": None if lr is None else float(lr), "late": late,
               "precision": str(getattr(brain, "precision", "fp32")), "device": str(brain.device)}
    culprits = Path(folder) / CULPRITS
    full = len(list(culprits.glob(f"step-*-rank-{ranks.rank()}"))) >= limit
    of_epoch = "" if epoch is None else f" of epoch {epoch}"
    head = f"Step {step}{of_epoch}: the {what} is not finite; the step was skipped."
    head += f" It is examined with the weights {weights_of(context)}." if late else ""
    if all(ranks.gather_objects(full)):
        return f"{head} {culprits} already has reports of {limit} such steps."
    accounts: list[dict[str, Any]] = []
    guilty: list[dict[str, Any]] = []
    for micro, kept in enumerate(batches):
        found = examine(brain, kept, step, scale * sum_scale)
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
            lines.append(f"    utterances where it shows: {some(account['bad_ids'])}")
        lines.append(f"    utterances of the batch: {some(account['ids'])}")
        lines += [f"    likely: {account['likely']}"] if account["likely"] else []
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


def some(names: Sequence[str]) -> str:
    """Join the first names of a long list, and count the others."""
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown or "(no ids)"


def _save(
    culprits: Path, modules: torch.nn.Module | None, batches: Sequence[KeptBatch],
    accounts: Sequence[Mapping[str, Any]], context: Mapping[str, Any],
) -> None:
    """Write a culprit's folder under another name and rename it; a full disk loses the report, but not the run.

    modules : save their weights, too, if no culprit of the run has any yet
    """
    final, aside = culprits / f"step-{context['step']}-rank-{context['rank']}", None
    try:
        culprits.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=culprits))
        trees, tensors = [], {}
        for account in accounts:
            kept, at = batches[account["micro"]], f"micro{account['micro']}/"
            tree, held = pack(kept.batch)
            tensors.update({f"{at}batch/{name}": tensor for name, tensor in held.items()})
            tensors.update({f"{at}rng/{name}": tensor for name, tensor in (kept.rng or {}).items()})
            trees.append({"micro": account["micro"], "tree": tree})
        save_file(tensors, aside / "tensors.safetensors")
        if modules is not None and not any(culprits.glob("*/model.safetensors")):
            named = [*modules.named_parameters(), *modules.named_buffers()]
            if sum(tensor.numel() * tensor.element_size() for _, tensor in named) <= _MAX_WEIGHTS:
                save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in named},
                          aside / "model.safetensors")
        with open(aside / "culprit.json", "w", encoding="utf-8") as out:
            json.dump({**context, "batches": trees, "accounts": accounts}, out, indent=1)
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
