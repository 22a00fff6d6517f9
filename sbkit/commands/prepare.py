"""``sbkit prepare RECIPE.yaml [--key value ...]``: make manifests and tokenizer, and report what was left out."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sbkit.system import memory
from sbkit.system.environment import check_torch

HELP = "Prepare the corpus and the tokenizer only, and report what was left out and why."
OPTIONS: tuple[str, ...] = ()


def run(argv: list[str]) -> int:
    check_torch()
    memory.reserve_little()
    from sbkit.infer.bundles import BundleLoader
    from sbkit.recipe import arguments, load
    from sbkit.runs.lock import RunLock
    from sbkit.runs.preparation import prepare_data
    from sbkit.runs.start_guard import restore_previous
    from sbkit.train.memory import oom
    from sbkit.train.signals import end_by_signals

    request = arguments.parse(argv)
    with end_by_signals(), oom.oom_as_user_error("cpu", hint=memory.LIMIT_HINT):
        recipe = load.open_recipe(load.load(request.path, request.overrides), request.path)
        folder = recipe.keys.output_folder
        with RunLock(Path(folder), runs=False) if folder else contextlib.nullcontext():
            if folder:
                restore_previous(Path(folder))
            prepare_data(recipe, request.overrides, BundleLoader())
    return 0
