"""Writes a corpus of recordings that were transcribed: the rows that are confident enough, and why others are not."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from sbkit.export.layout import Config
from sbkit.infer.files import SOME_FAILED, print_first
from sbkit.infer.label_lines import path_of, read_lines
from sbkit.infer.label_request import FOLDER, LabelRequest
from sbkit.score.calibration import Calibration
from sbkit.system.console import atomic_write, counted, table

#: Whether a row is kept, or why it is left out.
KEPT = "kept"
UNREADABLE = "unreadable"
NO_WORDS = "no words"
NO_PAUSE = "no pause"
UNSURE = "low confidence"
UNLIKE = "not calibrated"
#: The code of each reason for which a row is left out; that of an unreadable recording is its error's.
CODES = {NO_WORDS: "no-words", NO_PAUSE: "no-pause", UNSURE: "low-confidence", UNLIKE: "not-calibrated"}
#: Values of ``--keep`` for which the hours are shown.
_KEEPS = (0.95, 0.9, 0.8, 0.7, 0.5)


class Unreadable(NamedTuple):
    """Why a recording can't be labelled."""

    code: str
    detail: str


@dataclass
class Tally:
    """Rows and hours by the reason for which they are kept or left out."""

    rows: Counter[str] = field(default_factory=Counter)
    hours: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    judged: list[tuple[float, float]] = field(default_factory=list)
    """The expected word accuracy and the hours of each row that ``--keep`` decides on."""

    def add(self, reason: str, accuracy: float, seconds: float) -> None:
        self.rows[reason] += 1
        self.hours[reason] += seconds / 3600
        if reason in (KEPT, UNSURE):
            self.judged.append((accuracy, seconds / 3600))

    def hours_with(self, keep: float) -> float:
        """The hours that another value of ``--keep`` would keep."""
        return sum(hours for accuracy, hours in self.judged if accuracy >= keep)


def write_corpus(request: LabelRequest, transcribed: Path, calibration: Calibration, errors: Mapping[str, Unreadable]
                 ) -> int:
    """Write the rows that are kept and those that are left out, print a summary, and return the exit code.

    transcribed : the file of transcribed recordings
    errors : why recordings can't be read, by their keys
    """
    file = f"{request.shard.name}.jsonl"
    longest = Config.read(request.bundle).chunk_seconds
    tally = Tally()
    with atomic_write(request.to / file) as corpus, atomic_write(request.to / FOLDER / f"left_out-{file}") as left_out:
        for recording in read_lines(transcribed):
            labelled = sum(duration for _, duration, _, _ in recording["pieces"])
            tally.hours[NO_WORDS] += (recording["duration"] - labelled) / 3600
            for start, duration, text, confidence in recording["pieces"]:
                accuracy = 0.0 if confidence is None else float(calibration(np.float64(confidence)))
                reason = _reason(confidence, accuracy, duration <= longest, calibration, request.keep)
                tally.add(reason, accuracy, duration)
                name = recording["id"] + (f"-{start:.2f}" if len(recording["pieces"]) > 1 else "")
                row = {"id": name, "audio_filepath": json.loads(recording["key"])[0], "offset": start,
                       "duration": duration, "text": text, "confidence": round(accuracy, 4)}
                if reason == KEPT:
                    _write_line(corpus, row)
                else:
                    _write_line(left_out, row | {"reason": reason, "code": CODES[reason]})
        for key, problem in errors.items():
            tally.rows[UNREADABLE] += 1
            _write_line(left_out, {"audio_filepath": path_of(key), "reason": UNREADABLE, **problem._asdict()})
    print_first("left out", [f"{path_of(key)}: {problem.detail} [{problem.code}]" for key, problem in errors.items()])
    _print_summary(request, tally)
    return SOME_FAILED if errors else 0


def _reason(confidence: float | None, accuracy: float, fits: bool, calibration: Calibration, keep: float) -> str:
    """Return whether a piece is kept, or why it is left out.

    accuracy : its expected word accuracy
    fits : whether it is short enough for training
    """
    if confidence is None:
        return NO_WORDS
    if not fits:
        return NO_PAUSE
    if confidence < calibration.lowest:
        return UNLIKE
    if accuracy < keep:
        return UNSURE
    return KEPT


def _write_line(file: IO[str], row: Mapping[str, object]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _print_summary(request: LabelRequest, tally: Tally) -> None:
    lines = []
    for reason in (KEPT, UNSURE, UNLIKE, NO_WORDS, NO_PAUSE, UNREADABLE):
        if reason == KEPT or tally.rows[reason] or tally.hours[reason] > 0.005:
            lines.append((reason, tally.rows[reason], f"{tally.hours[reason]:.2f}"))
    print(table(["", "rows", "hours"], lines))
    if tally.rows[UNLIKE]:
        print(f"not calibrated: {counted(tally.rows[UNLIKE], 'row')} with a lower confidence than all of "
              f"{request.calibrate}, so their word accuracy is unknown; calibrate on recordings like these to keep any")
    kept_hours = tally.hours_with(request.keep)
    if kept_hours:
        mean = sum(accuracy * hours for accuracy, hours in tally.judged if accuracy >= request.keep) / kept_hours
        print(f"expected word accuracy of the rows that are kept: {100 * mean:.1f} %")
    if tally.rows[UNSURE]:
        print("hours kept with other values of --keep: "
              + ", ".join(f"{keep:g}: {tally.hours_with(keep):.2f} h" for keep in _KEEPS))
    print(f"{request.to / request.shard.name}.jsonl  (left out: {request.to / FOLDER}; another --keep reuses these "
          "transcripts)")
