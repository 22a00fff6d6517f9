"""What a new bundle writes where nobody speaks and for changed speech: tried for some seconds, told in its README."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sbkit.export import layout
from sbkit.export.clips import Clip
from sbkit.runs.keys import Bundles
from sbkit.score.behaviour import LEVELS, SHORT_SECONDS, SILENCE, Behaviour, silences, speeches

#: Seconds after which no more is tried, and test utterances that are changed.
_TRIAL_SECONDS, _CLIPS = 7.0, 3


def try_behaviour(folder: Path, config: layout.Bundle, bundles: Bundles, clips: Sequence[Clip]) -> str:
    """Try a recogniser on silence of all kinds and on changed clips for some seconds; write what it did into README.md,
    and return a line.

    Full trials, with a search, are ``sbkit evaluate --behaviour``.
    """
    if not isinstance(config, layout.Config) or not {layout.ONNX, layout.INT8} & set(config.models):
        return ""  # a model in torch's format alone is a program, which only those run who ask for it
    began, rate, texts = time.monotonic(), config.sample_rate, list[str]()
    transcribe, trials = bundles.recogniser(str(folder), rate), silences(rate, SHORT_SECONDS, times=1)
    step = len(trials) // len(LEVELS)
    spoken = [(clip.signal, clip.text) for clip in clips if clip.text and clip.text.split()]
    trials += speeches(spoken[:_CLIPS], rate)
    while len(texts) < len(trials) and time.monotonic() < began + _TRIAL_SECONDS:
        texts += transcribe([trial.signal for trial in trials[len(texts):len(texts) + step]])
    found = Behaviour.of(trials, texts, rate)
    readme = folder / layout.README
    written = readme.read_text(encoding="utf-8")
    for table in found.tables:
        rows = table.rows if table is found.tables[0] else [
            [*row, "█" * round(float(row[1]) / 5)] for row in table.rows]  # a bar of 20 is a WER of 100 %
        columns = table.columns + [""] * (len(rows[0]) - len(table.columns))
        lines = [columns, ["---"] * len(columns), *rows]
        written += f"\n## {table.title}\n\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines) \
            + f"\n{table.remark}\n"
    readme.write_text(written, encoding="utf-8")
    config.files[layout.README] = layout.fingerprint(readme)
    config.trained = {**config.trained, "behaviour": found.figures}
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
    return f"where nobody speaks it writes {found.figures[SILENCE]:.1f} words a minute ({layout.README}: each sound)\n"
