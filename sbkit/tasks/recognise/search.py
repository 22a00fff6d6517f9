"""The search of ``sbkit evaluate``: its options, the tuning of its weights, and its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sbkit.data.manifest import Manifest
from sbkit.decode.fusion import FusionWeights
from sbkit.decode.search_options import hot_words
from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import Hypothesis, TokenSearch
from sbkit.errors import SbkitError
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.score.edits import count
from sbkit.system.cores import usable_cores
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

TUNING_UTTERANCES = 2000
LM_WEIGHTS = (0.0, 0.3, 0.6, 1.0, 1.5)
WORD_SCORES = (-1.0, 0.5, 2.0, 3.5)
FINER = (0.15, 0.75)  # steps from the best pair so far to its neighbours
ROUNDS = 4  # rounds of such steps at most; fewer if none is better


class Recorder:
    """Stands in for a search: records its inputs for later, and decodes greedily.

    greedy : decodes the input of a search
    text : writes the tokens of an utterance
    """

    def __init__(self, search: TokenSearch, greedy: Callable[[Tensor, Tensor], Iterable[TokenSpans]],
                 text: Callable[[TokenSpans], str]):
        self.search = search
        self.tokenizer = search.tokenizer
        self._greedy = greedy
        self._text = text
        self.batches: list[Any] = []  # inputs of the search

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def decode(self, scores: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode greedily, with the interface of ``TokenSearch.decode``."""
        self.batches.append(self.search.events(scores, lengths))
        return [[Hypothesis(self._text(spans), 0.0, 0.0, spans)] for spans in self._greedy(scores, lengths)]


def tuning_subset(manifest: Manifest) -> Manifest:
    """Choose the utterances for tuning, evenly from the whole manifest."""
    if len(manifest) <= TUNING_UTTERANCES:
        return manifest
    return manifest.select(np.linspace(0, len(manifest) - 1, TUNING_UTTERANCES).astype(np.int64))


def best_weights(recorder: Recorder, rows: Sequence[Any]) -> tuple[FusionWeights, float, float]:
    """Find the best pair of weights on the recorded batches; all ranks call it, each with its share.

    Returns the weights, their WER and that of greedy decoding in per cent.

    rows : the task's rows for the recorder's transcripts on this rank, in the same order
    """
    search = recorder.search
    batch = search.join(recorder.batches)
    scored = [i for i, row in enumerate(rows) if row.reference.split()]
    references = [rows[i].reference.split() for i in scored]
    total = sum(ranks.gather_objects(sum(map(len, references))))
    if not total:
        raise SbkitError("no-transcripts",
                         "no utterance of the dev split has a reference, so the language model's weight "
                         "can't be tuned", key="tune-lm", hint="give --lm-weight and --word-score instead of --tune-lm")
    tried: dict[tuple[float, float], float] = {}

    def rate(transcripts: list[list[str]]) -> float:
        wrong = int(count(references, [transcripts[i] for i in scored]).edits.sum()) if references else 0
        return 100 * sum(ranks.gather_objects(wrong)) / total

    def attempt(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
        for lm, word in pairs:
            if lm >= 0 and (lm, word) not in tried:
                weights = dataclasses.replace(search.weights, lm=lm, word=word)
                transcripts = [nbest[0].text.split() for nbest in search.search(batch, weights)]
                tried[lm, word] = rate(transcripts)
                logger.info("lm weight %.2f, word score %.2f: WER %.2f %% on dev", lm, word, tried[lm, word])
        return min(tried, key=lambda pair: (tried[pair], pair))

    best = attempt(itertools.product(LM_WEIGHTS, WORD_SCORES))
    for _ in range(ROUNDS):
        lm_weights, word_scores = ([round(value + step * size, 4) for step in (-1, 0, 1)]
                                   for value, size in zip(best, FINER, strict=True))
        best_before = best
        best = attempt(itertools.product(lm_weights, word_scores))
        if best == best_before:
            break
    weights = dataclasses.replace(search.weights, lm=best[0], word=best[1])
    return weights, tried[best], rate([row.hypothesis.split() for row in rows])


_PER_PROCESS = 1000  # utterances for which starting another process pays off
LARGE = 200e6  # bytes of an ARPA file that is too large to hold in every process


def options(request: EvaluateRequest, keys: EncoderKeys) -> dict[str, Any]:
    """Return the given options of a search."""
    names = "lm", "lm_weight", "word_score", "beam", "nbest"
    values = {name: getattr(request, name) for name in names}
    arguments = {name: value for name, value in values.items() if value is not None}
    if request.hot_words:
        normalised: dict[str, float] = {}  # by the rules of the run's transcripts: case, punctuation
        for phrase, boost in hot_words(request.hot_words).items():
            text = keys.corpus.text(phrase)
            if not text:
                raise SbkitError("bad-value", f"the run's text rules leave nothing of the hot word {phrase!r}",
                                 hint="write words as they are spoken", key="hot-word", value=phrase)
            normalised[text] = max(boost, normalised.get(text, boost))
        arguments["hot_words"] = normalised
    return arguments


@contextlib.contextmanager
def search_processes(search: TokenSearch, utterances: int) -> Iterator[None]:
    """Context in which a search uses as many processes as pay off."""
    before = search.workers
    small = search.lm is None or os.path.getsize(search.lm) < LARGE
    if small and search.keeps_events:
        search.workers = max(before, min(usable_cores() // ranks.world_size(), utterances // _PER_PROCESS) - 1)
    try:
        yield
    finally:
        search.close()
        search.workers = before
