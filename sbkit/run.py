"""One run from a recipe: load, prepare, fit, evaluate; each stage is another room's work."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from sbkit import runs
from sbkit.errors import SbkitError
from sbkit.system import disk
from sbkit.system.environment import check_torch_pair, command, describe, inventory
from sbkit.train.distributed import launcher
from sbkit.train.memory import host

logger = logging.getLogger(__name__)

LOG_CONFIG = Path(runs.__file__).with_name("log-config.yaml")
#: What a recipe must define for the stages below.
NEEDED = ("brain", "modules", "output_folder", "corpus", "tokenizer", "output_neurons", "batching", "epoch_counter")


def train(argv: list[str]) -> int:
    """``sbkit train RECIPE.yaml [--key value ...]``; returns the exit code."""
    launcher.watch()
    check_torch_pair()
    host.reserve_little()
    from sbkit.recipe import arguments, load
    from sbkit.train import device as devices
    from sbkit.train.signals import EndSignals

    request = arguments.parse(argv)
    if not request.check:  # which tells it together with all else
        load.check_overrides(request.path, request.overrides)
    device = devices.resolve(request.run_opts.device)
    if device.type == "cpu":
        host.keep_freed_memory()
    with EndSignals():
        _run(request, device)
    return 0


def _run(request: Any, device: Any) -> None:
    from sbkit import preflight
    from sbkit.recipe import load
    from sbkit.runs.lock import RunLock
    from sbkit.runs.start_guard import StartGuard
    from sbkit.train.distributed import ranks
    from sbkit.train.memory import oom

    ranks.init(device, request.run_opts.distributed_backend)
    try:
        with ranks.failing_together(), oom.told(device):
            if request.check:
                ranks.run_on_main(preflight.before_run, request, NEEDED)
            hparams = load.load(request.path, request.overrides)
            load.require(hparams, request.path, *NEEDED)
            folder = Path(hparams["output_folder"])
            with disk.told(folder), RunLock(folder), StartGuard(folder, ranks.is_main()) as kept:
                _train(hparams, request, device, kept)
    finally:
        ranks.shutdown()


def _train(hparams: dict[str, Any], request: Any, device: Any, kept: Any) -> None:
    from sbkit import preflight
    from sbkit.recipe import load
    from sbkit.runs import completion
    from sbkit.train.distributed import ranks

    ranks.run_on_main(_open_folder, hparams, request)
    follows = ranks.run_on_main(prepare_data, hparams, request.overrides)
    if follows:
        request.overrides.update(follows)
        hparams = load.load(request.path, request.overrides)
        ranks.run_on_main(_open_folder, hparams, request)
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
    brain = _fit_and_test(hparams, request, device, manifests, kept)
    ranks.run_on_main(_show, brain, Path(hparams["output_folder"]), manifests["test"],
                      hparams["corpus"].left_out("test"))
    if (done or not test_only) and not brain.test_unread:  # a test alone does not make a run done
        ranks.run_on_main(completion.keep, hparams, request,
                          {"WER": brain.test_words.rate, "CER": brain.test_characters.rate})


def check(argv: list[str]) -> int:
    """``sbkit check RECIPE.yaml [--key value ...]``: all that is wrong with a recipe; returns 1 if anything is."""
    check_torch_pair()
    from sbkit import preflight

    return preflight.check(argv, NEEDED)


def tune(argv: list[str]) -> int:
    """``sbkit tune RECIPE.yaml [--key value ...]``: the largest batch that fits; returns the exit code."""
    check_torch_pair()
    from sbkit.tune import tune as find

    return find(argv)


def prepare(argv: list[str]) -> int:
    """``sbkit prepare RECIPE.yaml [--key value ...]``: manifests and tokenizer, and the table of what was left out."""
    check_torch_pair()
    host.reserve_little()
    from sbkit.recipe import arguments, load
    from sbkit.runs.lock import RunLock
    from sbkit.runs.start_guard import put_back
    from sbkit.train.memory import oom
    from sbkit.train.signals import EndSignals

    request = arguments.parse(argv)
    with EndSignals(), oom.told("cpu", hint=oom.BOUND_HINT):
        hparams = load.load(request.path, request.overrides)
        load.require(hparams, request.path, "corpus", "tokenizer")
        folder = hparams.get("output_folder")
        with RunLock(Path(folder), runs=False) if folder else contextlib.nullcontext():
            if folder:
                put_back(Path(folder))
            prepare_data(hparams, request.overrides)
    return 0


def _open_folder(hparams: dict[str, Any], request: Any) -> None:
    """The run's folder with the resolved recipe, the log and what it runs on."""
    from speechbrain.core import create_experiment_directory

    folder = hparams["output_folder"]
    try:
        with disk.told(folder):
            _save_recipe(Path(folder), request)
            create_experiment_directory(
                folder, log_config=request.run_opts.log_config or str(LOG_CONFIG), save_env_desc=False)
            Path(folder, "env.log").write_text(inventory(), encoding="utf-8")
    except OSError as error:
        raise SbkitError(f"cannot write into {folder}: {error.strerror}",
                         hint="choose another place with --output_folder") from error


def _save_recipe(folder: Path, request: Any) -> None:
    """The resolved recipe, with the head and under the name that SpeechBrain gives it."""
    from sbkit.recipe import load
    from sbkit.score.report.data import RECIPE

    folder.mkdir(parents=True, exist_ok=True)
    head = f"# Generated {date.today()} from:\n# {os.path.abspath(request.path)}\n# yamllint disable\n"
    (folder / RECIPE).write_text(head + load.merged(request.path, request.overrides), encoding="utf-8")


def prepare_data(hparams: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Manifests and the tokenizer, once, by one rank; the others read what it wrote.

    Gives the overrides that follow from the text: how many characters there are is nothing that a recipe, whose
    number is right for one corpus only, can know. A number given on the command line is meant.
    """
    corpus, tokenizer = hparams["corpus"], hparams["tokenizer"]
    manifests = corpus.prepare(needed=("train", "dev", "test"))
    print(corpus.summary(), file=sys.stderr)
    said, follows = hparams.get("output_neurons"), {}
    if "output_neurons" not in overrides and said is not None and said == tokenizer.vocab_size:
        size = tokenizer.follow(manifests["train"].texts)
        if size is not None:
            print(f"output_neurons: {size}, what the characters of this corpus need (the recipe says {said})",
                  file=sys.stderr)
            follows["output_neurons"] = size
    tokenizer.prepare(manifests["train"].texts)
    for split in ("train", "dev", "test"):
        alien = tokenizer.coverage(manifests[split].texts)
        if alien:
            listed = ", ".join(f"{char!r} x {times}" for char, times in alien.most_common(10))
            logger.warning("The tokenizer cannot express %d characters of %s: %s", alien.total(), split, listed)
    return follows


def _fit_and_test(hparams: dict[str, Any], request: Any, device: Any, manifests: dict[str, Any], kept: Any) -> Any:
    from sbkit.data.loader import EvalLoader, TrainLoader
    from sbkit.data.plan import Plan
    from sbkit.train.distributed import ranks

    tokenizer = hparams["tokenizer"].load()
    tokenizer.check(hparams["output_neurons"])
    operations = _operations(hparams, manifests["train"].durations)
    brain = hparams["brain"](
        modules=hparams["modules"], opt_class=hparams.get("opt_class"), hparams=hparams,
        run_opts=request.run_opts, checkpointer=hparams.get("checkpointer"),
    )
    brain.utilisation = _utilisation(operations, device, brain.precision)
    _write_down(brain, device)
    batching = hparams["batching"]
    reading = {
        "rank": ranks.rank(), "world": ranks.world_size(), "workers": hparams.get("num_workers", 2),
        "pin_memory": device.type == "cuda",
    }
    augment = hparams.get("augment")
    longest = augment.stretch if augment is not None else 1.0  # speed perturbation makes some utterances longer
    epochs = hparams["epoch_counter"].limit
    plan = Plan(manifests["train"].durations * longest, batching, ids=manifests["train"].ids, epochs=epochs,
                round_seconds=batching.rounding(device.type, brain.compile))
    steps = len(plan) * epochs
    if plan.passes > 1 and ranks.is_main():
        logger.info("The corpus has %d steps: an epoch goes through it %d times, and the run has %d (least_steps: %d)",
                    len(plan) // plan.passes, plan.passes, steps, batching.least_steps)
    train_set = TrainLoader(
        manifests["train"], tokenizer, plan, min_micros=brain.grad_accumulation_factor, augment=augment, **reading,
    )
    valid_set, test_set = (
        EvalLoader(manifests[split], tokenizer, max_batch_seconds=batching.max_batch_seconds, **reading)
        for split in ("dev", "test")
    )
    if "schedule" in hparams:
        hparams["schedule"].total_steps = steps
    if hasattr(brain, "hearing"):  # a recogniser
        brain.hearing.chance, brain.alarm.planned = tokenizer.entropy(manifests["train"].texts), steps
    if request.run_opts.test_only and not brain.checkpointer.list_checkpoints():
        raise SbkitError(f"--test_only: {brain.checkpointer.checkpoints_dir} holds no checkpoint to test",
                         hint="train first, or name the folder of a run with --output_folder")
    with train_set, valid_set:
        resumed = brain.checkpointer is not None and bool(brain.checkpointer.list_checkpoints())
        brain.fit(_from_here_on(kept, hparams["epoch_counter"], resumed), train_set, valid_set)
    with test_set:
        brain.evaluate(test_set, min_key="WER")
    return brain


def _from_here_on(kept: Any, epochs: Iterable[int], resumed: bool) -> Iterator[int]:
    """The first epoch is asked for once the newest checkpoint was found to fit."""
    changes = kept.changes()
    if resumed and changes:
        logger.warning("This run goes on with other values than it had: %s", "; ".join(changes))
    kept.begins()
    yield from epochs


def _operations(hparams: dict[str, Any], durations: Any) -> float | None:
    """What a second of this corpus's audio takes in training, of modules that no Brain has moved to a device yet."""
    from sbkit.recipe import flops
    from sbkit.train.distributed import ranks

    if not ranks.is_main() or not flops.countable(hparams):
        return None
    try:
        return flops.operations_per_second(hparams, flops.typical_seconds(durations))
    except Exception as error:  # an operation that stand-ins don't know: training itself may well know it
        logger.info("Model FLOPs can't be counted, so no utilisation is told: %s: %s", type(error).__name__, error)
        return None


def _utilisation(operations: float | None, device: Any, precision: str) -> Any:
    from sbkit.recipe.speed import peak_of
    from sbkit.train.monitor.utilisation import Utilisation

    if operations is None:
        return None
    found = Utilisation(operations, *peak_of(device, precision))
    logger.info("Model FLOPs: %s", found)
    return found


def _write_down(brain: Any, device: Any) -> None:
    """How the run was started and on what, for its report."""
    from sbkit.train.distributed import ranks

    if brain.metrics_log is not None:
        parameters = sum(parameter.numel() for parameter in brain.modules.parameters())
        brain.metrics_log.write(
            "run", command=command(), folder=os.getcwd(), devices=ranks.world_size(), device=str(device),
            precision=brain.precision, parameters=parameters, environment=describe(),
        )


def _show(brain: Any, folder: Path, manifest: Any, left_out: str | None) -> None:
    """What came out: the rates with their interval, one utterance to look at, and where the rest is."""
    from sbkit.score import utterances
    from sbkit.score.report.data import HEARD
    from sbkit.score.significance import interval
    from sbkit.tasks.asr import tell_unread

    words, characters = brain.test_words, brain.test_characters
    words.write(folder / "wer_test.txt")
    characters.write(folder / "cer_test.txt")
    utterances.write(folder / HEARD, utterances.join(brain.test_rows, manifest))
    low, high = interval(words)
    example = next(iter(words))
    print(f"\n{example.id}\n  reference   {' '.join(example.reference)}\n  hypothesis  {' '.join(example.hypothesis)}")
    print(f"\ntest WER {words.rate:.2f} % (95 % interval {low:.2f} to {high:.2f}), CER {characters.rate:.2f} %, "
          f"{len(words)} utterances")
    if left_out is not None:
        print(left_out)
    if brain.test_unread:
        print(tell_unread("test", brain.test_unread, len(brain.test_rows)))
    print(f"every alignment: {folder / 'wer_test.txt'}")
    _report(brain, folder, manifest)


def _report(brain: Any, folder: Path, manifest: Any) -> None:
    """The page about the run. What it is made from is safe by now, so that it cannot fail the run."""
    from sbkit.score.report import write_report

    if brain.metrics_log is not None:
        brain.metrics_log.flush()
    try:
        print(f"what it gets wrong, to look at and to hear: {write_report(folder, remote=manifest.remote)}", flush=True)
    except (SbkitError, OSError) as error:
        logger.warning("The report could not be made: %s", error)
