"""One utterance of a codec's validation or test: its codes, and what was measured of what was made of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class CodecRow(NamedTuple):
    """An utterance; None: not measured."""

    id: str
    reference: str
    samples: int
    mel_distance: float  # decibels
    codes: np.ndarray  # [T, Q] int32
    seconds: float | None = None  # that coding and decoding took
    stoi: float | None = None
    pesq: float | None = None
    heard: str | None = None  # by a recogniser in the recording
    heard_again: str | None = None  # and in what was made of it
    sound: np.ndarray | None = None  # [S] int16, of the few that a report lets one hear
