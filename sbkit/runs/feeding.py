"""What a device gets in training: batches of few shapes, workers that keep up, and how much arithmetic that is."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from speechbrain.processing.features import InputNormalization
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sbkit.compat.brain import Brain
from sbkit.data import rate
from sbkit.data.loader import TrainLoader
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Plan
from sbkit.data.reader import SupportsEncode
from sbkit.errors import SbkitError
from sbkit.recipe import flops
from sbkit.recipe.cost import update_bytes
from sbkit.recipe.speed import LAUNCH_MS, Utilisation, least_step_seconds, limits_of, peak_of
from sbkit.system.console import counted
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)
Task = Any  # an object of sbkit.tasks.task.Task, which this package can't import

#: Shapes that need more than this many times the padded seconds aren't used by default.
MAX_PADDED = 1.25


def pad_to_shapes(brain: Task, plan: Plan, device: torch.device, train: Manifest,
                  tokenizer: SupportsEncode | None) -> None:
    """Let the plan pad micro-batches to few shapes, if the recipe asks for it, or captures its steps."""
    requested = plan.batching.pad_to_shapes
    if requested is False:
        return
    # By default only where it pays: captured steps need a graph for each shape.
    captured = device.type == "cuda" and brain.captures_steps
    if requested is None and (not captured or plan.batching.clips_per):
        return
    reason = why_not_padded(brain)
    if reason is not None and requested:
        raise SbkitError("cannot-pad-to-shapes", f"batching: pad_to_shapes: {reason}", hint="leave it out",
                         key="batching")
    if reason is not None:
        if ranks.is_main():
            logger.info("Micro-batches aren't padded to few shapes: %s", reason)
        return
    world = ranks.world_size()
    before = plan.padded_seconds(world)
    # All ranks must find the same, however a tokenizer counts.
    plan.pad_to_shapes(None if tokenizer is None else ranks.run_on_main(
        lambda: np.fromiter((len(tokenizer.encode(text)) for text in train.texts), np.int64, len(train))))
    growth = plan.padded_seconds(world) / before
    shapes = plan.shapes(world)
    padded = growth <= MAX_PADDED or requested
    if not padded:  # a corpus of few steps, whose buckets are wide
        plan.pad_to_shapes(None, False)
    if ranks.is_main() and shapes is not None:
        utterances, seconds, tokens = map(max, zip(*shapes.of_bucket, strict=True))
        logger.info("Micro-batches are %s to %s, of up to %d utterances, %.1f s and %d tokens each: %.0f %% more to "
                    "compute", "padded" if padded else "not padded",
                    counted(len(set(shapes.of_bucket)), "shape"), utterances, seconds, tokens, 100 * (growth - 1))


def why_not_padded(brain: Task) -> str | None:
    """Return why micro-batches can't be padded with rows that aren't utterances; None if they can."""
    # A class with a loss of its own says it anew, whatever the class says that it derives from.
    says_it = {"counts_real_rows", "compute_objectives"}
    owner = next(cls for cls in type(brain).__mro__ if says_it & vars(cls).keys())
    if not vars(owner).get("counts_real_rows"):
        return f"{owner.__name__} doesn't have counts_real_rows = True: its loss may count such rows"

    brain.modules.train()
    for name, layer in brain.modules.named_modules():
        if _normalises_over_rows(layer):
            return f"{name} ({type(layer).__name__}) normalises over the rows of a batch"
    return None


def _normalises_over_rows(layer: nn.Module) -> bool:
    if isinstance(layer, _BatchNorm):
        return layer.training
    if isinstance(layer, InputNormalization):
        by_utterance = layer.norm_type == "sentence"
        leaves_padding_out = layer.norm_type == "global" and hasattr(layer, "counting")
        return not (by_utterance or leaves_padding_out)
    return False


def warn_of_slow_reading(brain: Brain, train_set: TrainLoader, device: torch.device) -> None:
    """Say what to do if the data workers read less than the device could train on, as ``sbkit check`` does."""
    manifest = train_set.reader.manifest
    batching = train_set.plan.batching
    limits = limits_of(device, brain.precision)
    if limits is None or not train_set.workers or not len(manifest):
        return
    seconds = flops.typical_seconds(manifest.durations)
    utterances = max(batching.min_batch_utterances, int(batching.max_batch_seconds / seconds))
    try:
        kernels = flops.run(brain, utterances, seconds, flops.FlopCounter).kernels
    except Exception as error:  # any layer may have its own; without a count there is no advice
        logger.debug("Kernels can't be counted, so slow reading is not looked for: %s", error)
        return
    audio = batching.update_seconds / train_set.world
    step_seconds = least_step_seconds(
        audio / (utterances * seconds), flops.least_seconds(kernels, limits),
        0.0 if brain.captures_steps else len(kernels) * LAUNCH_MS / 1000, update_bytes(brain) / limits.bytes)
    advice = rate.measure(train_set.reader).advice(train_set.workers, audio / step_seconds, train_set.world)
    if advice is not None:
        logger.warning("%s: %s", *advice)


def utilisation(brain: Brain, device: torch.device, manifest: Manifest) -> Utilisation | None:
    """The FLOPs per second of this corpus in training, and the device's peak; None if unknown."""
    shares: list[str] = []  # of the layers in the FLOPs, in words
    try:
        operations = flops.operations_per_second(brain, flops.typical_seconds(manifest.durations), shares)
    except Exception as error:  # tensors on the meta device may not support an operation
        logger.info("Model FLOPs can't be counted, so utilisation is not reported: %s: %s", type(error).__name__, error)
        return None
    result = Utilisation(operations, *peak_of(device, brain.precision))
    for line in (f"Model FLOPs: {result}", *shares):
        logger.info("%s", line)
    return result
