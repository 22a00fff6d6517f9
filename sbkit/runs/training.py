"""A prepared run as its Brain goes through it: loaders from the plan, fit, and the test of what came out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

from sbkit.errors import SbkitError
from sbkit.system.environment import command, describe

logger = logging.getLogger(__name__)


def fit_and_test(hparams: dict[str, Any], request: Any, device: Any, manifests: dict[str, Any], guard: Any) -> Any:
    """Train what is missing, then test; the Brain, which has the results."""
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
        brain.fit(_from_here_on(guard, hparams["epoch_counter"], resumed), train_set, valid_set)
    with test_set:
        brain.evaluate(test_set, min_key="WER")
    return brain


def _from_here_on(guard: Any, epochs: Iterable[int], resumed: bool) -> Iterator[int]:
    """The first epoch is asked for once the newest checkpoint was found to fit."""
    changes = guard.changes()
    if resumed and changes:
        logger.warning("This run goes on with other values than it had: %s", "; ".join(changes))
    guard.begins()
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
