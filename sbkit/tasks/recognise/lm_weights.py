"""Finds the weights of a language model and of words that make the fewest errors on a dev set."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sbkit.data.manifest import Manifest
from sbkit.decode.fusion import FusionWeights
from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import Hypothesis, TokenSearch
from sbkit.errors import SbkitError
from sbkit.score.edits import count
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

ENOUGH = 2000  # utterances to tune on
LM_WEIGHTS, WORD_SCORES = (0.0, 0.3, 0.6, 1.0, 1.5), (-1.0, 0.5, 2.0, 3.5)
FINER = (0.15, 0.75)  # steps from the best pair so far to its neighbours
ROUNDS = 4  # rounds of such steps at most; fewer if none is better


class BestWeights(NamedTuple):
    """The best weights, with their WER and that of greedy decoding in per cent."""

    weights: FusionWeights
    rate: float
    greedy: float


class Recorder:
    """A stand-in for a search: records what there is to search, and decodes greedily itself.

    Arguments
    ---------
    greedy : does that, with the arguments of :meth:`decode`
    """

    def __init__(self, search: TokenSearch, greedy: Callable[[Tensor, Tensor], Iterable[TokenSpans]]):
        self.search, self.tokenizer, self._greedy = search, search.tokenizer, greedy
        self.batches: list[Any] = []  # of what the search takes

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def decode(self, scores: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode greedily, with the interface of ``TokenSearch.decode``."""
        self.batches.append(self.search.events(scores, lengths))
        return [[Hypothesis(self.tokenizer.decode(spans.ids.tolist()), 0.0, 0.0, spans)]
                for spans in self._greedy(scores, lengths)]


def some_of(manifest: Manifest) -> Manifest:
    """Take as many utterances as tuning needs, evenly from the whole manifest."""
    if len(manifest) <= ENOUGH:
        return manifest
    return manifest.select(np.linspace(0, len(manifest) - 1, ENOUGH).astype(np.int64))


def tune(recorder: Recorder, rows: Sequence[Any]) -> BestWeights:
    """Search the recorded batches with one pair of weights after another; all ranks call it, each with its share.

    rows : the task's rows for the recorder's transcripts on this rank, in the same order
    """
    search, batch = recorder.search, recorder.search.join(recorder.batches)
    scored = [i for i, row in enumerate(rows) if row.reference.split()]
    references = [rows[i].reference.split() for i in scored]
    total = sum(ranks.gather_objects(sum(map(len, references))))
    if not total:
        raise SbkitError("no utterance of the dev split has a reference, so the language model's weight can't be tuned",
                         hint="give --lm-weight and --word-score instead of --tune-lm")
    tried: dict[tuple[float, float], float] = {}

    def rate(transcripts: list[list[str]]) -> float:
        wrong = int(count(references, [transcripts[i] for i in scored]).edits.sum()) if references else 0
        return 100 * sum(ranks.gather_objects(wrong)) / total

    def attempt(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
        for lm, word in pairs:
            if lm >= 0 and (lm, word) not in tried:
                weights = dataclasses.replace(search.weights, lm=lm, word=word)
                tried[lm, word] = rate([several[0].text.split() for several in search.search(batch, weights)])
                logger.info("lm weight %.2f, word score %.2f: WER %.2f %% on dev", lm, word, tried[lm, word])
        return min(tried, key=lambda pair: (tried[pair], pair))

    best = attempt(itertools.product(LM_WEIGHTS, WORD_SCORES))
    for _ in range(ROUNDS):
        before, best = best, attempt(_around(best))
        if best == before:
            break
    found = dataclasses.replace(search.weights, lm=best[0], word=best[1])
    return BestWeights(found, tried[best], rate([row.hypothesis.split() for row in rows]))


def _around(pair: tuple[float, float]) -> Iterator[tuple[float, float]]:
    for steps in itertools.product((-1, 0, 1), repeat=2):
        lm, word = (round(at + step * size, 4) for at, step, size in zip(pair, steps, FINER, strict=True))
        yield lm, word
