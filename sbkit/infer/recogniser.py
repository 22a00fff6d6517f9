"""A bundle of a recogniser as a function, for tasks whose tests are heard by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sbkit.data.audio import resample
from sbkit.errors import SbkitError


def opened(bundle: str, sample_rate: int) -> Callable[[Sequence[np.ndarray]], list[str]]:
    """Load a bundle; returns what transcribes waveforms [S] at this rate."""
    from sbkit import infer

    model = infer.load(bundle, device="cpu")
    if not isinstance(model, infer.Model):
        model.close()
        raise SbkitError(f"{bundle} is no recogniser", hint="name a bundle that was exported from one")
    rate = model.engine.config.sample_rate

    def heard(signals: Sequence[np.ndarray]) -> list[str]:
        audio = [signal if rate == sample_rate else resample(signal, sample_rate, rate) for signal in signals]
        return [transcript.text for transcript in model.transcribe(list(audio))]

    return heard
