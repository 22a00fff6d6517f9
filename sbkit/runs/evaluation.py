"""Evaluation of a run: the request, and the folder with a checkpoint's results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.data.manifest import Manifest
from sbkit.score import chunk_size
from sbkit.score.report import write_report
from sbkit.score.results import Results
from sbkit.score.run_files import EVALUATIONS, RESULT
from sbkit.system import disk
from sbkit.system.console import atomic_write, stored_json
from sbkit.system.environment import command, describe

_SCORED = ("source", "manifest", "checkpoints", "decoder", "precision")  # keys of result.json that identify a result


@dataclass(frozen=True)
class EvaluateRequest:
    """What to score, and how: the options of ``sbkit evaluate``, whose help describes each.

    max_values, min_values : bounds on results, by their names; ``max_wer`` is one on WER
    lm, hot_words, lm_weight, word_score, beam, nbest : without any of these, decoding is greedy, or by the recipe's
        decoder
    chunk : milliseconds; None is the whole utterance
    """

    run: Path
    on: str | None = None
    split: str | None = None
    checkpoints: Sequence[str] = ("best",)
    average: int = 1
    max_wer: float | None = None
    max_values: Sequence[tuple[str, float]] = ()
    min_values: Sequence[tuple[str, float]] = ()
    name: str | None = None
    out: Path | None = None
    lm: str | None = None
    tune_lm: bool = False
    lm_weight: float | None = None
    word_score: float | None = None
    beam: int | None = None
    hot_words: Sequence[str] = ()
    nbest: int | None = None
    joint: bool = False
    ctc_weight: float | None = None
    recogniser: str | None = None
    chunk: Sequence[int | None] = ()
    device: str | None = None
    precision: str | None = None
    max_batch_seconds: float | None = None
    workers: int | None = None

    def search_options(self) -> list[str]:
        """The names of the search options that were given."""
        return [name for name in ("lm", "tune_lm", "lm_weight", "word_score", "beam", "hot_words", "nbest", "joint",
                                  "ctc_weight") if getattr(self, name)]

    def label(self) -> str:
        """The part of the results' name that lists the given search options, such as ``-joint-ctc0.2-beam10``."""
        numbers = {"lm": self.lm_weight, "word": self.word_score, "ctc": self.ctc_weight, "beam": self.beam,
                   "nbest": self.nbest}
        parts = [("joint", self.joint), (self.lm and Path(self.lm).name.split(".")[0], self.lm),
                ("tuned", self.tune_lm), ("hot", self.hot_words),
                ("chunk" + "-".join(map(chunk_size.to_option, self.chunk)), self.chunk),
                *((f"{name}{value:g}", True) for name, value in numbers.items() if value is not None)]
        return "".join(f"-{word}" for word, asked in parts if asked)

    @property
    def folder(self) -> Path:
        """The folder for results."""
        return self.out or self.run / EVALUATIONS


class CheckpointResult(NamedTuple):
    """The result for one checkpoint; ``facts`` is the content of result.json."""

    results: Results
    facts: dict[str, Any]
    metric: str
    replaced: str = ""  # the command of a different result that had the same name


def write(scored: CheckpointResult, manifest: Manifest) -> str:
    """Write all files of a result; returns the command of a different result that it replaced."""
    folder = Path(scored.facts["folder"])
    replaced = _describe_replaced(folder / RESULT, scored.facts, scored.metric)
    with disk.writing_into(folder, "--out"):
        folder.mkdir(parents=True, exist_ok=True)
        scored.results.write(folder, manifest)
        with atomic_write(folder / RESULT) as out:
            json.dump({**scored.facts, "command": command(), "environment": describe()}, out, indent=1,
                      ensure_ascii=False)
        write_report(folder, title=f"{Path(scored.facts['run']).name} on {folder.name}", remote=manifest.remote)
    return replaced


def source(on: str | None) -> str | None:
    """Normalise the name or path of a corpus."""
    return str(Path(on).resolve()) if on and Path(on).exists() else on


def _describe_replaced(path: Path, facts: dict[str, Any], metric: str) -> str:
    """The command and rate of the previous result, if its checkpoint, corpus or search differs from this one's."""
    previous = stored_json(path)
    if not previous or all(previous.get(key) == facts.get(key) for key in _SCORED):
        return ""
    return f"{previous.get('command')} ({metric} {previous.get(metric, float('nan')):.2f})"

