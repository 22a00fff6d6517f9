"""What a run may ask of bundles of other models, to label its corpus and to hear its tests; rooms above this one open
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from sbkit.codes import Books
from sbkit.decode.durations import Aligned
from sbkit.errors import SbkitError


class CodecBundle(Protocol):
    """A codec."""

    @property
    def books(self) -> Books: ...
    @property
    def sample_rate(self) -> int: ...

    def encode_each(self, signals: Sequence[np.ndarray]) -> list[np.ndarray | SbkitError]:
        """Return for each waveform [S] its codes [T, Q], or why it has none."""
        ...

    def close(self) -> None: ...


class AlignerBundle(Protocol):
    """A recogniser that tells when it heard what is known to have been said."""

    @property
    def fingerprint(self) -> str:
        """Changes with its weights."""
        ...

    def align(self, signals: Sequence[np.ndarray], sample_rate: int, texts: Sequence[str]) -> list[Aligned | str]:
        """Return for waveforms [S] and their texts what was heard when, or why that can't be told."""
        ...

    def close(self) -> None: ...


class Bundles(Protocol):
    """Opens bundles."""

    def codec(self, folder: str) -> CodecBundle: ...

    def aligner(self, folder: str) -> AlignerBundle: ...

    def recogniser(self, folder: str, sample_rate: int) -> Callable[[Sequence[np.ndarray]], list[str]]:
        """Return what transcribes waveforms [S] at this rate."""
        ...
