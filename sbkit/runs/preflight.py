"""Checks before a run costs anything: of its recipe, and of the labels of its corpus."""

from __future__ import annotations

import sys

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import Request
from sbkit.recipe.load import Recipe
from sbkit.recipe.source import Findings


def before_run(request: Request) -> None:
    """Check the recipe of a run that is about to start: errors end the run, warnings are printed."""
    from sbkit.recipe.check import check

    report = check(request.path, request.overrides, run_opts=request.run_opts, starting=True)
    if report.errors:  # one message, so that torchrun's last lines contain it all
        raise SbkitError(f"{report.verdict()}; --no-check skips this check\n{report.problems()}",
                         exit_code=1)
    if report.problems():
        print(report.problems(), file=sys.stderr, flush=True)
    print(report.verdict(), file=sys.stderr, flush=True)


def before_training(recipe: Recipe) -> None:
    """Check the labels of the prepared corpus against the model."""
    found = Findings()
    recipe.task.check_labels(recipe.keys, recipe.keys.corpus.load(), found, {})
    for finding in found:
        print(finding, file=sys.stderr, flush=True)
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        raise SbkitError("the labels don't fit the model", hint="--no-check trains on them anyway", exit_code=1)
