"""Results of a voice's test: what a recogniser hears in what it says, how fast it speaks, clips to listen to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sbkit.score.results import Table
from sbkit.system.console import counted
from sbkit.tasks.sound_results import SoundResults, word_rates

#: Texts in the table of those in which most was misheard.
WORST = 12


class SpokenRow(NamedTuple):
    """An utterance of a validation or test; None: not measured."""

    id: str
    reference: str
    frames: int  # of the recording's codes; 0: it has no labels
    right: float  # the share of choices that are the recording's, a sum over frames
    apart: float  # seconds by which symbols' durations are off, a mean over symbols
    spoken: float = 0.0  # seconds of what was said
    seconds: float = 0.0  # that saying it took
    heard: str | None = None  # by a recogniser in the recording
    heard_again: str | None = None  # and in what was said
    sound: np.ndarray | None = None  # [S] int16, of the few that a report lets one hear


def measures(rows: Sequence[SpokenRow]) -> dict[str, float]:
    """Compute means over frames and over utterances, of those that have labels."""
    known = [row for row in rows if row.frames]
    if not known:
        return {}
    return {"right_choices": 100 * sum(row.right for row in known) / sum(row.frames for row in known),
            "duration_error_ms": 1000 * float(np.mean([row.apart for row in known]))}


@dataclass
class Spoken(SoundResults):
    """Rows of a test and what they come to."""

    maker: ClassVar[str] = "voice"

    @classmethod
    def of(cls, rows: Sequence[SpokenRow], loss: float, unread: Mapping[str, str], sample_rate: int) -> Spoken:
        """Put the rows of a test together."""
        stats = {"loss": loss, **known} if (known := measures(rows)) else {}  # without labels there is no loss
        before, after = word_rates(rows, "heard"), word_rates(rows, "heard_again")
        if before is not None and after is not None:
            stats |= {"WER": after.rate, "WER_of_recordings": before.rate}
        spoken = sum(row.spoken for row in rows)
        stats["real_time_factor"] = sum(row.seconds for row in rows) / spoken if spoken else math.nan
        found = cls(stats, len(rows), dict(unread), sample_rate=sample_rate, before=before, after=after, rows=rows)
        found.tables = [found._measured(), *([found._worst()] if after is not None else [])]
        return found

    def headline(self) -> str:
        said = [f"WER {self.stats['WER']:.2f} % (recordings {self.stats['WER_of_recordings']:.2f} %)"] \
            if "WER" in self.stats else []
        return ", ".join([*said, f"real-time factor {self.stats['real_time_factor']:.4f}",
                          counted(self.utterances, "utterance")])

    def facts(self) -> dict[str, Any]:
        return {**self.stats, **self.intervals()}

    def columns(self) -> list[tuple[str, Any]]:
        shown = {"WER": "WER %", "WER_of_recordings": "of recordings %"}
        return [(title, f"{self.stats[name]:.2f}") for name, title in shown.items() if name in self.stats]

    def remark(self, row: SpokenRow) -> str:
        """Say what was heard in a clip."""
        return " · ".join(each for each in (f"transcript: {row.heard_again}" if row.heard_again is not None else "",
                                            row.id) if each)

    # ------------------------------------------------------------ tables

    def _measured(self) -> Table:
        """Lists all measures with what they mean."""
        stats, rows = self.stats, self.recognised_rows()
        if "right_choices" in stats:
            rows += [["right choices", f"{stats['right_choices']:.1f} %", "of the recordings' codes, given their "
                      "durations"],
                     ["durations", f"{stats['duration_error_ms']:.0f} ms", "mean error over characters"]]
        rows.append(["real-time factor", f"{stats['real_time_factor']:.4f}", "of synthesis"])
        return Table("How it speaks", ["measure", "value", "note"], rows)

    def _worst(self) -> Table:
        """Lists the texts in which most words were misheard."""
        scored = [row for row in self.rows if row.heard_again is not None and row.reference.split()]
        wrong = {row.id: rates.rate for row in scored if (rates := word_rates([row], "heard_again")) is not None}
        rows = sorted(scored, key=lambda row: -wrong[row.id])[:WORST]
        return Table("The worst texts", ["text", "transcript of the recording", "of the voice's output", "WER %"],
                     [[row.reference, row.heard or "", row.heard_again, f"{wrong[row.id]:.0f}"] for row in rows])
