"""A new recogniser beyond its test set: its words' confidences are calibrated, and what it writes where nobody speaks
and for changed speech is tried for some seconds. Its README tells both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.data.corpus import Corpus
from sbkit.data.nonspeech import NonSpeech
from sbkit.export import layout
from sbkit.export.clips import Clip, clips_of
from sbkit.runs.keys import Bundles
from sbkit.score.behaviour import LEVELS, SHORT_SECONDS, SILENCE, Behaviour, silences, speeches
from sbkit.score.calibration import Calibration, reliability
from sbkit.score.edits import DELETION, EQUAL, align
from sbkit.score.results import Table

#: Seconds after which no more is tried, and test utterances that are changed.
_TRIAL_SECONDS, _CLIPS = 7.0, 3
#: Confidences are calibrated on so many utterances of dev, with one recording without words for every fifth, if the
#: model writes so many words for them. Not on those of the test or of the battery, which are to show what is true.
_CALIBRATED, _WORDS = 100, 200
#: Seconds after which no more of them are transcribed, and how many are at once.
_CALIBRATION_SECONDS, _BLOCK = 30.0, 12


def try_behaviour(folder: Path, config: layout.Bundle, bundles: Bundles, clips: Sequence[Clip],
                  corpus: Corpus | None) -> str:
    """Calibrate a recogniser's confidences, then try it on silence of all kinds and on changed clips for some seconds;
    write what it did into README.md, and return a line.

    Full trials, with a search, are ``sbkit evaluate --behaviour``.
    """
    if not isinstance(config, layout.Config) or not {layout.ONNX, layout.INT8} & set(config.models):
        return ""  # a model in torch's format alone is a program, which only those run who ask for it
    rate, texts = config.sample_rate, list[str]()
    transcribe, trials = bundles.transcriber(str(folder), rate), silences(rate, SHORT_SECONDS, times=1)
    tables = _calibrate(config, transcribe, corpus)
    began = time.monotonic()
    step = len(trials) // len(LEVELS)
    spoken = [(clip.signal, clip.text) for clip in clips if clip.text and clip.text.split()]
    trials += speeches(spoken[:_CLIPS], rate)
    while len(texts) < len(trials) and time.monotonic() < began + _TRIAL_SECONDS:
        texts += [each.text for each in transcribe([trial.signal for trial in trials[len(texts):len(texts) + step]])]
    found = Behaviour.of(trials, texts, rate)
    tables[:0] = found.tables
    readme = folder / layout.README
    written = readme.read_text(encoding="utf-8")
    for table in tables:
        # A bar of 20 is a WER of 100 %, or an accuracy.
        rows = table.rows if table is tables[0] else [[*row, "█" * round(float(row[1]) / 5)] for row in table.rows]
        columns = table.columns + [""] * (len(rows[0]) - len(table.columns))
        lines = [columns, ["---"] * len(columns), *rows]
        written += f"\n## {table.title}\n\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines) \
            + f"\n{table.remark}\n"
    readme.write_text(written, encoding="utf-8")
    config.files[layout.README] = layout.fingerprint(readme)
    config.trained = {**config.trained, "behaviour": found.figures}
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
    between = found.tables[0].rows[-1][-1]  # of a minute; sbkit evaluate --behaviour tries ten times as much
    return (f"where nobody speaks it writes {found.figures[SILENCE]:.1f} words a minute (95 % interval {between}; "
            f"{layout.README}: each sound)\n")


def _calibrate(config: layout.Config, transcribe: Callable[[Sequence[np.ndarray]], list[Any]], corpus: Corpus | None
               ) -> list[Table]:
    """Fit the share of right words to their confidences, on utterances of dev and on silence; return a table, if there
    are enough. Nothing is downloaded for it."""
    if corpus is None or not corpus.manifest_path("dev").is_file() or (dev := corpus.manifest("dev")).has_urls:
        return []
    began, rate = time.monotonic(), config.sample_rate
    clips = clips_of(dev, rate, _CALIBRATED)
    clips += [Clip(NonSpeech().signal(len(clip.signal), rate, np.random.default_rng(number)), "", "silence")
              for number, clip in enumerate(clips[::5])]
    confidences, right, invented = list[float](), list[bool](), list[float]()
    parts, tried = -(-len(clips) // _BLOCK), list[tuple[Clip, Any]]()
    for part in (clips[number::parts] for number in range(parts)):  # each has all lengths, and silence
        if time.monotonic() < began + _CALIBRATION_SECONDS:
            tried += zip(part, transcribe([clip.signal for clip in part]), strict=True)
    for clip, found in tried:
        said = (clip.text or "").split() if found.spaced else list((clip.text or "").replace(" ", ""))
        confidences += [word.confidence for word in found.words]
        invented += [] if said else [word.confidence for word in found.words]
        right += [step == EQUAL for step in align([said], [[word.text for word in found.words]])[0]
                  if step != DELETION]
    if len(right) < _WORDS:
        return []
    columns = np.array(confidences), np.array(right, float), np.ones(len(right))
    curve, (bins, error) = Calibration.fit(*columns), reliability(*columns)
    least = 1 / (len(right) + 2)  # no word is sure to be right, or wrong
    config.reliability = [[confidence, min(max(accuracy, least), 1 - least)]
                          for confidence, accuracy in zip(curve.confidences, curve.accuracies, strict=True)]
    rows = [[f"{100 * expected:.1f}", f"{100 * found:.1f}", words] for words, expected, found in bins]
    silent = f"{100 * np.interp(invented, *np.transpose(config.reliability)).mean():.1f} % on average for the " \
             f"{len(invented)} words that were written for silence" if invented else "No word was written for silence"
    return [Table("How far to trust a word's confidence", ["confidence %", "right %", "words"], rows,
                  f"Calibrated on {len(tried)} recordings of dev and of silence, and tried on the half that it was not "
                  f"fitted on: both differ by {100 * error:.1f} points (expected calibration error). {silent}.")]
