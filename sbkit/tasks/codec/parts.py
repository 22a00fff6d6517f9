"""Checks that the parts of a codec fit together, before a batch is sent through."""

from __future__ import annotations

from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.tasks.codec.keys import CodecKeys
from sbkit.tasks.fit import Fit, all_fit


def parts_fit(keys: CodecKeys, built: Built, findings: Findings) -> bool:
    """Report each number of a part that another part contradicts; returns whether there is none."""
    features, encoder, quantiser, decoder, head = (keys.compute_features, keys.encoder, keys.quantiser, keys.decoder,
                                                   keys.head)
    wanted = [
        Fit("compute_features", "sample_rate", features.sample_rate, keys.sample_rate, "recordings are read at {}"),
        Fit("encoder", "fold", encoder.fold, features.fold, "compute_features makes {} frames for each code"),
        Fit("encoder", "output_size", encoder.output_size, quantiser.size, "the quantiser takes {} numbers a frame"),
        Fit("decoder", "input_size", decoder.input_size, quantiser.size, "the quantiser gives {} numbers a frame"),
        Fit("head", "input_size", head.input_size, decoder.size, "the decoder's states have {} numbers"),
        Fit("head", "hop", head.hop * decoder.fold, features.stride,
             "a code stands for {} samples, which are decoder's fold times head's hop"),
    ]
    return all_fit(wanted, built, findings)
