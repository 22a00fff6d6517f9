"""Likely causes of a loss or gradient that is not finite, from the findings of running the batch again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sbkit.train.diagnose.inspection import Inspection, before, tensors_in
from sbkit.train.diagnose.saved_batch import utterance_ids

_NEAR_HALF_MAX = 1e4  # the largest fp16 is 65504, and sums of such values exceed it
_GROWN = 1e6  # activations of a healthy model stay far below


def causes(found: Inspection, batch: object, context: Mapping[str, Any]) -> list[str]:
    """Return what probably happened and what to do, the most certain cause first."""
    ids = utterance_ids(batch)
    told = [
        *_damaged_input(found, ids), *_damaged_model(found), *_silence(batch, ids), *_layer(found),
        *_impossible(found, ids), *_gradient(found, context),
    ]
    if not told and found.what == "nothing":
        return ["it could not be reproduced: the weights have changed since, or an operation is not "
                "deterministic; if it happens again, try --precision fp32 and a lower learning rate"]
    if not told:
        lr = "" if context.get("lr") is None else f" (now {context['lr']:.2g})"
        return [f"training diverged: lower the learning rate{lr}, warm up for longer, or clip gradients"]
    return told


def _damaged_input(found: Inspection, ids: list[str]) -> list[str]:
    return [
        f"the batch itself is damaged: '{name}' holds values that are not finite"
        + (f" in {', '.join(ids[row] for row in values.rows[:4] if row < len(ids))}" if values.rows else "")
        + "; check those recordings"
        for name, values in found.inputs.items()
    ]


def _damaged_model(found: Inspection) -> list[str]:
    if not found.parameters:
        return []
    return [f"parameters are already not finite ({', '.join(list(found.parameters)[:4])}), because of an earlier "
            "update; resume from an older checkpoint with a lower learning rate or gradient clipping"]


def _layer(found: Inspection) -> list[str]:
    layer = found.first_layer
    if layer is None or layer.inputs is None:
        return []
    if layer.inputs.bad:
        return [] if found.inputs else [
            f"an operation between {before(found)} and {layer.name} that is no layer caused it: a division by 0, "
            "a log or root of 0, or a mask that hides everything"]
    largest = max(layer.inputs.largest, layer.output.largest)
    if layer.output.dtype == "float16" and largest > _NEAR_HALF_MAX:
        return [f"fp16 overflow: values reach {largest:.3g}, and the largest fp16 is 65504; use --precision bf16"]
    if largest > _GROWN:
        return [f"activations have grown to {largest:.3g}: lower the learning rate or warm up for longer"]
    return []


def _silence(batch: object, ids: list[str]) -> list[str]:
    for name, tensor in tensors_in(batch):
        if not tensor.is_floating_point() or tensor.dim() != 2 or len(tensor) != len(ids):
            continue
        constant = (tensor == tensor[:, :1]).all(1).nonzero().flatten().tolist()
        if constant and tensor.shape[1] > 1:
            who = ", ".join(ids[row] for row in constant[:4])
            return [f"'{name}' is constant (digital silence) in {who}: a normalisation may divide by its standard "
                    "deviation of 0"]
    return []


def _impossible(found: Inspection, ids: list[str]) -> list[str]:
    infinite = [ids[i] for i, loss in enumerate(found.utterance_losses) if i < len(ids) and loss == math.inf]
    if infinite and found.first_layer is None:
        return [f"the loss of {', '.join(infinite[:4])} is infinite: too few frames for its labels (`sbkit check` "
                "lists such utterances), or a label to which the model gives probability 0"]
    if found.what == "loss" and found.first_layer is None:
        return ["the loss itself breaks on finite outputs: a log or division of 0, a count of 0, or too few "
                "frames for the labels"]
    return []


def _gradient(found: Inspection, context: Mapping[str, Any]) -> list[str]:
    if found.what != "gradient":
        return []
    told = []
    if context.get("scale", 1.0) > 1.0:
        told.append(f"the loss scale of {context['scale']:.6g} is too high for fp16; this is normal at first, since it "
                    "halves by itself; if it continues, use --precision bf16")
    if found.gradient_first is not None:
        told.append(f"after the output of {found.gradient_first} a square root, norm, log or division gets 0: its "
                    "value is finite, but its gradient is not; add a small epsilon there")
    return told

