"""What a new bundle writes where nobody speaks: tried for some seconds, and written into its README."""

from __future__ import annotations

import time
from pathlib import Path

from sbkit.export import layout
from sbkit.runs.keys import Bundles
from sbkit.score.behaviour import LEVELS, SHORT_SECONDS, SILENCE, Behaviour, silences

#: Seconds after which no more silence is tried.
_TRIAL_SECONDS = 7.0


def try_silence(folder: Path, config: layout.Bundle, bundles: Bundles) -> str:
    """Try a recogniser on silence of all kinds for some seconds; write what it did into README.md, and return a line.

    Full trials, with changed utterances and a search, are ``sbkit evaluate --behaviour``.
    """
    if not isinstance(config, layout.Config) or not {layout.ONNX, layout.INT8} & set(config.models):
        return ""  # a model in torch's format alone is a program, which only those run who ask for it
    began, rate, texts = time.monotonic(), config.sample_rate, list[str]()
    transcribe, trials = bundles.recogniser(str(folder), rate), silences(rate, SHORT_SECONDS, times=1)
    step = len(trials) // len(LEVELS)
    while len(texts) < len(trials) and time.monotonic() < began + _TRIAL_SECONDS:
        texts += transcribe([trial.signal for trial in trials[len(texts):len(texts) + step]])
    found = Behaviour.of(trials, texts, rate)
    [table] = found.tables
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    readme = folder / layout.README
    readme.write_text(readme.read_text(encoding="utf-8") + f"\n## {table.title}\n\n" + "".join(
        f"| {' | '.join(map(str, line))} |\n" for line in lines) + f"\n{table.remark}\n", encoding="utf-8")
    config.files[layout.README] = layout.fingerprint(readme)
    config.trained = {**config.trained, "behaviour": found.figures}
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
    return f"where nobody speaks it writes {found.figures[SILENCE]:.1f} words a minute ({layout.README}: each sound)\n"
