"""Checks that a recogniser that trains in chunks sees no further than a chunk, and can be exported for streams."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.nn.streaming import requirements
from sbkit.nn.streaming.requirements import Lack
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings, Node, Place
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.recognizer import Recognizer

#: What frames are computed of and what follows them, in seconds; the first is compared but for its last tenth, which a
#: window around each frame may reach.
_BEFORE, _AFTER, _WINDOW = 1.0, 1.0, 0.1
#: How much louder the second is: more decibels than SpeechBrain's Fbank leaves below the maximum of an utterance.
_LOUDER = 1e5
#: Positions that depend on distances only: whole utterances can be heard in chunks.
_POSITIONS = "RoPEMHA", "RelPosMHAXL"


@torch.no_grad()
def sees_no_further(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Report which parts of a recipe with ``chunks`` look further ahead than a chunk; returns whether none does.

    Parts that don't, but for which a stream has no step, get a warning: such a model learns, transcribes and is
    evaluated in chunks, and its bundle is for whole recordings alone. Frames that are ``ahead`` need that step.
    """
    if keys.chunks is None:
        return True
    fits = {"encoder": _encoder(keys, built, findings), "compute_features": _features(keys, built, findings),
            "normalize": _normalization(keys, built, findings), "frontend": check_front_end(keys, built, findings)}
    model = Recognizer.of(keys)
    stepless = set(requirements.of_step(model)) if keys.chunks.ahead else set()
    for lack in requirements.of_stream(model):
        if lack in stepless and fits[lack.part]:
            findings.error("chunks", *_named(built.nodes["chunks"], "ahead"), "lookahead frames need a model that runs "
                           f"step by step on a stream: {lack.reason}",
                           f"use {lack.instead}, or write ahead: 0")
        elif fits[lack.part]:
            _warn(lack, keys, built, findings)
    return all(fits.values()) and not stepless


def _encoder(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    node, encoder = built.nodes[keys.encoder_key], getattr(keys, keys.encoder_key)
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


def _features(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    model = Recognizer.of(keys)
    model.normalize = None
    if keys.compute_features is None or _same_before(lambda signals: _computed(model.features, signals), keys):
        return True
    _refuse(findings, built.nodes["compute_features"], "", "the features of a frame depend on how loud later audio is",
            "use sbkit.nn.kaldi.FilterBank")
    return False


def _normalization(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    if keys.normalize is None or keys.compute_features is None:
        return True
    model = Recognizer.of(keys)
    model.normalize = copy.deepcopy(keys.normalize)
    try:
        _computed(model.features, torch.randn(1, round(_BEFORE * keys.sample_rate)))  # for running statistics
        model.normalize.eval()
        if _same_before(lambda signals: _computed(model.features, signals), keys):
            return True
    except SbkitError:  # it waits for statistics of the corpus
        return True
    _refuse(findings, built.nodes["normalize"], "norm_type", "it normalises over the whole utterance, which isn't "
            "known on a stream", "use sbkit.nn.global_norm.GlobalNorm")
    return False


def _computed(features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], signals: Tensor) -> Tensor:
    return features(signals, torch.full((len(signals),), signals.shape[1]))[0]


def _same_before(compute: Callable[[Tensor], Tensor], keys: EncoderKeys) -> bool:
    """Whether frames [1, T, F] of a quiet second are the same before a second that is quiet and one that is loud."""
    before, after = (1e-3 * torch.randn(1, round(seconds * keys.sample_rate)) for seconds in (_BEFORE, _AFTER))
    frames = round((_BEFORE - _WINDOW) * 1000 / keys.hop_length)
    quiet, loud = (compute(torch.cat([before, rest], 1))[:, :frames] for rest in (after, _LOUDER * after))
    return torch.allclose(quiet, loud, rtol=1e-3, atol=1e-3, equal_nan=True)


def check_front_end(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Check that the front end's frames see no features of later ones."""
    if keys.CNN is None or not _sees_later_frames(keys.CNN, keys):
        return True
    _refuse(findings, built.nodes["CNN"], "", "its frames depend on features of later frames, which may be in the next "
            "chunk", "use sbkit.nn.causal.CausalFrontEnd")
    return False


def _sees_later_frames(module: nn.Module, keys: EncoderKeys) -> bool:
    each, frames = Recognizer.of(keys).frontend_rule.factor, 8
    front = copy.deepcopy(module).eval()
    for weights in front.parameters():
        weights.normal_(std=0.1)  # a check leaves them uninitialised
    feats = torch.randn(1, 2 * frames * each, keys.n_mels)
    later = feats.clone()
    later[:, frames * each :] += 1.0
    return not torch.allclose(front(feats)[:, :frames], front(later)[:, :frames], atol=1e-5)


def _refuse(findings: Findings, node: Node, argument: str, message: str, suggestion: str) -> None:
    """Add a finding at an argument of a part, or at the part if it doesn't have that argument."""
    findings.error("chunks", *_named(node, argument), message, f"{suggestion}, or leave chunks out")


def _warn(lack: Lack, keys: EncoderKeys, built: Built, findings: Findings) -> None:
    """Add a finding about a model that learns in chunks, and that can't be exported for streams all the same."""
    key = {"encoder": keys.encoder_key, "frontend": "CNN"}.get(lack.part, lack.part)
    node = built.nodes.get(key) or built.nodes["chunks"]
    findings.warning("chunks", *_named(node, lack.argument), "the model trains in chunks but can't be exported for "
                     f"streams: {lack.reason}", f"use {lack.instead}")


def _named(node: Node, argument: str) -> tuple[Place, str]:
    there = isinstance(node.value, dict) and argument in node.value
    return (node.place_of(argument), node.key_of(argument)) if there else (node.place, node.key)
