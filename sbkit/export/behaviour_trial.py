"""Tries a new recogniser beyond its test set for some seconds, on non-speech and on changed speech, for its README."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sbkit.data.corpus import Corpus
from sbkit.export import layout
from sbkit.export.clips import Clip
from sbkit.export.confidence import Transcribe, calibrate_confidences
from sbkit.runs.keys import Bundles
from sbkit.score.behaviour import LEVELS, SHORT_SECONDS, SILENCE, Behaviour, silences, speeches
from sbkit.score.results import Table

#: Seconds after which nothing further is tried.
_MAX_SECONDS = 7.0
#: Test utterances that are changed.
_UTTERANCES = 3
#: Percent that one character of a table's bar stands for: a WER of 100 %, or an accuracy, has 20.
_PERCENT_PER_BAR = 5


def try_behaviour(folder: Path, config: layout.Bundle, bundles: Bundles, clips: Sequence[Clip],
                  corpus: Corpus | None) -> str:
    """Calibrate a recogniser's confidences, then try it on non-speech and on changed clips. Writes the results into
    README.md and config.json, and returns a line with the rate of hallucinated words.

    ``sbkit evaluate --behaviour`` runs the full trial, with ten times as much non-speech, and with a search.
    """
    if not isinstance(config, layout.Config) or not {layout.ONNX, layout.INT8} & set(config.models):
        return ""  # a model in torch's format alone is a program, which runs only if its user asks for it

    transcribe = bundles.transcriber(str(folder), config.sample_rate)
    confidence_table = calibrate_confidences(config, transcribe, corpus)
    behaviour = _run_trials(config, transcribe, clips)

    text = "".join([
        _section(behaviour.tables[0]),
        *(_section(table, bars=True) for table in behaviour.tables[1:]),
        "" if confidence_table is None else _section(confidence_table, bars=True),
    ])
    readme = folder / layout.README
    readme.write_text(readme.read_text(encoding="utf-8") + text, encoding="utf-8")
    config.files[layout.README] = layout.fingerprint(readme)
    config.trained = {**config.trained, "behaviour": behaviour.figures}
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")

    interval = behaviour.tables[0].rows[-1][-1]
    return (f"hallucinated words per minute on non-speech: {behaviour.figures[SILENCE]:.1f} (95 % interval {interval}; "
            f"{layout.README}: each sound)\n")


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
