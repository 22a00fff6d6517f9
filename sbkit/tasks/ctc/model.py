"""The recogniser that a recipe's parts make together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sbkit.errors import SbkitError
from sbkit.nn.recognizer import Recognizer
from sbkit.tasks.ctc.keys import CTCKeys

#: What the encoder may be called.
ENCODERS = ("Transformer", "encoder")


def encoder_key(hparams: Mapping[str, Any]) -> str:
    """The key that the encoder stands under, or should."""
    return next((name for name in ENCODERS if hparams.get(name) is not None), ENCODERS[0])


def recognizer(keys: CTCKeys) -> Recognizer:
    """Features, front end, encoder and CTC head of a recipe."""
    encoder = keys.Transformer if keys.Transformer is not None else keys.encoder
    if encoder is None:
        raise SbkitError("the recipe has no encoder", hint=f"write it under {' or '.join(ENCODERS)}")
    waveforms = keys.compute_features is None
    for name in ("normalize", "spec_augment", "CNN"):
        if waveforms and getattr(keys, name) is not None:
            raise SbkitError(f"the encoder takes waveforms (compute_features: null), and {name} takes features",
                             hint=f"write {name}: null")
    return Recognizer(
        features=keys.compute_features, encoder=encoder, ctc_lin=keys.ctc_lin, frontend=keys.CNN,
        normalize=keys.normalize, augment=keys.spec_augment, n_features=keys.n_mels,
        hop_samples=1 if waveforms else round(keys.sample_rate * keys.hop_length / 1000),
    )
