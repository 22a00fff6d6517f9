"""A run's Brain over a manifest: what it hears on all ranks, and how much of that is wrong."""

from __future__ import annotations

import time
from typing import Any

from sbkit.errors import SbkitError
from sbkit.runs.evaluation import EvaluateRequest, Result


def score(request: EvaluateRequest, hparams: dict[str, Any], brain: Any, manifest: Any, label: str) -> Result:
    """Transcribe the manifest on all ranks; every rank gets all of it."""
    from sbkit.score.significance import interval
    from sbkit.tasks import asr
    from sbkit.train.distributed import ranks

    rows, damaged, took = _transcribe(request, hparams, brain, manifest, label)
    words, characters = asr.score(rows)
    if not len(words):
        raise SbkitError(f"none of the {len(manifest)} utterances has a reference, so there is nothing to score",
                         hint="a corpus to score on needs transcripts")
    seconds = float(manifest.durations.sum(dtype="float64")) - sum(
        float(manifest.durations[i]) for i, name in enumerate(manifest.ids) if name in damaged)
    facts = {
        "utterances": len(words), "hours": seconds / 3600, "WER": words.rate, "WER_interval": interval(words),
        "CER": characters.rate, "CER_interval": interval(characters), **_counts(words), "seconds": took,
        "real_time_factor": took / seconds, "devices": ranks.world_size(), "device": str(brain.device),
        "precision": brain.eval_precision, "damaged": damaged,
        "without_reference": [row.id for row in rows if not row.reference.split()],
    }
    return Result(rows, words, characters, facts)


def _counts(words: Any) -> dict[str, Any]:
    summary = words.summary()
    return {name: summary[name] for name in ("SER", "insertions", "deletions", "substitutions", "num_scored_tokens")}


def _transcribe(request: EvaluateRequest, hparams: dict[str, Any], brain: Any, manifest: Any, label: str,
                ) -> tuple[list[Any], dict[str, str], float]:
    """All ranks' rows, what could not be read, and the seconds that the slowest rank took, reading included."""
    from sbkit.tasks import searches
    from sbkit.train.distributed import ranks

    ranks.meet("ready")
    began = time.monotonic()
    with searches.over_all(brain):
        damaged = hear(request, hparams, brain, manifest, label)
    took = max(ranks.gather_objects(time.monotonic() - began))
    everywhere = {name: reason for part in ranks.gather_objects(damaged) for name, reason in part.items()}
    return brain.all_rows(), everywhere, took


def hear(request: EvaluateRequest, hparams: dict[str, Any], brain: Any, manifest: Any, label: str) -> dict[str, str]:
    """One pass over this rank's share of a manifest: leaves ``brain.rows``, gives what could not be read."""
    import torch
    from speechbrain.core import Stage

    from sbkit.data.loader import EvalLoader
    from sbkit.train.distributed import ranks
    from sbkit.train.evaluation import evaluate

    loader = EvalLoader(
        manifest, hparams["tokenizer"], max_batch_seconds=request.max_batch_seconds or _batch_seconds(hparams),
        rank=ranks.rank(), world=ranks.world_size(), pin_memory=torch.device(brain.device).type == "cuda",
        workers=hparams.get("num_workers", 2) if request.workers is None else request.workers,
    )
    with loader, torch.no_grad():
        brain.on_stage_start(Stage.TEST)
        evaluate(brain, loader, Stage.TEST, label, show=ranks.is_main())
    return loader.damaged


def _batch_seconds(hparams: dict[str, Any]) -> float:
    batching = hparams.get("batching")
    if batching is None:
        raise SbkitError("the recipe has no batching", hint="say what a device holds at once: --max-batch-seconds 120")
    return batching.max_batch_seconds
