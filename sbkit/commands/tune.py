"""``sbkit tune RECIPE.yaml [--key value ...]``: find the largest batch that fits, by trying; cached per model, device
and precision."""

from __future__ import annotations

from sbkit.system.environment import check_torch

HELP = (
    "--fresh tries again.\n"
    "--memory GIB: memory that a run may use (default: the whole GPU; on a CPU most of the free memory)."
)
OPTIONS: tuple[str, ...] = ("fresh", "memory")


def run(argv: list[str]) -> int:
    check_torch()
    from sbkit.recipe import arguments
    from sbkit.train import device as devices
    from sbkit.train.memory import batch_size_search as sizes
    from sbkit.train.memory.trials import open_trial

    options, argv = arguments.command_options(argv, "such as --memory 16", ("fresh",), memory=float)
    request = arguments.parse(argv)
    device = devices.resolve(request.run_opts.device)
    gib = sizes.memory_budget(options.memory, device)
    with open_trial(request, device) as trial:
        size = sizes.measure(trial, request, gib, options.fresh)
    print(sizes.summary(trial, size))
    return 0
