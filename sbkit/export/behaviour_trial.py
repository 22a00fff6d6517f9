"""Tries a new recogniser beyond its test set for some seconds, on non-speech and on changed speech, for its README."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sbkit.data.corpus import Corpus
from sbkit.export import layout
from sbkit.export.clips import Clip
from sbkit.export.confidence import CONFIDENCE, NotCalibrated, Transcribe, calibrate_confidences
from sbkit.runs.keys import Bundles
from sbkit.score.behaviour import LEVELS, SHORT_SECONDS, SILENCE, Behaviour, silences, speeches
from sbkit.score.results import Table

#: Seconds after which nothing further is tried.
_MAX_SECONDS = 7.0
#: Test utterances that are changed.
_UTTERANCES = 3
#: Percent that one character of a table's bar stands for: a WER of 100 %, or an accuracy, has 20.
_PERCENT_PER_BAR = 5


@dataclass(frozen=True)
class Trial:
    """What a trial adds to a bundle; nothing for a model that isn't a recogniser."""

    sections: str = ""
    """The end of README.md."""
    line: str = ""
    """A line for the terminal."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of the behaviour, for config.json."""
    reliability: list[list[float]] | None = None
    """The curve for config.json by which confidences are calibrated; None: they aren't."""

    def add_to(self, config: layout.Bundle) -> None:
        """Write the figures and the curve into a configuration."""
        if self.figures:
            config.trained = {**config.trained, "behaviour": self.figures}
        if self.reliability is not None:
            assert isinstance(config, layout.Config), "only recognisers are calibrated"
            config.reliability = self.reliability


def try_out(folder: Path, config: layout.Bundle, bundles: Bundles | None, clips: Sequence[Clip],
            corpus: Corpus | None) -> Trial:
    """Calibrate a recogniser's confidences on dev, then try it on non-speech and on changed clips.

    The bundle needs no README and no fingerprints yet: they are made of what this returns. It gets a config.json, so
    that it can be opened.

    bundles : opens it; None: it isn't tried

    ``sbkit evaluate --behaviour`` runs the full trial, with ten times as much non-speech, and with a search.
    """
    if not isinstance(config, layout.Config):
        return Trial()
    if bundles is None:
        return Trial(_not_calibrated("a model of another library is not tried on dev"))
    if not {layout.ONNX, layout.INT8} & set(config.models):
        return Trial(_not_calibrated("a model in torch's format alone is a program, which runs only if its user asks "
                                     "for it"))

    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
    transcribe = bundles.transcriber(str(folder), config.sample_rate)
    calibration = calibrate_confidences(config.sample_rate, transcribe, corpus)
    behaviour = _run_trials(config, transcribe, clips)

    sections = _section(behaviour.tables[0])
    for table in behaviour.tables[1:]:
        sections += _section(table, bars=True)
    interval = behaviour.tables[0].rows[-1][-1]
    line = (f"hallucinated words per minute on non-speech: {behaviour.figures[SILENCE]:.1f} (95 % interval {interval}; "
            f"{layout.README}: each sound)\n")
    if isinstance(calibration, NotCalibrated):
        return Trial(sections + _not_calibrated(calibration.reason), line, behaviour.figures)
    sections += _section(calibration.table, bars=True)
    return Trial(sections, line, behaviour.figures, calibration.points)


def _not_calibrated(reason: str) -> str:
    """Write the section on confidences of a recogniser without a curve for them."""
    return (f"\n## {CONFIDENCE}\n\nConfidences are not calibrated, because {reason}: a word has the lowest "
            "probability of its tokens.\n")


def _run_trials(config: layout.Config, transcribe: Transcribe, clips: Sequence[Clip]) -> Behaviour:
    rate = config.sample_rate
    trials = silences(rate, SHORT_SECONDS, times=1)
    batch = len(trials) // len(LEVELS)
    spoken = [(clip.signal, clip.text) for clip in clips if clip.text and clip.text.split()]
    trials += speeches(spoken[:_UTTERANCES], rate)

    started = time.monotonic()
    texts: list[str] = []
    while len(texts) < len(trials) and time.monotonic() < started + _MAX_SECONDS:
        signals = [trial.signal for trial in trials[len(texts):len(texts) + batch]]
        texts += [transcript.text for transcript in transcribe(signals)]
    return Behaviour.of(trials, texts, rate)


def _section(table: Table, bars: bool = False) -> str:
    """Write a table in Markdown.

    bars : add a column with a bar for the percentage in the second one
    """
    columns, rows = table.columns, table.rows
    if bars:
        columns = [*columns, ""]
        rows = [[*row, "█" * round(float(row[1]) / _PERCENT_PER_BAR)] for row in rows]
    lines = [columns, ["---"] * len(columns), *rows]
    cells = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    return f"\n## {table.title}\n\n{cells}\n{table.remark}\n"
