"""Results of an enhancement test: how much cleaner clips became, and clips to listen to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from sbkit.score.results import Table
from sbkit.tasks.sound_results import SoundResults

#: Decibels of the noisy recordings between which results are shown apart.
_EDGES = (0.0, 5.0, 10.0, 15.0)


class EnhancedRow(NamedTuple):
    """An utterance; None: not measured."""

    id: str
    reference: str
    samples: int
    before: float
    """SI-SNR of the noisy recording, in decibels."""
    after: float
    stoi_before: float | None = None
    stoi: float | None = None
    sound: np.ndarray | None = None  # noisy, enhanced and clean, [3, S] int16, of the few that a report lets one hear


def measures(rows: Sequence[EnhancedRow]) -> dict[str, float]:
    """Compute means over utterances of all that was measured."""
    if not rows:
        return {}
    found = {"SI_SNRi": float(np.mean([row.after - row.before for row in rows])),
             "SI_SNR": float(np.mean([row.after for row in rows]))}
    for name in ("stoi", "stoi_before"):
        if known := [value for row in rows if (value := getattr(row, name)) is not None]:
            found[name.replace("stoi", "STOI").replace("_before", "_of_noisy")] = float(np.mean(known))
    return found


@dataclass
class Enhanced(SoundResults):
    """Rows of a test, and what they come to."""

    rows: Sequence[EnhancedRow] = ()
    maker: ClassVar[str] = "enhanced"

    @classmethod
    def of(cls, rows: Sequence[EnhancedRow], loss: float, unread: Mapping[str, str], sample_rate: int) -> Enhanced:
        """Put the rows of a test together."""
        found = cls({"loss": loss, **measures(rows)}, len(rows), dict(unread), sample_rate=sample_rate, rows=rows)
        found.tables = [found._by_noise()]
        return found

    def headline(self) -> str:
        said = [f"SI-SNR {self.stats['SI_SNR']:.2f} dB, improved by {self.stats['SI_SNRi']:.2f} dB"]
        if self.estimate is not None and self.estimate.interval is not None:
            said[0] += " (95 % interval {:.2f} to {:.2f})".format(*self.estimate.interval)
        if "STOI" in self.stats:
            said.append(f"STOI {self.stats['STOI']:.3f} (noisy {self.stats['STOI_of_noisy']:.3f})")
        return ", ".join([*said, f"{self.utterances} utterances"])

    def remark(self, row: EnhancedRow) -> str:
        """Say what was measured of a clip."""
        heard = "" if row.stoi is None else f" · STOI {row.stoi_before:.3f} to {row.stoi:.3f}"
        return f"SI-SNR {row.before:.1f} to {row.after:.1f} dB{heard} · {row.id}"

    def made(self, row: EnhancedRow) -> Mapping[str, np.ndarray]:
        """What was heard, what became of it and what was wanted."""
        assert row.sound is not None, "asked of clips that are kept"
        return dict(zip(("noisy", self.maker, "clean"), row.sound, strict=True))

    def _by_noise(self) -> Table:
        """Says how much clips improved that had much noise, and such that had little."""
        lines = []
        for low, high in zip((-np.inf, *_EDGES), (*_EDGES, np.inf), strict=True):
            rows = [row for row in self.rows if low <= row.before < high]
            if rows:
                stats = measures(rows)
                lines.append([f"{low:g} to {high:g} dB".replace("-inf to", "below").replace("to inf dB", "dB and more"),
                              len(rows), *(f"{stats[name]:.3g}" if name in stats else "" for name in (
                                  "SI_SNR", "SI_SNRi", "STOI_of_noisy", "STOI"))])
        return Table("By the SI-SNR of the noisy recording", ["noisy", "utterances", "SI-SNR, dB", "improved by, dB",
                                                              "STOI, noisy", "STOI"], lines)
