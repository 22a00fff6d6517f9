"""What happens before a run costs anything: ``sbkit check``, and the check at the start of ``sbkit train``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from sbkit.errors import SbkitError

#: Words of ``sbkit check`` that are no keys of a recipe.
FLAGS = ("--json", "--measure", "--no-run")


def check(argv: list[str], needed: tuple[str, ...]) -> int:
    """``sbkit check RECIPE.yaml [--key value ...] [--json] [--measure | --no-run]``; exit code 1 where it's wrong."""
    from sbkit.recipe import arguments
    from sbkit.recipe.check import check as look

    chosen = {flag for flag in FLAGS if flag in argv}
    if {"--measure", "--no-run"} <= chosen:
        raise SbkitError("--measure runs steps of the recipe, and --no-run nothing of it", hint="leave out one of them")
    run = "--no-run" not in chosen
    request = arguments.parse([word for word in argv if word not in FLAGS], beside=run)
    measure = None
    if "--measure" in chosen:
        from sbkit.train.memory.trials import measurement

        measure = measurement(request)
    report = look(request.path, request.overrides, run_opts=request.run_opts, needed=needed, run=run, measure=measure)
    if "--json" in chosen:
        print(report.json())
    else:
        if report.facts():
            print(report.facts(), flush=True)
        if report.problems():
            print(f"{chr(10) if report.facts() else ''}{report.problems()}", file=sys.stderr, flush=True)
        print(f"\n{report.verdict()}", file=sys.stderr if report.errors else sys.stdout)
    return 1 if report.errors else 0


def before_run(request: Any, needed: tuple[str, ...]) -> None:
    """Check the recipe of a run that is about to start: errors end it, warnings are shown."""
    from sbkit.recipe.check import check as look

    report = look(request.path, request.overrides, run_opts=request.run_opts, needed=needed, prepared=False,
                  priced=False)
    if report.errors:  # one message, so that torchrun's last lines hold it too
        raise SbkitError(f"{report.verdict()}; --no-check would start the run as it is\n{report.problems()}",
                         exit_code=1)
    if report.problems():
        print(report.problems(), file=sys.stderr, flush=True)
    print(report.verdict(), file=sys.stderr, flush=True)


def before_training(hparams: Mapping[str, Any]) -> None:
    """Look at the labels of the corpus, now that it's prepared."""
    from sbkit.recipe.check import check_labels

    hparams["tokenizer"].load()
    found = check_labels(hparams, hparams["corpus"].load())
    for finding in found:
        print(finding, file=sys.stderr, flush=True)
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        raise SbkitError("the labels don't fit the model", hint="--no-check would train on them", exit_code=1)
