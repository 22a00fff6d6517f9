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
        old_set = OldSet.of(brain.metric, _score(recipe, brain, OLD, "test"))
        brain.step = 0
        if ranks.is_main():
            old_set.write(recipe.keys.folder)
            logger.info("The initial model on the old test set: %s %.2f (%.2f to %.2f)", old_set.metric, old_set.before,
                        *old_set.interval)


def compare(brain: Brain, device: torch.device) -> None:
    """Log the old test's result; if it is worse, look for a mean of old and new weights that is not.

    brain : of the run, after its test
    """
    folder = brain.keys.folder
    tested = brain.tested.parts.get(OLD)
    old_set = OldSet.read(folder) if isinstance(brain.keys.corpus, Replay) else None
    if old_set is None or tested is None:
        return
    value = tested.stats[old_set.metric]
    old_set = dataclasses.replace(old_set, share=None, old=None, new=None)  # an earlier test may have found a mean
    if not old_set.is_worse(value):
        logger.info("After training: %s", old_set.describe(value))
    else:
        advice = "no mean of old and new weights prevents it; a larger replay may"
        try:
            old_set = _find_mean(brain, device, old_set)
        except SbkitError as error:  # the source may be gone by now
            advice = f"no mean of old and new weights could be tried: {error.message}"
        logger.warning("After training: %s; %s", old_set.describe(value),
                       old_set.offer(folder, brain.keys.tested_weights) or advice)
    if ranks.is_main():
        old_set.write(folder)


def _find_mean(brain: Brain, device: torch.device, old_set: OldSet) -> OldSet:
    """Try means of old and new weights; returns ``old_set`` with the best one, if that is not worse on the old test."""
    # Of saved weights, because those in memory may be sharded or averaged.
    recipe, saved = restore.load_run(brain.keys.folder, device, weights=brain.keys.tested_weights,
                                     eval_precision=brain.eval_precision)
    mean = initial.MeanWithSource(saved)
    old_rates: dict[float, float] = {}
    new_rates: dict[float, float] = {}
    for share in SHARES:
        mean.take(share)
        old_rates[share] = _score(recipe, saved, OLD, "dev").stats[old_set.metric]
        new_rates[share] = _score(recipe, saved, NEW, "dev").stats[old_set.metric]
    logger.info("Means with the initial weights, %s on the dev sets: %s", old_set.metric, "; ".join(
        f"{share:g} of the new weights: old {old_rates[share]:.2f}, new {new_rates[share]:.2f}" for share in SHARES))

    # Of those that haven't forgotten on dev, if there are any: a mean that learnt more by forgetting helps nobody.
    candidates = [share for share in SHARES if not old_set.is_worse(old_rates[share])] or list(SHARES)
    best_of = min if old_set.lower_is_better else max
    best = best_of(candidates, key=lambda share: old_rates[share] + new_rates[share])
    mean.take(best)
    old = _score(recipe, saved, OLD, "test").stats[old_set.metric]
    new = _score(recipe, saved, NEW, "test").stats[old_set.metric]
    return old_set if old_set.is_worse(old) else dataclasses.replace(old_set, share=best, old=old, new=new)


def guard(recipe: Recipe, brain: Brain, weights: ChosenWeights, accept_worse: bool) -> str:
    """Refuse weights that are worse on the old test than before the run, beyond its interval; returns the result.

    brain : has the weights, into which their share in a mean with the initial ones is mixed here
    accept_worse : refuse nothing
    """
    keys = recipe.keys
    if weights.share is not None:
        if keys.init_from is None:
            raise SbkitError("bad-option", f"--mean {weights.share:g}: {keys.folder} did not start from other weights "
                             "(init_from: null)", hint="leave it out", key="mean")
        initial.MeanWithSource(brain).take(weights.share)
    if not isinstance(keys.corpus, Replay):
        return ""
    old_set = OldSet.read(keys.folder)
    try:
        if old_set is None:
            raise SbkitError("no-old-test",
                             f"{keys.folder} has no {OLD_SET}, so it is unknown how well the initial model recognised "
                             "the old test set, and whether this one forgot",
                             hint="--accept-worse exports it anyway", file=keys.folder)
        value = None
        if weights == keys.tested_weights:  # the run's own test scored them
            value = stored_json(keys.folder / TESTED).get(f"{old_set.metric} {OLD}")
        if value is None:
            value = _score(recipe, brain, OLD, "test").stats[old_set.metric]
    except SbkitError as error:
        if not accept_worse:
            raise
        print(f"the old test was not scored: {error.message}", file=sys.stderr)
        return "The result of the old test is unknown."
    message = old_set.describe(value)
    if old_set.is_worse(value):
        message = f"the model forgot: {message}"
        if not accept_worse:
            offer = old_set.offer(keys.folder, keys.tested_weights)
            raise SbkitError("forgot",
                             message, hint=f"{offer}; ".removeprefix("; ") + "--accept-worse exports it anyway",
                             file=keys.folder)
    print(message, file=sys.stderr)
    return f"{message[0].upper()}{message[1:]}."


def _score(recipe: Recipe, brain: Brain, part: str, split: str) -> Results:
    manifest = recipe.keys.corpus.parts[part].manifest(split)
    request = EvaluateRequest(recipe.keys.folder)
    return evaluation.score(request, recipe, brain, manifest, f"{part} {split}").results
