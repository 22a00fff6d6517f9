"""Checks of an encoder for joint training and for losses on inner layers, and the outputs of these layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from speechbrain.lobes.models.transformer.Transformer import TransformerInterface
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.recipe.values import static
from sbkit.tasks.ctc.keys import CTCKeys


def stack(encoder: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """Return the part of a transformer that has the list ``layers``, and that list; raises if there is none."""
    for part in (encoder, getattr(encoder, "encoder", None)):
        layers = getattr(part, "layers", None)
        if isinstance(part, nn.Module) and isinstance(layers, nn.ModuleList):
            return part, layers
    raise SbkitError("no-such-part", f"{type(encoder).__name__} has no list of layers", key="intermediate_ctc",
                     hint="intermediate_ctc needs encoder.layers or layers")


@contextmanager
def layer_outputs(encoder: nn.Module, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Context in which a forward of ``encoder`` fills the list with the outputs of ``layers``, each [B, T, D].

    They are normalised like the output of the last layer.

    layers : their numbers, counted from 1
    """
    states: list[Tensor] = []
    if not layers:
        yield states
        return
    inside, stacked = stack(encoder)
    count = len(stacked)
    if not all(1 <= layer < count for layer in layers):
        raise SbkitError("bad-value", f"intermediate_layers is {list(layers)}, but the encoder has {count} layers",
                         key="intermediate_layers", value=list(layers), hint=f"use numbers from 1 to {count - 1}")
    norm = getattr(inside, "norm", None) or nn.Identity()

    def keep(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> None:
        states.append(norm(output[0] if isinstance(output, tuple) else output))

    hooks = [stacked[layer - 1].register_forward_hook(keep) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def has_decoder(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that the encoder has a decoder for joint training."""
    if keys.ctc_weight >= 1:
        return True
    key = keys.encoder_key
    encoder = getattr(keys, key)
    node = built.nodes[key]
    layers = node.value.get("num_decoder_layers") if isinstance(node.value, dict) else None
    parameters = signature(encoder.forward).parameters.values()
    takes_tokens = any(parameter.name == "pad_idx" or parameter.kind == parameter.VAR_KEYWORD
                       for parameter in parameters)
    if not takes_tokens:
        lacks = f"{key} has none: {type(encoder).__name__} takes no tokens"
        hint = "take an encoder with a decoder, such as SpeechBrain's TransformerASR"
    elif isinstance(encoder, TransformerInterface) and layers is not None and static(layers) == 0:
        lacks = f"{key}.num_decoder_layers is 0"
        hint = "give the decoder layers"
    else:
        return True
    findings.error("forward", built.nodes["ctc_weight"].place, "ctc_weight",
                   f"it is {keys.ctc_weight:g}, so an attention decoder trains, but {lacks}",
                   f"write ctc_weight: 1.0, or {hint}")
    return False


def has_inner_layers(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that the encoder has inner layers for ``intermediate_ctc``."""
    encoder = getattr(keys, keys.encoder_key)
    if not keys.intermediate_ctc:
        return True
    try:
        count = len(stack(encoder)[1])
    except SbkitError as error:
        problem = f"but {error.message}"
        hint = "write intermediate_ctc: 0"
    else:
        if keys.intermediate_layers or hasattr(encoder, "encode"):
            return True
        problem = f"but it is unknown which layers of {type(encoder).__name__} return what the head takes"
        hint = f"name them, such as intermediate_layers: [{max(1, count // 2)}], or write intermediate_ctc: 0"
    findings.error("forward", built.nodes["intermediate_ctc"].place, "intermediate_ctc",
                   f"it is {keys.intermediate_ctc:g}, so inner layers of {keys.encoder_key} train with their own loss, "
                   f"{problem}", hint)
    return False
