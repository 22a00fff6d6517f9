"""Checks that a recogniser with ``chunks`` sees no frames beyond its chunk, and can be exported for streams."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from torch import Tensor

from sbkit.errors import SbkitError
from sbkit.nn.streaming import requirements
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings, Node, Place
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.keys import EncoderKeys

#: Seconds of audio whose features are compared, and of audio after it; the last tenth of the first isn't compared,
#: since the window around its frames may reach into the second.
_BEFORE, _AFTER, _WINDOW = 1.0, 1.0, 0.1
#: How much louder the second is: more decibels than SpeechBrain's Fbank keeps below the maximum of an utterance.
_LOUDER = 1e5
#: Attention with relative positions, which doesn't depend on where an utterance begins.
_POSITIONS = "RoPEMHA", "RelPosMHAXL"


@torch.no_grad()
def chunks_fit(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Report parts of a recipe with ``chunks`` whose outputs depend on frames beyond a chunk; returns whether none do.

    Other parts that can't run step by step get a warning: such a model can be trained and evaluated in chunks, but its
    bundle is for whole recordings only. Lookahead (``ahead``) needs these steps.
    """
    if keys.chunks is None:
        return True
    fits = {"encoder": _encoder(keys, built, findings)}
    model = AcousticModel.of(keys)
    model.normalize = None
    fits["compute_features"] = keys.compute_features is None or _same_before(
        lambda signals: _computed(model.features, signals), keys)
    if not fits["compute_features"]:
        _refuse(findings, built.nodes["compute_features"], "", "the features of a frame depend on how loud later audio "
                "is", "use sbkit.nn.kaldi.FilterBank")
    fits["normalize"] = _normalization(keys, built, findings)
    fits["frontend"] = check_front_end(keys, built, findings)
    model = AcousticModel.of(keys)
    stepless = set(requirements.for_step(model)) if keys.chunks.ahead else set()
    for missing in requirements.for_stream(model):
        if missing in stepless and fits[missing.part]:
            findings.error("chunks", *_location(built.nodes["chunks"], "lookahead"), "lookahead frames need a model "
                           f"that runs step by step on a stream: {missing.reason}",
                           f"use {missing.instead}, or write lookahead: 0")
        elif fits[missing.part]:
            key = {"encoder": keys.encoder_key, "frontend": "CNN"}.get(missing.part, missing.part)
            node = built.nodes.get(key) or built.nodes["chunks"]
            findings.warning("chunks", *_location(node, missing.argument), "the model trains in chunks but can't be "
                             f"exported for streams: {missing.reason}", f"use {missing.instead}")
    return all(fits.values()) and not stepless


def _encoder(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    node = built.nodes[keys.encoder_key]
    encoder = getattr(keys, keys.encoder_key)
    layers = getattr(encoder, "encoder", None)
    if not isinstance(layers, ConformerEncoder):
        _refuse(findings, node, "encoder_module", "chunks need SpeechBrain's Conformer, but the encoder is a "
                f"{type(layers or encoder).__name__}", "write encoder_module: conformer")
    elif encoder.causal:
        _refuse(findings, node, "causal", "a causal encoder sees no later frames, not even in its chunk",
                "write causal: false")
    elif encoder.attention_type not in _POSITIONS:
        _refuse(findings, node, "attention_type", f"{encoder.attention_type} needs to know where an utterance begins "
                "or ends, which is unknown on a stream", "write attention_type: RoPEMHA")
    else:
        return True
    return False


def _normalization(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    if keys.normalize is None or keys.compute_features is None:
        return True
    model = AcousticModel.of(keys)
    model.normalize = copy.deepcopy(keys.normalize)
    try:
        _computed(model.features, torch.randn(1, round(_BEFORE * keys.sample_rate)))  # so it has running statistics
        model.normalize.eval()
        if _same_before(lambda signals: _computed(model.features, signals), keys):
            return True
    except SbkitError:  # the corpus's statistics aren't known yet
        return True
    _refuse(findings, built.nodes["normalize"], "norm_type", "it normalises over the whole utterance, which isn't "
            "known on a stream", "use sbkit.nn.global_norm.GlobalNorm")
    return False


def _computed(features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], signals: Tensor) -> Tensor:
    return features(signals, torch.full((len(signals),), signals.shape[1]))[0]


def _same_before(compute: Callable[[Tensor], Tensor], keys: EncoderKeys) -> bool:
    """Whether frames [1, T, F] of a quiet second are the same before a quiet and before a loud second."""
    before, after = (1e-3 * torch.randn(1, round(seconds * keys.sample_rate)) for seconds in (_BEFORE, _AFTER))
    frames = round((_BEFORE - _WINDOW) * 1000 / keys.hop_length)
    quiet, loud = (compute(torch.cat([before, rest], 1))[:, :frames] for rest in (after, _LOUDER * after))
    return torch.allclose(quiet, loud, rtol=1e-3, atol=1e-3, equal_nan=True)


def check_front_end(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Check that the front end is causal."""
    if keys.CNN is None:
        return True
    factor = AcousticModel.of(keys).frontend_rule.factor
    frames = 8  # that are compared
    front = copy.deepcopy(keys.CNN).eval()
    for weights in front.parameters():
        weights.normal_(std=0.1)  # a check leaves them uninitialised
    feats = torch.randn(1, 2 * frames * factor, keys.n_mels)
    changed_later = feats.clone()
    changed_later[:, frames * factor :] += 1.0
    if torch.allclose(front(feats)[:, :frames], front(changed_later)[:, :frames], atol=1e-5):
        return True
    _refuse(findings, built.nodes["CNN"], "", "its frames depend on features of later frames, which may be in the next "
            "chunk", "use sbkit.nn.causal.CausalFrontEnd")
    return False


def _refuse(findings: Findings, node: Node, argument: str, message: str, suggestion: str) -> None:
    """Add a finding at an argument of a part, or at the part if it doesn't have that argument."""
    findings.error("chunks", *_location(node, argument), message, f"{suggestion}, or leave chunks out")


def _location(node: Node, argument: str) -> tuple[Place, str]:
    there = isinstance(node.value, dict) and argument in node.value
    return (node.place_of(argument), node.key_of(argument)) if there else (node.place, node.key)
