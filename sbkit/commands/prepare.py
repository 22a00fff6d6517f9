"""``sbkit prepare RECIPE.yaml [--key value ...]``: prepare the corpus and the tokenizer only, and report what was left
out and why."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sbkit.system import memory
from sbkit.system.environment import check_torch


def run(argv: list[str]) -> int:
    check_torch()
    memory.reserve_little()
    from sbkit.infer.bundles import BundleLoader
    from sbkit.recipe import arguments, load
    from sbkit.runs.lock import RunLock
    from sbkit.runs.preparation import prepare_data
    from sbkit.runs.start_guard import restore_previous, without_traces
    from sbkit.train.memory import oom
    from sbkit.train.signals import end_by_signals

    request = arguments.parse(argv)
    with contextlib.ExitStack() as opened:
        opened.enter_context(end_by_signals())
        opened.enter_context(oom.oom_as_user_error("cpu", hint=memory.LIMIT_HINT))
        load.check_overrides(request.path, request.overrides)
        # Known before its objects are built, because a checkpointer makes its folder.
        tree = load.resolved(request.path, request.overrides)
        if isinstance(written := tree.at("output_folder"), str):
            opened.enter_context(without_traces(Path(written)))
        recipe = load.open_recipe(request.path, request.overrides, tree)
        folder = recipe.keys.output_folder
        if folder:
            opened.enter_context(RunLock(Path(folder), runs=False))
            restore_previous(Path(folder))
        prepare_data(recipe, request.overrides, BundleLoader())
    return 0
