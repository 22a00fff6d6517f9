"""``sbkit train`` in each process: prepares or resumes a run, fits, tests and reports.

Heavy modules are imported in functions, so that signals are handled from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.errors import SbkitError
from sbkit.system import console, disk, memory
from sbkit.system.environment import check_torch
from sbkit.train.distributed import ending

if TYPE_CHECKING:
    import torch

    from sbkit.recipe.arguments import CommandLine
    from sbkit.recipe.load import Recipe
    from sbkit.runs.keys import Bundles
    from sbkit.runs.start_guard import StartGuard


def run(words: list[str], open_bundles: Callable[[], Bundles]) -> int:
    """Train or resume and return the exit code.

    open_bundles : returns a BundleLoader, which opens bundles of other models
    """
    console.outlast_terminal()
    ending.watch_launcher()
    check_torch()
    memory.reserve_little()
    from sbkit.recipe import arguments, load
    from sbkit.train import device as devices
    from sbkit.train.signals import end_by_signals

    request = arguments.parse(words)
    if not request.check:  # the check reports these, too; loading does so again, but only after torch is imported
        load.check_overrides(request.path, request.overrides)
    device = devices.resolve(request.run_opts.device)
    if device.type == "cpu":
        memory.keep_freed_memory()
    with end_by_signals():
        _run(request, device, open_bundles())
    return 0


def _run(command: CommandLine, device: torch.device, bundles: Bundles) -> None:
    from sbkit.recipe import load
    from sbkit.recipe.files import refuse_another_run
    from sbkit.runs import same_start, training
    from sbkit.runs.lock import RunLock
    from sbkit.runs.start_guard import StartGuard
    from sbkit.score.run_files import BUNDLE
    from sbkit.train.distributed import ranks
    from sbkit.train.memory import oom

    ranks.init(device, command.run_opts.distributed_backend)
    try:
        with ranks.failing_together(), oom.oom_as_user_error(device):
            same_start.require(command)
            tree = ranks.run_on_main(training.before_run, command) if command.check else None
            recipe = load.open_recipe(command.path, command.overrides, tree)
            folder = Path(recipe.keys.folder)
            refuse_another_run(recipe.keys.checkpointer.checkpoints_dir, folder)
            if (folder / BUNDLE).is_file():
                raise SbkitError(f"{folder} is a bundle, which a run would overwrite",
                                 hint="choose another --output_folder")
            with disk.disk_errors_as_user_error(folder), RunLock(folder), StartGuard(folder, ranks.is_main()) as guard:
                _train(recipe, command, device, guard, bundles)
    finally:
        ranks.shutdown()


def _train(recipe: Recipe, request: CommandLine, device: torch.device, guard: StartGuard, bundles: Bundles) -> None:
    from sbkit.recipe import load
    from sbkit.runs import initial, largest_batch, old_set, preparation, pretrained, results, training
    from sbkit.train.distributed import ranks

    if kept := ranks.run_on_main(largest_batch.kept, recipe.keys, request):
        largest_batch.give(request, kept)
        recipe = load.open_recipe(request.path, request.overrides)
    folder, test_only = recipe.keys.folder, request.run_opts.test_only
    if test_only and (request.run_opts.debug or initial.fresh(recipe.keys)):
        raise SbkitError(f"--test_only: {recipe.keys.checkpointer.checkpoints_dir} has no checkpoint to test",
                         hint="--debug keeps checkpoints in a temporary folder: leave it out" if request.run_opts.debug
                         else "train first, or name the folder of a run with --output_folder")
    if request.run_opts.debug and not (request.run_opts.debug_persistently or initial.fresh(recipe.keys)):
        raise SbkitError(f"--debug would replace the results in {folder}", hint="name another --output_folder")
    ranks.run_on_main(preparation.open_folder, recipe, request)
    ranks.run_on_main(initial.open_source, recipe.keys, guard.changed())
    # Before the corpus is prepared, so that missing files are reported at once.
    pretrained.fetch(recipe.keys.pretrainer, _filled_elsewhere(recipe))
    from_corpus = ranks.run_on_main(preparation.prepare_data, recipe, request.overrides, bundles)
    # Keys that only the prepared corpus knows, such as the number of its characters, size the model, and with it what
    # fits. The objects that prepared the corpus are dropped, and the recipe is built again, as each later start does.
    request.overrides.update({key: value for key, value in from_corpus.items() if key in recipe.hparams})
    if recipe.keys.batching.auto:
        largest_batch.give(request, largest_batch.measure(recipe, request, device))
    if from_corpus or recipe.keys.batching.auto:
        recipe = load.open_recipe(request.path, request.overrides)
        ranks.run_on_main(preparation.save_recipe, recipe, request)
    if request.check:
        ranks.run_on_main(training.before_training, recipe, request.path)
    done = ranks.run_on_main(results.finished, recipe.keys, request, guard)
    if done and not test_only:
        if ranks.is_main():
            print(done)
        return
    results_folder = ranks.run_on_main(results.open_test, recipe.keys, request, guard, done)
    corpus = recipe.keys.corpus
    manifests = corpus.load()
    pretrained.load(recipe.keys.pretrainer, _filled_elsewhere(recipe))
    brain = training.fit_and_test(recipe, request, device, manifests, guard, bundles, results_folder)
    ranks.run_on_main(results.show, brain.tested, results_folder, manifests["test"], corpus.left_out("test"),
                      brain.metrics_log)
    if (done or not test_only) and not brain.tested.unread:  # --test_only does not complete a run
        ranks.run_on_main(results.mark_finished, recipe.keys, request, brain.tested)
    if results_folder == folder:
        old_set.compare(brain, device)


def _filled_elsewhere(recipe: Recipe) -> set[int]:
    """The ids of the tensors that come from a checkpoint of this run, or from ``init_from`` in a new one."""
    from sbkit.runs import initial, pretrained
    from sbkit.train.distributed import ranks

    if ranks.run_on_main(initial.fresh, recipe.keys):
        return initial.filled(recipe)
    return pretrained.saved_ids(recipe.keys.checkpointer.recoverables.values())
