"""Checks that the parts of a recipe's recogniser fit together, before a batch is sent through."""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature

import torch
from speechbrain.lobes.models.transformer.Transformer import TransformerInterface
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.nn.lengths import feature_frames, takes_lengths
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.trace import SECONDS, on_stand_ins
from sbkit.recipe.values import static
from sbkit.tasks.ctc.chunk_check import sees_no_further
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.ctc.taps import stack
from sbkit.tasks.ctc.window import hears_all


def parts_fit(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Report what does not fit; returns whether a batch can be sent through."""
    # each check relies on those before it
    checks = (_rates_fit, hears_all, _features_fit, _front_end_fits, _has_its_decoder, _has_layers_between,
              sees_no_further)
    return all(check(keys, built, findings) for check in checks)


def _rates_fit(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that features and encoder, if they have a sample rate, have the one at which recordings are read."""
    for key in ("compute_features", keys.encoder_key):
        part = getattr(keys, key)
        for module in part.modules() if isinstance(part, nn.Module) else ():
            rate = getattr(module, "sample_rate", keys.sample_rate)
            if rate != keys.sample_rate:
                _tell_rate(built.nodes[key], signature(type(part)).parameters, rate, keys.sample_rate, findings)
                return False
    return True


def _tell_rate(node: Node, takes: Collection[str], rate: int, read: int, findings: Findings) -> None:
    if "sample_rate" in takes:
        findings.error("sample-rate", node.place_of("sample_rate"), node.key_of("sample_rate"),
                       f"it is {rate}, but recordings are read at {read} (sample_rate)",
                       "write `sample_rate: !ref <sample_rate>`")
    else:
        findings.error("sample-rate", node.place, node.key,
                       f"it takes {rate} samples a second, but recordings are read at {read} (sample_rate)",
                       f"write sample_rate: {rate} at the top of the recipe")


def _features_fit(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that features are as many, and as wide, as the recipe's keys say, since frames are counted by those."""
    features = keys.compute_features
    if features is None:  # an encoder on waveforms
        return True
    node = built.nodes["compute_features"]
    samples = round(SECONDS * keys.sample_rate)
    with torch.no_grad():
        shape = on_stand_ins(features, lambda _: _of_silence(features, samples).shape)
    if len(shape) != 3:  # a user's encoder may take something else
        return True
    frames, width = shape[1:]
    expected = _frames_said(features, samples, round(keys.sample_rate * keys.hop_length / 1000))
    wrong = [("hop_length", frames, expected, f"makes {frames} frames of {SECONDS:g} s, with a hop_length of "
              f"{keys.hop_length:g} ms there would be {expected}"),
             ("n_mels", width, keys.n_mels, f"makes {width} features a frame, and n_mels is {keys.n_mels}")]
    for key, found, said, message in wrong:
        if found != said:
            place, name = (built.nodes[key].place, key) if key in built.nodes else (node.place, node.key)
            findings.error("shape-mismatch", place, name, f"compute_features {message}",
                           f"write {key} at the top of the recipe, and `{key}: !ref <{key}>` under compute_features")
    return all(found == said for _, found, said, _ in wrong)


def _frames_said(features: nn.Module, samples: int, hop: int) -> int:
    """Return how many frames there should be: by the layer's own rule, unless that isn't one for every ``hop``."""
    few, more = (feature_frames(features, samples + hop * each, hop) for each in (0, 100))
    return few if more - few == 100 else samples // hop + 1


def _of_silence(features: nn.Module, samples: int) -> Tensor:
    """Compute the features [1, T, F] of an utterance of zeros."""
    given = [torch.zeros(1, samples), torch.full((1,), samples)]
    return features(*given[:1 + takes_lengths(features)])


def _front_end_fits(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that the front end takes the features; the recogniser then finds its subsampling by trying it."""
    node, features, front_end = built.nodes.get("CNN"), keys.compute_features, keys.CNN
    if front_end is None or features is None or node is None:
        return True
    samples = round(SECONDS * keys.sample_rate)
    width = on_stand_ins(features, lambda _: _of_silence(features, samples).shape[-1])
    shape = node.value.get("input_shape") if isinstance(node.value, dict) else None
    said = static(shape.value[-1]) if shape is not None and isinstance(shape.value, list) and shape.value else None
    if isinstance(said, int) and said != width:
        findings.error("shape-mismatch", node.place_of("input_shape"), node.key_of("input_shape"),
                       f"it expects {said} features, compute_features makes {width}",
                       "write `input_shape: [8, 10, !ref <n_mels>]`")
        return False
    both = nn.Sequential(features, front_end)
    on_stand_ins(both, lambda _: front_end(_of_silence(features, samples)).shape)
    return True


def _has_its_decoder(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that the encoder has a decoder for joint training."""
    if keys.ctc_weight >= 1:
        return True
    key = keys.encoder_key
    encoder, node = getattr(keys, key), built.nodes[key]
    layers = node.value.get("num_decoder_layers") if isinstance(node.value, dict) else None
    if not _decodes(encoder):
        lacks, hint = f"{key} has none: {type(encoder).__name__} takes no tokens", \
            "take an encoder with a decoder, such as SpeechBrain's TransformerASR"
    elif isinstance(encoder, TransformerInterface) and layers is not None and static(layers) == 0:
        lacks, hint = f"{key}.num_decoder_layers is 0", "give the decoder layers"
    else:
        return True
    findings.error("forward", built.nodes["ctc_weight"].place, "ctc_weight",
                   f"it is {keys.ctc_weight:g}, so an attention decoder trains, but {lacks}",
                   f"write ctc_weight: 1.0, or {hint}")
    return False


def _decodes(encoder: nn.Module) -> bool:
    """Whether a module's forward takes tokens and their padding id, as joint training passes them."""
    takes = signature(encoder.forward).parameters.values()
    return any(each.name == "pad_idx" or each.kind == each.VAR_KEYWORD for each in takes)


def _has_layers_between(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Check that the encoder has inner layers for ``intermediate_ctc``."""
    encoder = getattr(keys, keys.encoder_key)
    if not keys.intermediate_ctc:
        return True
    try:
        count = len(stack(encoder)[1])
    except SbkitError as error:
        told, hint = f"but {error.message}", "write intermediate_ctc: 0"
    else:
        if keys.intermediate_layers or hasattr(encoder, "encode"):
            return True
        told = f"and nobody knows which layers of {type(encoder).__name__} give what the head takes"
        hint = f"name them, such as intermediate_layers: [{max(1, count // 2)}], or write intermediate_ctc: 0"
    findings.error("forward", built.nodes["intermediate_ctc"].place, "intermediate_ctc",
                   f"it is {keys.intermediate_ctc:g}, so layers within {keys.encoder_key} train with a loss of their "
                   f"own, {told}", hint)
    return False
