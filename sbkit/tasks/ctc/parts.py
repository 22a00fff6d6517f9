"""The parts of a recipe's recogniser: whether they can be put together, before a batch goes through."""

from __future__ import annotations

import torch
from speechbrain.lobes.models.transformer.Transformer import TransformerInterface

from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import SECONDS, stand_ins
from sbkit.recipe.values import static
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.ctc.model import encoder_key


def parts_fit(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Whether a batch can be sent through."""
    return _front_end_fits(keys, built, findings) and _has_its_decoder(keys, built, findings)


def _front_end_fits(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Whether it takes the features; the recogniser then finds its subsampling by trying it."""
    node = built.nodes.get("CNN")
    if keys.CNN is None or keys.compute_features is None or node is None:
        return True
    with stand_ins():
        feats = keys.compute_features(torch.empty(1, round(SECONDS * keys.sample_rate)))
        shape = node.value.get("input_shape") if isinstance(node.value, dict) else None
        width = static(shape.value[-1]) if shape is not None and isinstance(shape.value, list) and shape.value else None
        if isinstance(width, int) and width != feats.shape[-1]:
            findings.error("shape-mismatch", node.place_of("input_shape"), node.key_of("input_shape"),
                           f"it expects {width} features, compute_features makes {feats.shape[-1]}",
                           "write `input_shape: [8, 10, !ref <n_mels>]`")
            return False
        keys.CNN(feats)
    return True


def _has_its_decoder(keys: CTCKeys, built: Built, findings: Findings) -> bool:
    """Whether joint training finds a decoder in the encoder's class, where that is SpeechBrain's."""
    key = encoder_key(built.hparams)
    node = built.nodes[key]
    layers = node.value.get("num_decoder_layers") if isinstance(node.value, dict) else None
    theirs = isinstance(built.hparams[key], TransformerInterface)
    if not theirs or keys.seq_lin is None or keys.ctc_weight >= 1 or layers is None or static(layers) != 0:
        return True
    findings.error("forward", built.nodes["ctc_weight"].place, "ctc_weight",
                   f"it is {keys.ctc_weight:g}, so the attention decoder trains, but {key}.num_decoder_layers is 0",
                   "write ctc_weight: 1.0, or give the decoder layers")
    return False
