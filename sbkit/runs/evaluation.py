"""The scoring of a run's checkpoint on all ranks, and the folder with its results."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from speechbrain.core import Stage

from sbkit.data.columns import BatchColumns
from sbkit.data.loader import EvalLoader
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe
from sbkit.runs.evaluation_options import searching
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.score.report import write_report
from sbkit.score.results import Results
from sbkit.score.run_files import RESULT
from sbkit.system import disk
from sbkit.system.console import atomic_write, stored_json
from sbkit.system.environment import command, describe
from sbkit.train.distributed import ranks

if TYPE_CHECKING:
    from sbkit.compat.brain import Brain

_SCORED = ("source", "manifest", "checkpoints", "decoder", "precision")  # keys of result.json that identify a result


class CheckpointResult(NamedTuple):
    """The result for one checkpoint; ``facts`` is the content of result.json."""

    results: Results
    facts: dict[str, Any]
    metric: str
    replaced: str = ""  # the command of a different result that had the same name


def score(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str) -> CheckpointResult:
    """Score the manifest on all ranks; every rank gets the whole result."""
    _warm_up(request, recipe, brain, manifest, label)
    began = time.monotonic()
    with searching(brain):
        damaged_here, loss = transcribe(request, recipe, brain, manifest, label)
    took = max(ranks.gather_objects(time.monotonic() - began))
    damaged = {name: reason for of_rank in ranks.gather_objects(damaged_here) for name, reason in of_rank.items()}
    results = brain.tested_results(brain.all_rows(), loss, damaged)
    results.check()

    damaged_seconds = sum(
        float(manifest.durations[row]) for row, name in enumerate(manifest.ids) if name in damaged)
    seconds = float(manifest.durations.sum(dtype="float64")) - damaged_seconds
    facts = {"utterances": results.utterances, "hours": seconds / 3600, **results.facts(), "seconds": took}
    if results.parts:
        facts["parts"] = {part: of_part.facts() for part, of_part in results.parts.items()}
    facts |= {
        "real_time_factor": took / seconds, "devices": ranks.world_size(), "device": str(brain.device),
        "precision": brain.eval_precision, "damaged": damaged}
    return CheckpointResult(results, facts, brain.metric.name)


def _warm_up(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str) -> None:
    """Score one utterance on each rank: it waits for what is done once, such as loading kernels, which is no part of
    the real-time factor."""
    device = torch.device(brain.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), searching(brain):
        first = manifest.select(np.arange(min(ranks.world_size(), len(manifest))))
        transcribe(replace(request, workers=0), recipe, brain, first, label, show=False)
    ranks.barrier("ready")


def transcribe(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str,
               show: bool = True) -> tuple[dict[str, str], float]:
    """Score this rank's share: fills ``brain.rows``, returns the unreadable recordings and the loss."""
    keys = recipe.keys
    if not request.max_batch_seconds and keys.batching is None:
        raise SbkitError("missing-key",
                         "the recipe has no batching",
                         hint="give the seconds of audio in a batch: --max-batch-seconds 120",
                         key="batching")
    loader = EvalLoader(
        manifest, recipe.task.tokenizer(keys), columns=BatchColumns(recipe.task.columns, keys),
        augment=keys.test_augment,
        max_batch_seconds=request.max_batch_seconds or keys.batching.max_batch_seconds,
        rank=ranks.rank(), world=ranks.world_size(), pin_memory=torch.device(brain.device).type == "cuda",
        workers=keys.num_workers if request.workers is None else request.workers, sample_rate=keys.sample_rate,
    )
    with loader, torch.no_grad():
        brain.open_stage(Stage.TEST)
        loss = brain.pass_over(loader, Stage.TEST, label, show=show and ranks.is_main())
    return loader.damaged, loss


def write(scored: CheckpointResult, manifest: Manifest) -> str:
    """Write all files of a result; returns the command and rate of one of another checkpoint, corpus or search that it
    replaced."""
    folder = Path(scored.facts["folder"])
    previous = stored_json(folder / RESULT)
    replaced = ""
    if previous and any(previous.get(key) != scored.facts.get(key) for key in _SCORED):
        replaced = f"{previous.get('command')} ({scored.metric} {previous.get(scored.metric, float('nan')):.2f})"
    with disk.writing_into(folder, "--to"):
        folder.mkdir(parents=True, exist_ok=True)
        scored.results.write(folder, manifest)
        with atomic_write(folder / RESULT) as out:
            json.dump({**scored.facts, "command": command(), "environment": describe()}, out, indent=1,
                      ensure_ascii=False)
        write_report(folder, title=f"{Path(scored.facts['run']).name} on {folder.name}", remote=manifest.remote)
    return replaced
