"""Results of a test that generated audio: error rates of a recogniser on it and on the recordings, and sample clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import soundfile

from sbkit.data.manifest import Manifest
from sbkit.score.rates import ErrorRates
from sbkit.score.results import Player, Results, SoundSample
from sbkit.score.significance import interval
from sbkit.tasks.generation import SAMPLES, Row, random_order

#: Where the clips to listen to are written, below the results.
SOUNDS = "sounds"


@dataclass
class SoundResults(Results):
    """Results of a test whose rows have sound, and error rates of those that have a text."""

    sample_rate: int = field(kw_only=True)
    before: ErrorRates | None = None
    """Of the recordings; None without a recogniser."""
    after: ErrorRates | None = None
    """Of the output."""
    rows: Sequence[Row] = ()
    #: What generated the sound, as the report calls it.
    maker: ClassVar[str]

    def remark(self, row: Row) -> str:
        """Return what was measured of a clip."""
        return str(row.id)

    def sounds(self, row: Row) -> Mapping[str, np.ndarray]:
        """Return the sounds of a clip by their labels; if there is only one, the report adds the recording."""
        return {self.maker: row.sound}

    def intervals(self) -> dict[str, Any]:
        """Return the intervals of both error rates, if they were measured."""
        if self.before is None or self.after is None:
            return {}
        return {"WER_interval": interval(self.after), "WER_of_recordings_interval": interval(self.before)}

    def figures(self, name: str) -> Mapping[str, float]:
        found = super().figures(name)
        return {f"of the {self.maker}'s output": value for value in found.values()} if name == "WER" else found

    def files(self, of: str = "") -> list[str]:
        return [*super().files(of), self._subfolder(of)]

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Write the numbers, and the sounds of a few utterances."""
        kept = {row.id: row for row in self.rows if row.sound is not None}
        drawn = sorted(sorted(kept, key=random_order)[:SAMPLES])
        worst = [] if self.estimate is None else [self.estimate.ids[i] for i in self.estimate.worst()[:SAMPLES]]
        if not kept.keys() >= set(worst):  # this task keeps only random clips
            worst = []
        subfolder, place = Path(self._subfolder(of)), {name: i for i, name in enumerate(manifest.ids)}
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        players = {}
        for number, name in enumerate(dict.fromkeys([*drawn, *worst]), 1):
            row = kept[name]
            sounds, recording = self.sounds(row), manifest.row(place[name])
            samples = [] if len(sounds) > 1 else [
                SoundSample("recording", recording.wav, recording.start, recording.duration)]
            for label, sound in sounds.items():
                path = subfolder / (f"{number:02}-{label}.flac" if len(sounds) > 1 else f"{number:02}.flac")
                soundfile.write(folder / path, sound, self.sample_rate)
                samples.append(SoundSample(label, str(path), 0.0, len(sound) / self.sample_rate))
            players[name] = Player(row.reference or name, self.remark(row), samples)
        self.players = [players[name] for name in drawn]
        self.players += [replace(players[name], among_worst=True) for name in worst]
        super().write(folder, manifest, of)

    def error_rate_rows(self) -> list[list[str]]:
        """Return rows of a table with the error rates that were measured."""
        return [[name, f"{rates.rate:.2f} %", "{}; 95 % interval {:.2f} to {:.2f}".format(what, *interval(rates))]
                for name, what, rates in (("WER", f"of the {self.maker}'s output", self.after),
                                          ("WER of the recordings", "by the same recogniser", self.before))
                if rates is not None]

    @staticmethod
    def _subfolder(of: str) -> str:
        return f"{of}_{SOUNDS}" if of else SOUNDS


def word_rates(rows: Sequence[Row], name: str) -> ErrorRates | None:
    """Compute error rates of one of the rows' transcripts, over those with a text; None if there are none."""
    scored = [(row.id, row.reference, getattr(row, name)) for row in rows
              if row.reference.split() and getattr(row, name) is not None]
    if not scored:
        return None
    rates = ErrorRates("word")
    rates.add(*zip(*scored, strict=True))
    return rates
