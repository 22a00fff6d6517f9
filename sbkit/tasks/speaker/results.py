"""Results of a test of speakers: error rates of its trials, and the worst of them to listen to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.data.manifest import Manifest
from sbkit.score import verification
from sbkit.score.results import Player, Results, SoundSample, Table
from sbkit.score.verification import Rates, Trials

#: Trials of each kind in the table of the worst.
WORST = 6


class SpeakerRow(NamedTuple):
    """A recording: who speaks, as the corpus says, and its vector [D]."""

    id: str
    speaker: str
    vector: np.ndarray


class ScoredTrials(NamedTuple):
    """Trials with their scores [N]."""

    trials: Trials
    scores: np.ndarray
    rates: Rates

    @property
    def stats(self) -> dict[str, float]:
        """The rates by name."""
        return {"EER": self.rates.eer, "minDCF": self.rates.min_dcf}

    def drawn(self, times: np.ndarray) -> ScoredTrials:
        """The same with each recording so many times [R]; no trial is of one with itself."""
        each = times[self.trials.first] * times[self.trials.second]
        return self._replace(rates=verification.rates(self.scores, self.trials.same, times=each))

    def worst(self) -> list[int]:
        """The trials that are furthest on the wrong side: of one speaker, and of two."""
        refused = np.flatnonzero(self.trials.same)[np.argsort(self.scores[self.trials.same])[:WORST]]
        accepted = np.flatnonzero(~self.trials.same)[np.argsort(-self.scores[~self.trials.same])[:WORST]]
        wrong = [*refused[self.scores[refused] < self.rates.threshold],
                 *accepted[self.scores[accepted] >= self.rates.threshold]]
        return [int(each) for each in wrong]


def scored(rows: Sequence[SpeakerRow], path: str | None = None) -> ScoredTrials:
    """Score the trials of a list, or all pairs of recordings."""
    if path is None:
        trials = verification.made([row.speaker for row in rows])
    else:
        trials, _ = verification.listed(verification.read_list(path), [row.id for row in rows])
    vectors = np.stack([row.vector for row in rows]) if rows else np.zeros((0, 1), np.float32)
    scores = np.concatenate([np.zeros(0, np.float32), *(
        np.einsum("nd,nd->n", vectors[first], vectors[second])
        for first, second in zip(*(np.array_split(side, 1 + len(side) // 100_000)
                                   for side in (trials.first, trials.second)), strict=True))])
    return ScoredTrials(trials, scores, verification.rates(scores, trials.same))


@dataclass
class Verified(Results):
    """Rows of a test and the rates of its trials."""

    scored: ScoredTrials = field(kw_only=True)
    rows: Sequence[SpeakerRow] = ()

    @classmethod
    def of(cls, scored: ScoredTrials, rows: Sequence[SpeakerRow], unread: Mapping[str, str]) -> Verified:
        """Put a test together."""
        found = cls(scored.stats, len(rows), dict(unread), scored=scored, rows=rows)
        found.tables = [found._kinds(), found._wrong()]
        return found

    def headline(self) -> str:
        same = self.scored.trials.same
        return f"{super().headline()}, {len(same):,} trials, {int(same.sum()):,} of them of one speaker"

    def _said(self, name: str) -> str:
        return super()._said(name) + " %" * (name == "EER")

    def lines(self) -> list[str]:
        return [self.tables[0].remark]

    def columns(self) -> list[tuple[str, Any]]:
        return [*super().columns(), ("threshold", f"{self.scored.rates.threshold:.3f}")]

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "threshold": self.scored.rates.threshold, "trials": len(self.scored.trials.same)}

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Write the numbers; the report lets one hear the worst trials."""
        place = {name: i for i, name in enumerate(manifest.ids)}
        self.players = []
        for trial in self.scored.worst():
            sounds = []
            for side in (self.scored.trials.first, self.scored.trials.second):
                row = self.rows[side[trial]]
                said = manifest.row(place[row.id])
                sounds.append(SoundSample(row.id, said.wav, said.start, said.duration))
            self.players.append(Player(self._kind(trial), f"score {self.scored.scores[trial]:.3f}", sounds))
        super().write(folder, manifest, of)

    def _kind(self, trial: int) -> str:
        return "one speaker, refused" if self.scored.trials.same[trial] else "two speakers, accepted"

    def _kinds(self) -> Table:
        """Counts the trials of each kind, with their scores."""
        rows, threshold = [], self.scored.rates.threshold
        for name, chosen in (("one", self.scored.trials.same), ("two", ~self.scored.trials.same)):
            found = self.scored.scores[chosen]
            wrong = found < threshold if name == "one" else found >= threshold
            rows.append([name, len(found), f"{found.mean():.3f}" if len(found) else "", f"{wrong.mean():.2%}"
                         if len(found) else ""])
        return Table("Trials", ["speakers", "trials", "mean score", "errors"], rows,
                     f"one speaker from a score of {threshold:.3f} on, where both kinds of errors are equally frequent")

    def _wrong(self) -> Table:
        """Lists the worst trials."""
        trials = self.scored.trials
        return Table("The worst trials", ["what", "score", "first", "second"],
                     [[self._kind(each), f"{self.scored.scores[each]:.3f}", self.rows[trials.first[each]].id,
                       self.rows[trials.second[each]].id] for each in self.scored.worst()])
