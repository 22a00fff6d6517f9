"""``sbkit check RECIPE.yaml [--key value ...]``: report everything wrong with a recipe; exit code 1 if anything is."""

from __future__ import annotations

import sys

from sbkit.errors import SbkitError
from sbkit.system.environment import check_torch_pair

HELP = (
    "Report everything wrong with a recipe, what it costs and what fits in memory. --json for programs, --measure to\n"
    "run a few steps.\n--no-run imports only speechbrain, torch and sbkit, builds and calls nothing, and "
    "lists what it could not check."
)
#: Arguments that are not recipe keys.
FLAGS = ("--json", "--measure", "--no-run")


def run(words: list[str]) -> int:
    """Check, print the findings and return the exit code."""
    check_torch_pair()
    from sbkit.recipe import arguments
    from sbkit.recipe.check import check

    chosen = {flag for flag in FLAGS if flag in words}
    if {"--measure", "--no-run"} <= chosen:
        raise SbkitError("--measure runs steps of the recipe, and --no-run runs nothing", hint="drop one of them")
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
