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
    from sbkit.runs import initial, trained_on
    from sbkit.runs.lock import RunLock
    from sbkit.runs.preparation import prepare_data
    from sbkit.runs.start_guard import StartGuard, changed_since, without_traces
    from sbkit.score.run_files import RECIPE
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
            opened.enter_context(StartGuard(Path(folder)))
            run, keys = Path(folder), recipe.keys
            if (run / RECIPE).is_file() and not initial.fresh(keys):
                # A trained model stands on what is prepared here, so nothing of it may become another corpus's. What
                # has become so already, by an earlier version, may be mended.
                if not trained_on.replaced(run, keys.corpus):
                    keys.corpus.protect(run)
                initial.open_source(keys, changed_since(run, recipe.tree))
        prepare_data(recipe, request.overrides, BundleLoader())
    return 0
