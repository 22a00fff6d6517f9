"""Model FLOPs utilisation (MFU): the FLOPs that a run's audio needs, as a share of its device's peak."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


@dataclass(frozen=True)
class Utilisation:
    """The FLOPs of training on a second of audio, and the peak of the device.

    FLOPs for padding and recomputation don't count, so they lower the utilisation.
    """

    operations: float
    """FLOPs of a second of audio, forward and backward."""
    peak: float | None = None
    """FLOPs a second of one device; None: unknown."""
    source: str = ""
    """Where the peak comes from."""

    def rate(self, audio_s_per_s: float) -> float:
        """Return FLOPs a second at a speed in seconds of audio a second."""
        return self.operations * audio_s_per_s

    def share(self, audio_s_per_s: float) -> float | None:
        """Return the share of a device's peak at a speed on one device; None if the peak is unknown."""
        return self.rate(audio_s_per_s) / self.peak if self.peak else None

    def words(self, audio_s_per_s: float) -> str:
        """Describe the utilisation at a speed on one device.

        >>> Utilisation(0.6e9, 2e11).words(100), Utilisation(0.6e9).words(100)
        ('MFU 30 %', '60 GFLOP/s')
        """
        share = self.share(audio_s_per_s)
        return f"{flops(self.rate(audio_s_per_s))}/s" if share is None else f"MFU {100 * share:.0f} %"

    def __str__(self) -> str:
        needs = f"a second of audio takes {flops(self.operations)} in training"
        if self.peak is None:
            return f"{needs}; the peak of {self.source or 'this device'} is unknown, so there is no MFU"
        return f"{needs}; MFU is of {flops(self.peak)}/s, by {self.source}"


def flops(value: float) -> str:
    """Format a number of operations with its unit.

    >>> flops(9.89e14), flops(6e8)
    ('989 TFLOP', '600 MFLOP')
    """
    size, unit = next(((size, unit) for size, unit in _UNITS if value >= size), (1.0, "FLOP"))
    return f"{value / size:.3g} {unit}"
