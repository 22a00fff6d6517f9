"""``sbkit train RECIPE.yaml [--key value ...]``: prepare, fit, test and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sbkit.system import disk
from sbkit.system.environment import check_torch_pair
from sbkit.train.distributed import launcher
from sbkit.train.memory import host

HELP = (
    "Train, test and report. On several devices: torchrun --nproc_per_node=8 train.py RECIPE.yaml ...\n"
    "The same command resumes a run. One run at a time holds an output_folder: a second start is refused."
)


def run(words: list[str]) -> int:
    """Train, or go on; the exit code."""
    launcher.watch()
    check_torch_pair()
    host.reserve_little()
    from sbkit.recipe import arguments, load
    from sbkit.train import device as devices
    from sbkit.train.signals import EndSignals

    request = arguments.parse(words)
    if not request.check:  # which tells it together with all else
        load.check_overrides(request.path, request.overrides)
    device = devices.resolve(request.run_opts.device)
    if device.type == "cpu":
        host.keep_freed_memory()
    with EndSignals():
        _run(request, device)
    return 0


def _run(request: Any, device: Any) -> None:
    from sbkit.recipe import load
    from sbkit.runs import preflight
    from sbkit.runs.lock import RunLock
    from sbkit.runs.start_guard import StartGuard
    from sbkit.train.distributed import ranks
    from sbkit.train.memory import oom

    ranks.init(device, request.run_opts.distributed_backend)
    try:
        with ranks.failing_together(), oom.told(device):
            if request.check:
                ranks.run_on_main(preflight.before_run, request)
            hparams = load.load(request.path, request.overrides)
            load.require(hparams, request.path, *preflight.NEEDED)
            folder = Path(hparams["output_folder"])
            with disk.told(folder), RunLock(folder), StartGuard(folder, ranks.is_main()) as guard:
                _train(hparams, request, device, guard)
    finally:
        ranks.shutdown()


def _train(hparams: dict[str, Any], request: Any, device: Any, guard: Any) -> None:
    from sbkit.recipe import load
    from sbkit.runs import completion, preflight, preparation, training
    from sbkit.tasks import results
    from sbkit.train.distributed import ranks

    ranks.run_on_main(preparation.open_folder, hparams, request)
    follows = ranks.run_on_main(preparation.prepare_data, hparams, request.overrides)
    if follows:
        request.overrides.update(follows)
        hparams = load.load(request.path, request.overrides)
        ranks.run_on_main(preparation.open_folder, hparams, request)
    if request.check:
        ranks.run_on_main(preflight.before_training, hparams)
    done = ranks.run_on_main(completion.done, hparams, request)
    test_only = request.run_opts.test_only
    if done and not test_only:
        if ranks.is_main():
            print(done)
        return
    ranks.run_on_main(completion.forget, hparams)
    manifests = hparams["corpus"].load()
    brain = training.fit_and_test(hparams, request, device, manifests, guard)
    ranks.run_on_main(results.show, brain, Path(hparams["output_folder"]), manifests["test"],
                      hparams["corpus"].left_out("test"))
    if (done or not test_only) and not brain.test_unread:  # a test alone does not make a run done
        ranks.run_on_main(completion.keep, hparams, request,
                          {"WER": brain.test_words.rate, "CER": brain.test_characters.rate})
