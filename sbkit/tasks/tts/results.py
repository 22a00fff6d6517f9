"""Results of a voice's test: a recogniser's WER on its speech, how fast it speaks, and sample clips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sbkit.score.results import Table
from sbkit.system.console import counted
from sbkit.tasks.generation import SoundResults, word_rates

#: Texts in the table of those with the most errors.
WORST = 12


class SpokenRow(NamedTuple):
    """An utterance of a validation or test; None: not measured."""

    id: str
    reference: str
    frames: int  # of the recording's codes; 0: it has no labels
    right: float  # the share of choices that are the recording's, a sum over frames
    duration_error: float  # in seconds, a mean over symbols
    spoken: float = 0.0  # seconds of speech
    seconds: float = 0.0  # of computing it
    recording_transcript: str | None = None
    output_transcript: str | None = None
    sound: np.ndarray | None = None  # [S] int16, of the sample clips


def measures(rows: Sequence[SpokenRow]) -> dict[str, float]:
    """Compute means over frames and over utterances, of those that have labels."""
    known = [row for row in rows if row.frames]
    if not known:
        return {}
    return {"right_choices": 100 * sum(row.right for row in known) / sum(row.frames for row in known),
            "duration_error_ms": 1000 * float(np.mean([row.duration_error for row in known]))}


@dataclass
class VoiceResults(SoundResults):
    """Rows of a test and their statistics."""

    maker: ClassVar[str] = "voice"

    @classmethod
    def of(cls, rows: Sequence[SpokenRow], loss: float, unread: Mapping[str, str], sample_rate: int) -> VoiceResults:
        """Compute the results of a test from its rows."""
        stats = {"loss": loss, **known} if (known := measures(rows)) else {}  # without labels there is no loss
        found = cls(stats, len(rows), dict(unread), sample_rate=sample_rate, rows=rows)
        found.add_word_rates()
        spoken = sum(row.spoken for row in rows)
        found.stats["real_time_factor"] = sum(row.seconds for row in rows) / spoken if spoken else math.nan
        found.tables = [found._measured(), *([found._worst()] if found.after is not None else [])]
        return found

    def headline(self) -> str:
        rates = [f"WER {self.stats['WER']:.2f} % (recordings {self.stats['WER_of_recordings']:.2f} %)"] \
            if "WER" in self.stats else []
        return ", ".join([*rates, f"real-time factor {self.stats['real_time_factor']:.4f}",
                          counted(self.utterances, "utterance")])

    def facts(self) -> dict[str, Any]:
        return {**self.stats, **self.intervals()}

    def columns(self) -> list[tuple[str, Any]]:
        shown = {"WER": "WER %", "WER_of_recordings": "of recordings %"}
        return [(title, f"{self.stats[name]:.2f}") for name, title in shown.items() if name in self.stats]

    def remark(self, row: SpokenRow) -> str:
        return row.id if row.output_transcript is None else f"transcript: {row.output_transcript} · {row.id}"

    # ------------------------------------------------------------ tables

    def _measured(self) -> Table:
        """Make the table of all measures."""
        stats, rows = self.stats, self.error_rate_rows()
        if "right_choices" in stats:
            rows += [["right choices", f"{stats['right_choices']:.1f} %", "of the recordings' codes, given their "
                      "durations"],
                     ["durations", f"{stats['duration_error_ms']:.0f} ms", "mean error over characters"]]
        rows.append(["real-time factor", f"{stats['real_time_factor']:.4f}", "of synthesis"])
        return Table("How it speaks", ["measure", "value", "note"], rows)

    def _worst(self) -> Table:
        """Make the table of the texts with the most errors."""
        scored = [row for row in self.rows if row.output_transcript is not None and row.reference.split()]
        wrong = {row.id: rates.rate for row in scored if (rates := word_rates([row], "output_transcript")) is not None}
        rows = sorted(scored, key=lambda row: -wrong[row.id])[:WORST]
        return Table("The worst texts", ["text", "transcript of the recording", "of the voice's output", "WER %"],
                     [[row.reference, row.recording_transcript or "", row.output_transcript, f"{wrong[row.id]:.0f}"]
                      for row in rows])
