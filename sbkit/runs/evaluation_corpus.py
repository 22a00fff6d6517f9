"""The corpus that an evaluation scores, the run's own or another, and the scoring on all ranks."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from speechbrain.core import Stage

from sbkit.data.columns import BatchColumns, Declared
from sbkit.data.corpus import Corpus
from sbkit.data.loader import EvalLoader
from sbkit.data.manifest import Manifest
from sbkit.data.remote import Remote
from sbkit.data.sources import Named, Source
from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe
from sbkit.runs.evaluation import CheckpointResult, EvaluateRequest
from sbkit.runs.keys import TaskKeys
from sbkit.score.run_files import CORPORA
from sbkit.system import disk
from sbkit.train.distributed import ranks

if TYPE_CHECKING:
    from sbkit.train.brain import Brain

logger = logging.getLogger(__name__)

_TEST = ("test", "testing")  # names of the split that is scored by default
_ONE_FILE = (".csv", ".json", ".jsonl", ".parquet")


def corpus(request: EvaluateRequest, recipe: Recipe) -> tuple[str, Path, Remote]:
    """The name of the results, the manifest to score, and the allowed URLs in it."""
    own = recipe.keys.corpus
    split = request.split or "test"
    if request.on is None and own.manifest_path(split).is_file():
        name, corpus = request.name or split, own
    else:
        split = "test"
        source = own.source if request.on is None else request.on
        name, corpus = prepare(request, own, source, recipe.task.needs_text(), recipe.task.columns)
    recipe.task.check_manifest(recipe.keys, split, corpus.manifest(split))
    return name, corpus.manifest_path(split), corpus.remote


def prepare(request: EvaluateRequest, own: Corpus, source: Named | Source | None, needs_text: bool = True,
            columns: Declared | None = None) -> tuple[str, Corpus]:
    """Prepare the split to score: the run's own, or another corpus's with texts normalised by the run's rules."""
    title = request.name or (Path(str(source).split("?")[0]).name.split(".")[0] if source else "demo")
    if isinstance(source, Source):
        title = request.name or source.kind
    if isinstance(source, str) and source.endswith(_ONE_FILE):
        source = {"test": source}
    corpora = request.folder / CORPORA

    def corpus_of(split: str, folder: Path) -> Corpus:
        if request.on is None:
            return own.only_split(split, folder)
        named = {role: name for role, name in own.columns.items() if role in (columns or {})}
        return Corpus(source, own.language, folder, splits={"test": split}, text=own.text, only=("test",),
                      columns=named, schemes=own.schemes, url_megabytes=own.url_megabytes, url_seconds=own.url_seconds)

    split = request.split
    with _name_run_in_errors(request):
        if split is None:
            names = corpus_of("test", corpora / title).names()
            # A run's own only list is what it was trained on.
            alone = names[0] if len(names) == 1 and request.on is not None else None
            split = next((name for name in names if name.lower() in _TEST), alone)
            if split is None:
                raise SbkitError(f"{source} has no test split (it has {', '.join(names) or 'none'})",
                                 hint="choose one with --split")
        if split.lower() not in _TEST and request.name is None:
            title += f"-{split}"
        corpus = corpus_of(split, corpora / title)
        with disk.writing_into(corpora, "--out"):
            corpus.prepare(needs_text=needs_text, columns=columns)
    print(corpus.summary(), file=sys.stderr)
    return title, corpus


@contextlib.contextmanager
def _name_run_in_errors(request: EvaluateRequest) -> Iterator[None]:
    """Name the run in errors about its corpus, which the command did not name."""
    try:
        yield
    except SbkitError as error:
        if request.on is not None:
            raise
        raise SbkitError(f"the corpus of {request.run}: {error.message}", hint=error.hint) from error


def score(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str) -> CheckpointResult:
    """Score the manifest on all ranks; every rank gets the whole result."""
    ranks.barrier("ready")
    began = time.monotonic()
    with brain.searching():
        damaged, loss = transcribe(request, recipe, brain, manifest, label)
    took = max(ranks.gather_objects(time.monotonic() - began))
    damaged = {name: reason for part in ranks.gather_objects(damaged) for name, reason in part.items()}
    results = brain.tested_results(brain.all_rows(), loss, damaged)
    results.check()
    seconds = float(manifest.durations.sum(dtype="float64")) - sum(
        float(manifest.durations[i]) for i, name in enumerate(manifest.ids) if name in damaged)
    facts = {
        "utterances": results.utterances, "hours": seconds / 3600, **results.facts(), "seconds": took,
        **({"parts": {part: each.facts() for part, each in results.parts.items()}} if results.parts else {}),
        "real_time_factor": took / seconds, "devices": ranks.world_size(), "device": str(brain.device),
        "precision": brain.eval_precision, "damaged": damaged,
    }
    return CheckpointResult(results, facts, brain.metric.name)


def transcribe(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str,
               ) -> tuple[dict[str, str], float]:
    """Score this rank's share: fills ``brain.rows``, returns the unreadable recordings and the loss."""
    keys = recipe.keys
    loader = EvalLoader(
        manifest, recipe.task.encoder(keys), columns=BatchColumns(recipe.task.columns, keys),
        augment=keys.test_augment,
        max_batch_seconds=request.max_batch_seconds or _batch_seconds(keys),
        rank=ranks.rank(), world=ranks.world_size(), pin_memory=torch.device(brain.device).type == "cuda",
        workers=keys.num_workers if request.workers is None else request.workers, sample_rate=keys.sample_rate,
    )
    with loader, torch.no_grad():
        brain.open_stage(Stage.TEST)
        loss = brain.pass_over(loader, Stage.TEST, label, show=ranks.is_main())
    return loader.damaged, loss


def _batch_seconds(keys: TaskKeys) -> float:
    if keys.batching is None:
        raise SbkitError("the recipe has no batching", hint="set the audio in one batch: --max-batch-seconds 120")
    return keys.batching.max_batch_seconds
