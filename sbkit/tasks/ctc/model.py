"""Builds the recogniser from a recipe's parts."""

from __future__ import annotations

from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.ctc.recognizer import Recognizer


def hop_samples(keys: CTCKeys) -> int:
    """Return the number of samples between two frames of features; 1 if the encoder takes waveforms."""
    return 1 if keys.compute_features is None else round(keys.sample_rate * keys.hop_length / 1000)


def recognizer(keys: CTCKeys) -> Recognizer:
    """Put features, front end, encoder and CTC head together."""
    return Recognizer(
        features=keys.compute_features, encoder=getattr(keys, keys.encoder_key), ctc_lin=keys.ctc_lin,
        frontend=keys.CNN, normalize=keys.normalize, augment=keys.spec_augment, n_features=keys.n_mels,
        hop_samples=hop_samples(keys), chunks=keys.chunks,
    )
