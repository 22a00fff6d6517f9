"""What a recogniser needs to run on a stream, checked before training and at export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from speechbrain.nnet.attention import RoPEMHA

from sbkit.errors import SbkitError
from sbkit.nn.adapters import HOULSBY
from sbkit.nn.kaldi import FilterBank

AcousticModel = Any  # sbkit.tasks.recognise's, which this package can't import


class Missing(NamedTuple):
    """A requirement that a recogniser doesn't meet."""

    part: str
    """``chunks``, ``encoder``, ``frontend`` or ``compute_features``."""
    reason: str
    """Why that part doesn't run on a stream, as the end of a sentence."""
    instead: str
    """What to use instead."""
    argument: str = ""
    """The part's argument to change."""


def for_step(acoustic_model: AcousticModel) -> Iterator[Missing]:
    """Yield the unmet requirements of ``StreamingEncoder``, a step on features."""
    layers = getattr(acoustic_model.encoder, "encoder", None)
    if acoustic_model.chunks is None:
        yield Missing("chunks", "it wasn't trained in chunks", "chunks, as hparams/streaming.yaml does")
    if not isinstance(layers, ConformerEncoder):
        yield Missing("encoder", f"its encoder is a {type(layers or acoustic_model.encoder).__name__}",
                      "SpeechBrain's Conformer", "encoder_module")
    elif not isinstance(layers.layers[0].mha_layer, RoPEMHA):
        yield Missing("encoder", f"its attention is {layers.attention_type}, but a stream needs rotary positions",
                      "attention_type: RoPEMHA", "attention_type")
    elif _has_outer_adapters(layers):
        yield Missing("encoder", "it has adapters after whole layers, attention or convolution modules, whose forward "
                      "a step doesn't call", "LoRA, or adapters of other parts, such as *.ffn_module1")
    if not hasattr(acoustic_model.frontend, "forward_step"):
        reason = "it has no front end"
        if acoustic_model.frontend is not None:
            reason = f"its front end, {type(acoustic_model.frontend).__name__}, takes whole utterances only"
        yield Missing("frontend", reason, "sbkit.nn.causal.CausalFrontEnd")


def _has_outer_adapters(encoder: ConformerEncoder) -> bool:
    """Whether an encoder has an adapter after a whole layer, or after an attention or convolution module."""
    parts = [encoder]
    for layer in encoder.layers:
        parts += [layer, layer.mha_layer, layer.convolution_module]
    return any(hasattr(part, HOULSBY) for part in parts)


def for_stream(acoustic_model: AcousticModel) -> Iterator[Missing]:
    """Yield the unmet requirements of a stream of samples."""
    yield from for_step(acoustic_model)
    features = acoustic_model.compute_features
    if not isinstance(features, FilterBank):
        reason = "it has no features" if features is None else f"its features come from {type(features).__name__}"
        yield Missing("compute_features", f"{reason}, but a stream needs a FilterBank", "sbkit.nn.kaldi.FilterBank")
    elif features.size < features.hop:
        yield Missing("compute_features", "its features skip samples, because a frame is shorter than the frame shift",
                      "a frame_length of at least frame_shift", "frame_length")


def check(requirements: Iterator[Missing]) -> None:
    """Raise for the first unmet requirement."""
    for missing in requirements:
        raise SbkitError("not-streamable", f"this model can't run on a stream: {missing.reason}",
                         key=missing.argument or missing.part, hint=f"train with {missing.instead}")
