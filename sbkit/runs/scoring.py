"""Scores a manifest with a run's Brain on all ranks, and measures the time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from speechbrain.core import Stage

from sbkit.data.loader import EvalLoader
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe
from sbkit.runs.evaluation import CheckpointResult, EvaluateRequest
from sbkit.runs.keys import RunKeys
from sbkit.train.distributed import ranks

if TYPE_CHECKING:
    from sbkit.train.brain import Brain


def score(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str) -> CheckpointResult:
    """Score the manifest on all ranks; every rank gets the whole result."""
    ranks.barrier("ready")
    began = time.monotonic()
    with brain.searching():
        damaged, loss = transcribe(request, recipe, brain, manifest, label)
    took = max(ranks.gather_objects(time.monotonic() - began))
    damaged = {name: reason for part in ranks.gather_objects(damaged) for name, reason in part.items()}
    came = brain.results(brain.all_rows(), loss, damaged)
    came.check()
    seconds = float(manifest.durations.sum(dtype="float64")) - sum(
        float(manifest.durations[i]) for i, name in enumerate(manifest.ids) if name in damaged)
    facts = {
        "utterances": came.utterances, "hours": seconds / 3600, **came.facts(), "seconds": took,
        "real_time_factor": took / seconds, "devices": ranks.world_size(), "device": str(brain.device),
        "precision": brain.eval_precision, "damaged": damaged,
    }
    return CheckpointResult(came, facts, brain.metric.name)


def transcribe(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str,
               ) -> tuple[dict[str, str], float]:
    """Score this rank's share: fills ``brain.rows``, returns the unreadable recordings and the loss."""
    keys = recipe.keys
    loader = EvalLoader(
        manifest, recipe.task.encoder(keys), max_batch_seconds=request.max_batch_seconds or _batch_seconds(keys),
        rank=ranks.rank(), world=ranks.world_size(), pin_memory=torch.device(brain.device).type == "cuda",
        workers=keys.num_workers if request.workers is None else request.workers, sample_rate=keys.sample_rate,
    )
    with loader, torch.no_grad():
        brain.open_stage(Stage.TEST)
        loss = brain.pass_over(loader, Stage.TEST, label, show=ranks.is_main())
    return loader.damaged, loss


def _batch_seconds(keys: RunKeys) -> float:
    if keys.batching is None:
        raise SbkitError("the recipe has no batching", hint="set the audio in one batch: --max-batch-seconds 120")
    return keys.batching.max_batch_seconds
