"""Checks that a recogniser that trains in chunks sees no further than a chunk, so that it can run live."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings, Node
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.ctc.model import recognizer

#: What frames are computed of and what follows them, in seconds; the first is compared but for its last tenth, which a
#: window around each frame may reach.
_BEFORE, _AFTER, _WINDOW = 1.0, 1.0, 0.1
#: How much louder the second is: more decibels than SpeechBrain's Fbank leaves below the maximum of an utterance.
_LOUDER = 1e5
#: Positions that depend on distances only.
_POSITIONS = "RoPEMHA", "RelPosMHAXL"


@torch.no_grad()
def sees_no_further(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Report which parts of a recipe with ``chunks`` look further ahead than a chunk; returns whether none does."""
    if keys.chunks is None:
        return True
    fits = [check(keys, built, findings) for check in (_encoder, _features, _normalization, _front_end)]
    return all(fits)


def _encoder(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    node, encoder = built.nodes[keys.encoder_key], getattr(keys, keys.encoder_key)
    layers = getattr(encoder, "encoder", None)
    if not isinstance(layers, ConformerEncoder):
        _refuse(findings, node, "encoder_module", "chunks are for SpeechBrain's Conformer, and its layers are those of "
                f"{type(layers or encoder).__name__}", "write encoder_module: conformer")
    elif encoder.causal:
        _refuse(findings, node, "causal", "a causal encoder sees nothing that follows, not even in its chunk",
                "write causal: false")
    elif encoder.attention_type not in _POSITIONS:
        _refuse(findings, node, "attention_type", f"{encoder.attention_type} needs to know where an utterance begins "
                "or ends, and a live stream has neither", f"write attention_type: {' or '.join(_POSITIONS)}")
    else:
        return True
    return False


def _features(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    model = recognizer(keys)
    model.normalize = None
    if keys.compute_features is None or _same_before(lambda signals: _computed(model.features, signals), keys):
        return True
    _refuse(findings, built.nodes["compute_features"], "", "the features of a moment depend on how loud an utterance "
            "becomes later", "use sbkit.nn.kaldi.FilterBank")
    return False


def _normalization(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    if keys.normalize is None or keys.compute_features is None:
        return True
    model = recognizer(keys)
    model.normalize = copy.deepcopy(keys.normalize)
    try:
        _computed(model.features, torch.randn(1, round(_BEFORE * keys.sample_rate)))  # for running statistics
        model.normalize.eval()
        if _same_before(lambda signals: _computed(model.features, signals), keys):
            return True
    except SbkitError:  # it waits for statistics of the corpus
        return True
    _refuse(findings, built.nodes["normalize"], "norm_type", "it normalises by the whole utterance, of which a live "
            "stream knows the beginning", "use sbkit.nn.global_norm.GlobalNorm")
    return False


def _computed(features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], signals: Tensor) -> Tensor:
    return features(signals, torch.full((len(signals),), signals.shape[1]))[0]


def _same_before(compute: Callable[[Tensor], Tensor], keys: CTCKeys) -> bool:
    """Whether frames [1, T, F] of a quiet second are the same before a second that is quiet and one that is loud."""
    before, after = (1e-3 * torch.randn(1, round(seconds * keys.sample_rate)) for seconds in (_BEFORE, _AFTER))
    frames = round((_BEFORE - _WINDOW) * 1000 / keys.hop_length)
    quiet, loud = (compute(torch.cat([before, rest], 1))[:, :frames] for rest in (after, _LOUDER * after))
    return torch.allclose(quiet, loud, rtol=1e-3, atol=1e-3, equal_nan=True)


def _front_end(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that the front end has a step for a stream, and that its frames see no features of later ones."""
    if keys.CNN is None:
        return True
    if not hasattr(keys.CNN, "forward_step"):
        why = f"{type(keys.CNN).__name__} takes whole utterances alone: it has no forward_step"
    elif _sees_later_frames(keys.CNN, keys):
        why = "a frame of it sees features of the frames that follow, which may be in the next chunk"
    else:
        return True
    _refuse(findings, built.nodes["CNN"], "", why, "use sbkit.nn.causal.CausalFrontEnd")
    return False


def _sees_later_frames(module: nn.Module, keys: CTCKeys) -> bool:
    each, frames = recognizer(keys).frontend_rule.factor, 8
    front = copy.deepcopy(module).eval()
    for weights in front.parameters():
        weights.normal_(std=0.1)  # a check leaves them uninitialised
    feats = torch.randn(1, 2 * frames * each, keys.n_mels)
    later = feats.clone()
    later[:, frames * each :] += 1.0
    return not torch.allclose(front(feats)[:, :frames], front(later)[:, :frames], atol=1e-5)


def _refuse(findings: Findings, node: Node, argument: str, message: str, suggestion: str) -> None:
    """Add a finding at an argument of a part, or at the part if it doesn't have that argument."""
    there = isinstance(node.value, dict) and argument in node.value
    place, key = (node.place_of(argument), node.key_of(argument)) if there else (node.place, node.key)
    findings.error("chunks", place, key, message, f"{suggestion}, or leave chunks out")
