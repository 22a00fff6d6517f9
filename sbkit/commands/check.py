"""``sbkit check RECIPE.yaml [--key value ...]``: all that is wrong with a recipe; 1 if anything is."""

from __future__ import annotations

import sys

from sbkit.errors import SbkitError
from sbkit.system.environment import check_torch_pair

HELP = (
    "Say all that is wrong with a recipe, what it costs and what fits. --json for programs, --measure to run "
    "a few steps.\n--no-run imports nothing but speechbrain, torch and sbkit, builds and calls nothing, and "
    "lists what it could not see."
)
#: Words that are no keys of a recipe.
FLAGS = ("--json", "--measure", "--no-run")


def run(words: list[str]) -> int:
    """Look, and say it; the exit code."""
    check_torch_pair()
    from sbkit.recipe import arguments
    from sbkit.recipe.check import check

    chosen = {flag for flag in FLAGS if flag in words}
    if {"--measure", "--no-run"} <= chosen:
        raise SbkitError("--measure runs steps of the recipe, and --no-run nothing of it", hint="leave out one of them")
    builds = "--no-run" not in chosen
    request = arguments.parse([word for word in words if word not in FLAGS], beside=builds)
    measure = None
    if "--measure" in chosen:
        from sbkit.train.memory.trials import measurement

        measure = measurement(request)
    report = check(request.path, request.overrides, run_opts=request.run_opts, run=builds, measure=measure)
    if "--json" in chosen:
        print(report.json())
    else:
        if report.facts():
            print(report.facts(), flush=True)
        if report.problems():
            print(f"{chr(10) if report.facts() else ''}{report.problems()}", file=sys.stderr, flush=True)
        print(f"\n{report.verdict()}", file=sys.stderr if report.errors else sys.stdout)
    return 1 if report.errors else 0
