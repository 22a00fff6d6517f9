"""Checks that the parts of a codec fit together, before a batch is sent through."""

from __future__ import annotations

from typing import NamedTuple

from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.tasks.codec.keys import CodecKeys


class _Fit(NamedTuple):
    """A number that a part has, and what it has to be."""

    key: str
    argument: str
    found: int
    wanted: int
    why: str


def parts_fit(keys: CodecKeys, built: Built, findings: Findings) -> bool:
    """Report each number of a part that another part contradicts; returns whether there is none."""
    features, encoder, quantiser, decoder, head = (keys.compute_features, keys.encoder, keys.quantiser, keys.decoder,
                                                   keys.head)
    wanted = [
        _Fit("compute_features", "sample_rate", features.sample_rate, keys.sample_rate, "recordings are read at {}"),
        _Fit("encoder", "fold", encoder.fold, features.fold, "compute_features makes {} frames for each code"),
        _Fit("encoder", "output_size", encoder.output_size, quantiser.size, "the quantiser takes {} numbers a frame"),
        _Fit("decoder", "input_size", decoder.input_size, quantiser.size, "the quantiser gives {} numbers a frame"),
        _Fit("head", "input_size", head.input_size, decoder.size, "the decoder's states have {} numbers"),
        _Fit("head", "hop", head.hop * decoder.fold, features.stride,
             "a code stands for {} samples, which are decoder's fold times head's hop"),
    ]
    wrong = [fit for fit in wanted if fit.found != fit.wanted]
    for fit in wrong:
        node = built.nodes[fit.key]
        findings.error("shape-mismatch", node.place_of(fit.argument), node.key_of(fit.argument),
                       f"it is {fit.found}, and {fit.why.format(fit.wanted)}",
                       "refer to one key of the recipe in both places")
    return not wrong
