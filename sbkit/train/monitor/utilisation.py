"""Model FLOPs utilisation: the arithmetic that a run's audio needs, against what its device could do in that time."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


@dataclass(frozen=True)
class Utilisation:
    """What a second of audio costs in training, and what the device computes in a second.

    Only the audio counts: what padding and recomputation cost besides is part of what makes the share small.
    """

    operations: float
    """Floating point operations of a second of audio, forward and backward."""
    peak: float | None = None
    """Operations a second of one device; None: nobody knows, and no share is told."""
    source: str = ""
    """What says so."""

    def rate(self, audio_s_per_s: float) -> float:
        """Operations a second."""
        return self.operations * audio_s_per_s

    def share(self, audio_s_per_s: float) -> float | None:
        """Of what one device could do; ``audio_s_per_s``: of one device."""
        return self.rate(audio_s_per_s) / self.peak if self.peak else None

    def words(self, audio_s_per_s: float) -> str:
        """For a line about one device.

        >>> Utilisation(0.6e9, 2e11).words(100), Utilisation(0.6e9).words(100)
        ('MFU 30 %', '60 GFLOP/s')
        """
        share = self.share(audio_s_per_s)
        return f"{flops(self.rate(audio_s_per_s))}/s" if share is None else f"MFU {100 * share:.0f} %"

    def __str__(self) -> str:
        needs = f"a second of audio takes {flops(self.operations)} in training"
        if self.peak is None:
            return f"{needs}; what 100 % would be is not known of {self.source or 'this device'}"
        return f"{needs}; MFU is of {flops(self.peak)}/s, by {self.source}"


def flops(value: float) -> str:
    """An amount of operations with its unit.

    >>> flops(9.89e14), flops(6e8)
    ('989 TFLOP', '600 MFLOP')
    """
    size, unit = next(((size, unit) for size, unit in _UNITS if value >= size), (1.0, "FLOP"))
    return f"{value / size:.3g} {unit}"
