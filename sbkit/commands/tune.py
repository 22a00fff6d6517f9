"""``sbkit tune RECIPE.yaml [--key value ...]``: find the largest batch that fits, by trying; cached per model, device
and precision."""

from __future__ import annotations

from sbkit.commands.options import print_json
from sbkit.system.environment import check_torch

HELP = (
    "--fresh tries again.\n"
    "--memory GIB: memory that a run may use (default: the whole GPU; on a CPU most of the free memory).\n"
    "--json prints the result for programs."
)
OPTIONS: tuple[str, ...] = ("fresh", "memory", "json")


def run(argv: list[str]) -> int:
    check_torch()
    from sbkit.recipe import arguments
    from sbkit.train import device as devices
    from sbkit.train.memory import batch_size_search as sizes
    from sbkit.train.memory.trials import open_trial

    options, argv = arguments.command_options(argv, "such as --memory 16", ("fresh", "json"), memory=float)
    request = arguments.parse(argv)
    device = devices.resolve(request.run_opts.device)
    gib = sizes.memory_budget(options.memory, device)
    with open_trial(request, device) as trial:
        size = sizes.measure(trial, request, gib, options.fresh)
    if options.json:
        seconds, how = sizes.recommended(trial, size)
        print_json({"max_batch_seconds": seconds, "how": how, "utterance_seconds": size.edges, "fits": size.fits})
    else:
        print(sizes.summary(trial, size))
    return 0
