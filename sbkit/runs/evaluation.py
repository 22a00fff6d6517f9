"""An evaluation of a run: what is asked for, and the folder that the results of a checkpoint make."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.runs.layout import EVALUATIONS, RESULT
from sbkit.score.report import write_report
from sbkit.score.results import Results
from sbkit.system.console import atomic_write
from sbkit.system.environment import command, describe

_SCORED = ("source", "manifest", "checkpoints", "decoder", "precision")  # of result.json: what makes it another result


@dataclass(frozen=True)
class EvaluateRequest:
    """What is to be scored.

    run : the output folder of a training
    on : a corpus of any kind; None for the run's own
    split : one of the corpus's; None for its test split, or the only one it has
    checkpoints : ``best``, ``last``, names of checkpoints
    average : score the mean of this many instead
    max_wer : per cent; more than this makes the exit code 1
    name : of the results, which the checkpoint's and the search's options follow; by default the corpus's
    out : the folder that results go to, by default ``RUN/evaluations``
    lm : a language model (ARPA or KenLM's binary) to search with
    tune_lm : find the two weights below on the run's dev split first
    lm_weight, word_score, beam : see ``sbkit.decode.beam.BeamSearch``. Where neither these nor a language model,
        hot words or nbest are given, the transcripts are each frame's best, or what the recipe's decoder finds
    hot_words : phrases to expect, each with ``=BOOST`` behind it or not; ``@FILE`` has one in each line
    nbest : transcripts of each utterance to write into nbest.jsonl, with their scores
    joint : search with the attention decoder and CTC together
    ctc_weight : of CTC in that search
    """

    run: Path
    on: str | None = None
    split: str | None = None
    checkpoints: Sequence[str] = ("best",)
    average: int = 1
    max_wer: float | None = None
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
    device: str | None = None
    precision: str | None = None
    max_batch_seconds: float | None = None
    workers: int | None = None

    def search_options(self) -> list[str]:
        """What was asked for of a search, by name."""
        return [name for name in ("lm", "tune_lm", "lm_weight", "word_score", "beam", "hot_words", "nbest", "joint",
                                  "ctc_weight") if getattr(self, name)]

    def label(self) -> str:
        """What the name of the results says of the search: all that was asked for, as in ``-joint-ctc0.2-beam10``."""
        numbers = {"lm": self.lm_weight, "word": self.word_score, "ctc": self.ctc_weight, "beam": self.beam,
                   "nbest": self.nbest}
        said = [("joint", self.joint), (self.lm and Path(self.lm).name.split(".")[0], self.lm),
                ("tuned", self.tune_lm), ("hot", self.hot_words),
                *((f"{name}{value:g}", True) for name, value in numbers.items() if value is not None)]
        return "".join(f"-{word}" for word, asked in said if asked)

    @property
    def folder(self) -> Path:
        """Where results go."""
        return self.out or self.run / EVALUATIONS


class Result(NamedTuple):
    """What came out for one checkpoint; ``facts`` is what result.json says."""

    came: Results
    facts: dict[str, Any]
    metric: str
    replaced: str = ""  # the command of another result that had the same name


def write(scored: Result, manifest: Manifest) -> str:
    """All files of a result; gives how another result was made that had been there."""
    folder = Path(scored.facts["folder"])
    replaced = _another(folder / RESULT, scored.facts, scored.metric)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scored.came.write(folder, manifest)
        with atomic_write(folder / RESULT) as out:
            json.dump({**scored.facts, "command": command(), "environment": describe()}, out, indent=1,
                      ensure_ascii=False)
        write_report(folder, title=f"{Path(scored.facts['run']).name} on {folder.name}", remote=manifest.remote)
    return replaced


def source(on: str | None) -> str | None:
    """A corpus by one name, however it was given."""
    return str(Path(on).resolve()) if on and Path(on).exists() else on


def _another(path: Path, facts: dict[str, Any], metric: str) -> str:
    """The command and the rate of the result that is there, if it's not of the same checkpoint, corpus and search."""
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if all(there.get(key) == facts.get(key) for key in _SCORED):
        return ""
    return f"{there.get('command')} ({metric} {there.get(metric, float('nan')):.2f})"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Whose fault it is that nothing can be written there."""
    try:
        yield
    except OSError as error:
        raise SbkitError(f"cannot write into {folder}: {error.strerror}",
                         hint="choose another place with --out") from error

