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
    import torch

    from sbkit.infer.bundles import BundleLoader
    from sbkit.recipe import arguments, load
    from sbkit.runs import initial, trained_on
    from sbkit.runs.lock import RunLock
    from sbkit.runs.preparation import prepare_data
    from sbkit.runs.run_config import RunConfig
    from sbkit.runs.start_guard import StartGuard, changed_since, without_traces
    from sbkit.score.run_files import RECIPE
    from sbkit.train.memory import oom
    from sbkit.train.signals import end_by_signals

    command = arguments.parse(argv)
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_by_signals())
        stack.enter_context(oom.oom_as_user_error("cpu", hint=memory.LIMIT_HINT))
        config = RunConfig.of(command, torch.device("cpu"))
        # Before its objects are built, because a checkpointer makes its folder.
        output_folder = config.tree.at("output_folder")
        if isinstance(output_folder, str):
            stack.enter_context(without_traces(Path(output_folder)))
        keys = config.keys()
        load.refuse_problems(list(keys.clashes()), config.path)
        if keys.output_folder:
            folder = keys.folder
            stack.enter_context(RunLock(folder, runs=False))
            stack.enter_context(StartGuard(folder))
            if (folder / RECIPE).is_file() and not initial.fresh(keys):
                # A trained model depends on what is prepared here, so it must not be replaced by another corpus's. An
                # earlier version may have done so; that may be corrected.
                if not trained_on.replaced(folder, keys.corpus):
                    keys.corpus.protect(folder)
                initial.open_source(keys, changed_since(folder, config.tree))
        prepare_data(keys, config.overrides, BundleLoader())
    return 0
