"""Checks that the parts of a recipe's encoder fit together, before a batch is sent through."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TypeVar

import torch
from torch import Tensor, nn

from sbkit.nn.lengths import feature_frames, takes_lengths
from sbkit.nn.spec_augment import SpecAugment
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import SECONDS, on_fake_tensors
from sbkit.recipe.values import static
from sbkit.tasks.recognise.chunk_check import chunks_fit
from sbkit.tasks.recognise.duration_limit import durations_fit
from sbkit.tasks.recognise.keys import EncoderKeys

K = TypeVar("K", bound=EncoderKeys)


def parts_fit(keys: K, built: Built, findings: Findings, *own: Callable[[K, Built, Findings], bool]) -> bool:
    """Report parts that don't fit; returns whether a batch can be sent through.

    own : further checks of a task
    """
    # each check relies on those before it
    checks = (_rates_fit, durations_fit, _features_fit, _masks_fit, _front_end_fits, _levels_kept, *own, chunks_fit)
    return all(check(keys, built, findings) for check in checks)


def _rates_fit(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Check that the sample rate of features and encoder, if they have one, is that of the recordings."""
    for key in ("compute_features", keys.encoder_key):
        part = getattr(keys, key)
        for module in part.modules() if isinstance(part, nn.Module) else ():
            rate = getattr(module, "sample_rate", keys.sample_rate)
            if rate == keys.sample_rate:
                continue
            node = built.nodes[key]
            read = f"but recordings are read at {keys.sample_rate} (sample_rate)"
            if "sample_rate" in signature(type(part)).parameters:
                findings.error("sample-rate", node.place_of("sample_rate"), node.key_of("sample_rate"),
                               f"it is {rate}, {read}", "write `sample_rate: !ref <sample_rate>`")
            else:
                findings.error("sample-rate", node.place, node.key, f"it takes {rate} samples per second, {read}",
                               f"write sample_rate: {rate} at the top of the recipe")
            return False
    return True


def _features_fit(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Check that features have the number of frames and the width that the recipe's keys say."""
    features = keys.compute_features
    if features is None:  # an encoder on waveforms
        return True
    node = built.nodes["compute_features"]
    samples = round(SECONDS * keys.sample_rate)
    with torch.no_grad():
        shape = on_fake_tensors(features, lambda _: _of_silence(features, samples).shape)
    if len(shape) != 3:  # a user's encoder may take something else
        return True
    frames, width = shape[1:]
    hop = round(keys.sample_rate * keys.hop_length / 1000)
    # By the layer's own rule, unless that isn't one for every hop.
    by_rule = feature_frames(features, samples, hop)
    of_longer = feature_frames(features, samples + 100 * hop, hop)
    expected = by_rule if of_longer - by_rule == 100 else samples // hop + 1
    wrong = {}
    if frames != expected:
        wrong["hop_length"] = f"{frames} frames of {SECONDS:g} s, but a hop_length of {keys.hop_length:g} ms gives " \
                              f"{expected}"
    if width != keys.n_mels:
        wrong["n_mels"] = f"{width} features a frame, but n_mels is {keys.n_mels}"
    # SpeechBrain's make more than their own n_mels of it, which then can't be that of the recipe.
    composed = any(getattr(features, name, False) for name in ("deltas", "context", "compute_dct"))
    own = getattr(getattr(features, "compute_fbanks", None), "n_mels", 40)
    for key, message in wrong.items():
        place, name = (built.nodes[key].place, key) if key in built.nodes else (node.place, node.key)
        hint = f"write {key} at the top of the recipe, and `{key}: !ref <{key}>` under compute_features"
        if key == "n_mels" and composed:
            hint = (f"write n_mels: {width}, which the model gets, at the top of the recipe, and n_mels: {own} "
                    "under compute_features")
        findings.error("shape-mismatch", place, name, f"compute_features makes {message}", hint)
    return not wrong


def _masks_fit(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Check that an augmentation of features that isn't sbkit's returns features."""
    if keys.spec_augment is None or isinstance(keys.spec_augment, SpecAugment):
        return True
    features = torch.rand(2, 100, keys.n_mels)
    try:
        with torch.random.fork_rng([]):
            changed = keys.spec_augment(features, torch.tensor([100, 80]))
    except Exception:  # the forward fails too, and is told
        return True
    if isinstance(changed, Tensor) and changed.shape == features.shape:
        return True
    node = built.nodes["spec_augment"]
    made = list(changed.shape) if isinstance(changed, Tensor) else f"a {type(changed).__name__}"
    findings.error("bad-masks", node.place, node.key, "it must return the features [B, T, F] that it is called with, "
                   f"and returns {made}", "take sbkit.nn.spec_augment.SpecAugment")
    return False


def _levels_kept(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Warn of a normalisation of each utterance by itself, which makes silence as loud as speech."""
    if getattr(keys.normalize, "norm_type", None) in ("sentence", "batch") and not (
            keys.nonspeech and keys.nonspeech.share):
        node = built.nodes["normalize"]
        findings.warning(
            "loud-silence", node.place, node.key, "each utterance is normalised by itself, so silence is as loud as "
            "speech, and the model is not trained on silence: it will hallucinate words there",
            "add nonspeech, and write norm_type: global, which keeps the level: hparams/ctc.yaml has both")
    return True


def _of_silence(features: nn.Module, samples: int) -> Tensor:
    """Compute the features [1, T, F] of an utterance of zeros."""
    inputs = [torch.zeros(1, samples), torch.full((1,), samples)]
    return features(*inputs[:1 + takes_lengths(features)])


def _front_end_fits(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Check that the front end takes the features; the recogniser later probes its subsampling."""
    node, features, front_end = built.nodes.get("CNN"), keys.compute_features, keys.CNN
    if front_end is None or features is None or node is None:
        return True
    samples = round(SECONDS * keys.sample_rate)
    shape = node.value.get("input_shape") if isinstance(node.value, dict) else None
    expected = static(shape.value[-1]) if shape is not None and isinstance(shape.value, list) and shape.value else None

    def width_of_features(_: object) -> int:
        feats = _of_silence(features, samples)
        if expected == feats.shape[-1] or not isinstance(expected, int):
            front_end(feats)
        return feats.shape[-1]

    width = on_fake_tensors(nn.Sequential(features, front_end), width_of_features)
    if isinstance(expected, int) and expected != width:
        findings.error("shape-mismatch", node.place_of("input_shape"), node.key_of("input_shape"),
                       f"it expects {expected} features, but compute_features makes {width}",
                       "write `input_shape: [8, 10, !ref <n_mels>]`")
        return False
    return True
