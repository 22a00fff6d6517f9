"""The old test of a run with replay: scored before and after the run; an export is refused if it became worse."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import torch

from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe
from sbkit.runs import evaluation, initial, restore
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.runs.replay import NEW, Replay
from sbkit.score.old_set import OLD, OldSet
from sbkit.score.results import Results
from sbkit.score.run_files import OLD_SET, TESTED
from sbkit.score.weights import ChosenWeights
from sbkit.system.console import stored_json
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)
Brain = Any  # of a task, whose class this package can't import

SHARES = (0.75, 0.5, 0.25)
"""Shares of the new weights in the means that are tried."""


def score_before(recipe: Recipe, brain: Brain) -> None:
    """Score the old test with the initial weights, if the run has replay."""
    if isinstance(recipe.keys.corpus, Replay):
        found = OldSet.of(brain.metric, _score(recipe, brain, OLD, "test"))
        brain.step = 0
        if ranks.is_main():
            found.write(recipe.keys.folder)
            logger.info("The old test before training: %s %.2f (%.2f to %.2f)", found.metric, found.before,
                        *found.interval)


def compare(brain: Brain, device: torch.device) -> None:
    """Log the old test's result; if it is worse, look for a mean of old and new weights that is not.

    brain : of the run, after its test
    """
    folder, tested = brain.keys.folder, brain.tested.parts.get(OLD)
    known = OldSet.read(folder) if isinstance(brain.keys.corpus, Replay) else None
    if known is None or tested is None:
        return
    value = tested.stats[known.metric]
    known = dataclasses.replace(known, share=None, old=None, new=None)
    if not known.is_worse(value):
        logger.info("After training: %s", known.describe(value))
    else:
        why = "no mean of old and new weights prevents it; a larger replay may"
        try:
            # The mean that is best on both dev sets, of saved weights: those in memory may be sharded or averaged.
            recipe, saved = restore.load_run(folder, device, weights=brain.keys.tested_weights,
                                             eval_precision=brain.eval_precision)
            mean, rates = initial.MeanWithSource(saved), {}
            for share in SHARES:
                mean.take(share)
                rates[share] = [_score(recipe, saved, part, "dev").stats[known.metric] for part in (OLD, NEW)]
            logger.info("Means with the initial weights, %s on the dev sets: %s", known.metric, "; ".join(
                f"{share:g} of the new weights: old {old:.2f}, new {new:.2f}" for share, (old, new) in rates.items()))
            # Of those that haven't forgotten on dev, if there are any: a mean that learnt more by forgetting helps
            # nobody.
            kept = [share for share, (old, _) in rates.items() if not known.is_worse(old)] or list(rates)
            best = (min if known.lower_is_better else max)(kept, key=lambda share: sum(rates[share]))
            mean.take(best)
            old, new = (_score(recipe, saved, part, "test").stats[known.metric] for part in (OLD, NEW))
            known = dataclasses.replace(known, **(dict.fromkeys(("share", "old", "new")) if known.is_worse(old) else
                                                  {"share": best, "old": old, "new": new}))
        except SbkitError as error:  # the source may be gone by now
            why = f"no mean of old and new weights could be tried: {error.message}"
        logger.warning("After training: %s; %s", known.describe(value),
                       known.offer(folder, brain.keys.tested_weights) or why)
    if ranks.is_main():
        known.write(folder)


def guard(recipe: Recipe, brain: Brain, weights: ChosenWeights, accept_worse: bool) -> str:
    """Refuse weights that are worse on the old test than before the run, beyond its interval; returns the result.

    brain : has the weights, into which their share in a mean with the initial ones is mixed here
    accept_worse : refuse nothing
    """
    keys = recipe.keys
    if weights.share is not None:
        if keys.init_from is None:
            raise SbkitError(f"--mean {weights.share:g}: {keys.folder} did not start from other weights "
                             "(init_from: null)", hint="leave it out")
        initial.MeanWithSource(brain).take(weights.share)
    if not isinstance(keys.corpus, Replay):
        return ""
    known = OldSet.read(keys.folder)
    try:
        if known is None:
            raise SbkitError(f"the run replays its source's corpus, but lacks {OLD_SET}: the old test's result before "
                             "training is unknown", hint="--accept-worse exports it anyway")
        name = f"{known.metric} {OLD}"  # in what the run's own test recorded
        value = stored_json(keys.folder / TESTED).get(name) if weights == keys.tested_weights else None
        if value is None:
            value = _score(recipe, brain, OLD, "test").stats[known.metric]
    except SbkitError as error:
        if not accept_worse:
            raise
        print(f"the old test was not scored: {error.message}", file=sys.stderr)
        return "The result of the old test is unknown."
    message = known.describe(value)
    if known.is_worse(value):
        message = f"the model forgot: {message}"
        if not accept_worse:
            raise SbkitError(message, hint=f"{known.offer(keys.folder, keys.tested_weights)}; ".removeprefix("; ")
                             + "--accept-worse exports it anyway")
    print(message, file=sys.stderr)
    return f"{message[0].upper()}{message[1:]}."


def _score(recipe: Recipe, brain: Brain, part: str, split: str) -> Results:
    manifest = recipe.keys.corpus.parts[part].manifest(split)
    request = EvaluateRequest(recipe.keys.folder)
    return evaluation.score(request, recipe, brain, manifest, f"{part} {split}").results
