"""What is looked at before a run costs anything: its recipe, and the labels of its corpus."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from sbkit.errors import SbkitError

#: What a recipe must define for the stages below.
NEEDED = ("brain", "modules", "output_folder", "corpus", "tokenizer", "output_neurons", "batching", "epoch_counter")


def before_run(request: Any) -> None:
    """Check the recipe of a run that is about to start: errors end it, warnings are shown."""
    from sbkit.recipe.check import check

    report = check(request.path, request.overrides, run_opts=request.run_opts, needed=NEEDED, prepared=False,
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
