"""One run from a recipe: load, prepare, fit, evaluate; each stage is another room's work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sbkit.environment import check_torch_pair
from sbkit.errors import SbkitError


def train(argv: list[str]) -> int:
    """``sbkit train RECIPE.yaml [--key value ...]``; returns the exit code."""
    check_torch_pair()
    from sbkit.recipe import arguments, load
    from sbkit.train import device as devices
    from sbkit.train import ranks

    request = arguments.parse(argv)
    device = devices.resolve(request.run_opts.device)
    ranks.init(device, request.run_opts.distributed_backend)
    try:
        hparams = load.load(request.path, request.overrides)
        load.require(hparams, request.path, "brain", "modules", "output_folder", "corpus", "tokenizer", "batching")
        ranks.run_on_main(_open_folder, hparams, request)
        manifests = ranks.run_on_main(_prepare, hparams)
        _fit_and_score(hparams, request, device, manifests)
    finally:
        ranks.shutdown()
    return 0


def _open_folder(hparams: dict[str, Any], request: Any) -> None:
    """The run's folder with the resolved recipe, the log and what it runs on."""
    from speechbrain.core import create_experiment_directory

    try:
        create_experiment_directory(
            hparams["output_folder"], hyperparams_to_save=str(request.path), overrides=request.overrides
        )
    except OSError as error:
        raise SbkitError(f"cannot write into {hparams['output_folder']}: {error.strerror}",
                         hint="choose another place with --output_folder") from error


def _prepare(hparams: dict[str, Any]) -> dict[str, Any]:
    """Manifests and the tokenizer, once."""
    corpus, tokenizer = hparams["corpus"], hparams["tokenizer"]
    manifests = corpus.prepare()
    print(corpus.summary())
    tokenizer.prepare(manifests["train"].texts)
    return manifests


def _fit_and_score(hparams: dict[str, Any], request: Any, device: Any, manifests: dict[str, Any]) -> None:
    from sbkit.data.loader import EvalLoader, TrainLoader
    from sbkit.data.plan import Plan
    from sbkit.train import ranks

    tokenizer = hparams["tokenizer"].load()
    tokenizer.check(hparams["output_neurons"])
    brain = hparams["brain"](
        modules=hparams["modules"], opt_class=hparams.get("opt_class"), hparams=hparams,
        run_opts=request.run_opts, checkpointer=hparams.get("checkpointer"),
    )
    where = {"rank": ranks.rank(), "world": ranks.world_size(), "pin_memory": device.type == "cuda"}
    plan = Plan(manifests["train"].durations, hparams["batching"], ids=manifests["train"].ids)
    train_set = TrainLoader(
        manifests["train"], tokenizer, plan, min_micros=brain.grad_accumulation_factor,
        augment=hparams.get("augment"), workers=hparams.get("num_workers", 2), **where,
    )
    evaluated = {"max_batch_seconds": hparams["batching"].max_batch_seconds, "workers": hparams.get("num_workers", 2)}
    valid_set, test_set = (
        EvalLoader(manifests[split], tokenizer, **evaluated, **where) for split in ("dev", "test")
    )
    if "schedule" in hparams:
        hparams["schedule"].total_steps = train_set.steps(1) * hparams["epoch_counter"].limit
    with train_set, valid_set, test_set:
        brain.fit(hparams["epoch_counter"], train_set, valid_set)
        brain.evaluate(test_set, min_key="WER")
    if ranks.is_main():
        _show(brain, Path(hparams["output_folder"]))


def _show(brain: Any, folder: Path) -> None:
    from sbkit.tasks.asr import write_transcripts

    write_transcripts(brain.test_rows, folder / "transcripts_test.tsv")
    worst = brain.test_rows[0]
    print(f"reference   {worst.reference}\nhypothesis  {worst.hypothesis}")
    print(f"test WER {brain.test_stats['WER']:.2f} %  CER {brain.test_stats['CER']:.2f} %  ({folder})", file=sys.stdout)


