"""``sbkit train`` in each process: prepares or resumes a run, fits, tests and reports.

Heavy modules are imported in functions, so that signals are handled from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from sbkit.errors import SbkitError
from sbkit.system import console, disk, memory
from sbkit.system.environment import check_torch
from sbkit.train.distributed import launcher

if TYPE_CHECKING:
    import torch
    from speechbrain.utils.run_opts import RunOptions

    from sbkit.recipe.arguments import CommandLine
    from sbkit.recipe.load import Recipe
    from sbkit.runs.keys import Bundles, TaskKeys
    from sbkit.runs.run_config import RunConfig
    from sbkit.runs.start_guard import StartGuard


def run(words: list[str], open_bundles: Callable[[], Bundles]) -> int:
    """Train or resume and return the exit code.

    open_bundles : returns a BundleLoader, which opens bundles of other models
    """
    console.outlast_terminal()
    launcher.watch_launcher()
    check_torch()
    memory.reserve_little()
    from sbkit.recipe import arguments, load
    from sbkit.train import device as devices
    from sbkit.train.signals import end_by_signals

    command = arguments.parse(words)
    if not command.check:  # the check reports these, too; loading does so again, but only after torch is imported
        load.check_overrides(command.path, command.overrides)
    device = devices.resolve(command.run_opts.device)
    if device.type == "cpu":
        memory.keep_freed_memory()
    with end_by_signals():
        _run(command, device, open_bundles())
    return 0


def _run(command: CommandLine, device: torch.device, bundles: Bundles) -> None:
    from sbkit.recipe import load
    from sbkit.runs import same_start, training
    from sbkit.runs.lock import RunLock
    from sbkit.runs.run_config import RunConfig
    from sbkit.runs.start_guard import StartGuard
    from sbkit.train.distributed import ranks
    from sbkit.train.memory import oom

    ranks.init(device, command.run_opts.distributed_backend)
    try:
        with ranks.failing_together(), oom.oom_as_user_error(device):
            same_start.require(command)
            tree = ranks.run_on_main(training.before_run, command) if command.check else None
            config = RunConfig.of(command, device, tree)
            keys = config.keys()
            if not command.check:  # which has found these; all others are found when the model is built
                load.refuse_problems(list(keys.clashes_of_the_corpus()), config.path)
            _refuse_foreign_folder(keys)
            folder = keys.folder
            with disk.disk_errors_as_user_error(folder), RunLock(folder), StartGuard(folder, ranks.is_main()) as guard:
                config = _decide(config, guard, bundles)
                _train_on_cores(config, guard, bundles)
    finally:
        ranks.shutdown()


def _train_on_cores(config: RunConfig, guard: StartGuard, bundles: Bundles) -> None:
    """Train as rank 0, with as many further ranks of this machine as the run's layout has."""
    from sbkit.train.distributed.local_ranks import LocalRanks

    if config.cpu is None:
        _train(config, guard, bundles)
        return
    with LocalRanks(config.cpu.ranks, config.cpu.threads, _be_further_rank, config, bundles):
        _join_and_train(config, guard, bundles)


def _be_further_rank(config: RunConfig, bundles: Bundles) -> None:
    """Train as another rank, in a process of its own, the run that rank 0 has decided."""
    from sbkit.recipe import arguments
    from sbkit.runs.start_guard import StartGuard
    from sbkit.train.memory import oom
    from sbkit.train.signals import end_by_signals

    arguments.make_importable(config.path)
    guard = StartGuard(config.folder, here=False)
    with end_by_signals(), oom.oom_as_user_error(config.device), disk.disk_errors_as_user_error(config.folder):
        _join_and_train(config, guard, bundles)


def _join_and_train(config: RunConfig, guard: StartGuard, bundles: Bundles) -> None:
    from sbkit.train.distributed import ranks

    ranks.init(config.device, config.run_opts.distributed_backend)
    try:
        with ranks.failing_together():
            _train(config, guard, bundles)
    finally:
        ranks.shutdown()


def _decide(config: RunConfig, guard: StartGuard, bundles: Bundles) -> RunConfig:
    """Prepare the corpus, and return the run with all that the corpus and the device decide.

    One rank prepares, with the few objects that this takes. No rank has built a model yet.
    """
    from sbkit.runs import cpu_layout, largest_batch, preparation
    from sbkit.train.distributed import ranks

    keys = config.keys()
    measured_before = ranks.run_on_main(largest_batch.earlier_result, keys, config.command)
    if measured_before is not None:
        config = config.deciding_batch_size(measured_before)
        keys = config.keys()
    _refuse_options(keys, config.run_opts)

    ranks.run_on_main(preparation.open_folder, config)
    recipe_in_folder = config
    config = config.deciding(ranks.run_on_main(preparation.prepare, config, guard, bundles))
    config = dataclasses.replace(config, cpu=cpu_layout.choose(config))
    if keys.batching.auto:  # last, because what the corpus decides sizes the model, and with it what fits
        config = config.deciding_batch_size(largest_batch.measure(config))
    if config.tree is not recipe_in_folder.tree:
        ranks.run_on_main(preparation.save_recipe, config)
    return config


def _train(config: RunConfig, guard: StartGuard, bundles: Bundles) -> None:
    """Build the run that is decided, and train, test and report, unless it has done all that already."""
    from sbkit.runs import old_set, pretrained, results, training
    from sbkit.train.distributed import ranks

    recipe = config.build()
    keys = recipe.keys
    command = config.command
    test_only = config.run_opts.test_only
    if command.check:
        ranks.run_on_main(training.before_training, recipe, config.path)

    finished = ranks.run_on_main(results.finished, keys, command, guard)
    if finished and not test_only:
        if ranks.is_main():
            print(finished)
        return
    results_folder = ranks.run_on_main(results.open_test, keys, command, guard, finished)
    corpus = keys.corpus
    manifests = corpus.load()
    pretrained.load(keys.pretrainer, _filled_elsewhere(recipe))

    brain = training.fit_and_test(recipe, config, manifests, guard, bundles, results_folder)

    ranks.run_on_main(results.show, brain.tested, results_folder, manifests["test"], corpus.left_out("test"),
                      brain.metrics_log)
    if (finished or not test_only) and not brain.tested.unread:  # --test_only does not complete a run
        ranks.run_on_main(results.mark_finished, keys, command, brain.tested)
    if results_folder == keys.folder:
        old_set.compare(brain, config.device)


def _refuse_foreign_folder(keys: TaskKeys) -> None:
    """Refuse an output folder that is a bundle, and checkpoints that would go into another run's folder."""
    from sbkit.recipe.files import refuse_another_run
    from sbkit.score.run_files import BUNDLE

    refuse_another_run(keys.checkpointer.checkpoints_dir, keys.folder)
    if (keys.folder / BUNDLE).is_file():
        raise SbkitError("output-exists", f"{keys.folder} is a bundle, which a run would overwrite",
                         hint="choose another --output_folder", file=keys.folder)


def _refuse_options(keys: TaskKeys, options: RunOptions) -> None:
    """Refuse a test without a checkpoint, and a trial run in the folder of one that has trained."""
    from sbkit.runs import initial

    if options.test_only and (options.debug or initial.fresh(keys)):
        raise SbkitError("no-checkpoint",
                         f"--test_only: {keys.checkpointer.checkpoints_dir} has no checkpoint to test",
                         hint="--debug keeps checkpoints in a temporary folder: leave it out" if options.debug
                         else "train first, or name the folder of a run with --output_folder",
                         file=keys.checkpointer.checkpoints_dir)
    if options.debug and not (options.debug_persistently or initial.fresh(keys)):
        raise SbkitError("output-exists",
                         f"--debug would replace the results in {keys.folder}",
                         hint="name another --output_folder",
                         file=keys.folder)


def _filled_elsewhere(recipe: Recipe) -> set[int]:
    """The ids of the tensors that come from a checkpoint of this run, or from ``init_from`` in a new one."""
    from sbkit.runs import initial, pretrained
    from sbkit.train.distributed import ranks

    if ranks.run_on_main(initial.fresh, recipe.keys):
        return initial.filled(recipe)
    return pretrained.saved_ids(recipe.keys.checkpointer.recoverables.values())
