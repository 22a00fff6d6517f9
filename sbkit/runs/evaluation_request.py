"""What ``sbkit evaluate`` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sbkit.score import chunk_size
from sbkit.score.run_files import EVALUATIONS
from sbkit.score.weights import BEST, BEST_CHECKPOINT, Average, ChosenWeights


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
    data_root: str | None = None
    split: str | None = None
    checkpoints: Sequence[str] = (BEST,)
    average: Average = BEST_CHECKPOINT.average
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
    behaviour: bool = False

    def label(self) -> str:
        """The part of the results' name that lists the given search options, such as ``-joint-ctc0.2-beam10``."""
        chunks = []
        if self.chunk:
            sizes = [chunk_size.WHOLE if size is None else str(size) for size in self.chunk]
            chunks = [f"chunk{'-'.join(sizes)}"]
        return "".join(f"-{option}" for option in [*self._search_switches(), *chunks, *self._search_numbers()])

    def search_label(self) -> str:
        """The same without the chunk sizes, which have a column in the table of results."""
        return "".join(f"-{option}" for option in [*self._search_switches(), *self._search_numbers()])

    def _search_switches(self) -> list[str]:
        """The names of the search options that are on or have no number."""
        language_model = Path(self.lm).name.split(".")[0] if self.lm else ""
        switches = [("joint", self.joint), (language_model, self.lm), ("tuned", self.tune_lm), ("hot", self.hot_words)]
        return [name for name, value in switches if value]

    def _search_numbers(self) -> list[str]:
        """The search options with a number, each with its number."""
        numbers = {"lm": self.lm_weight, "word": self.word_score, "ctc": self.ctc_weight, "beam": self.beam,
                   "nbest": self.nbest}
        return [f"{name}{value:g}" for name, value in numbers.items() if value is not None]

    @property
    def weights(self) -> list[ChosenWeights]:
        """The weights to score, one after the other."""
        return [ChosenWeights(checkpoint, self.average) for checkpoint in self.checkpoints]

    @property
    def folder(self) -> Path:
        """The folder for results."""
        return self.out or self.run / EVALUATIONS
