"""``sbkit tune RECIPE.yaml [--key value ...]``: find the largest batch that fits, by trying; cached per model, device
and precision."""

from __future__ import annotations

import sys

from sbkit.errors import SbkitError
from sbkit.system.environment import check_torch

HELP = (
    "--fresh tries again.\n"
    "--memory GIB: memory that a run may use (default: the whole GPU; on a CPU most of the free memory)."
)
OPTIONS: tuple[str, ...] = ("fresh", "memory")


def run(argv: list[str]) -> int:
    check_torch()
    from sbkit.recipe import arguments
    from sbkit.recipe.batch_size import cached, store
    from sbkit.train import device as devices
    from sbkit.train.memory import batch_size_search as sizes
    from sbkit.train.memory.trials import open_trial

    given, argv = arguments.command_options(argv, "such as --memory 16", ("fresh",), memory=float)
    request = arguments.parse(argv)
    device = devices.resolve(request.run_opts.device)
    gib = sizes.memory_budget(given.memory, device)
    with open_trial(request, device) as trial:
        same = (gib, trial.edges, trial.most_seconds)
        found = next((one for one in ([] if given.fresh else cached(trial.cache))
                      if (one.gib, one.edges, one.most) == same), None)
        if found is None:
            found = sizes.find(trial, argv, gib)
            try:
                store(trial.cache, found)
            except SbkitError as error:  # the result still gets printed
                print(f"warning: the result was not cached: {error}", file=sys.stderr)
        else:
            print(f"from the cache, {trial.cache} (--fresh tries again)", file=sys.stderr)
    print(sizes.summary(trial, found))
    return 0
