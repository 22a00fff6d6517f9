"""The search of ``sbkit evaluate``: builds it, tunes its weights, and runs it over a whole test set at once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from speechbrain.core import Stage
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.decode.fusion import FusionWeights
from sbkit.decode.joint import JointSearch
from sbkit.decode.search_options import hot_words
from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import Hypothesis, TokenSearch
from sbkit.errors import SbkitError
from sbkit.runs.evaluation import EvaluateRequest
from sbkit.score.edits import count
from sbkit.system.console import counted
from sbkit.system.cores import usable_cores
from sbkit.tasks.asr import TranscribedUtterance, nbest_entries
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.live import DecodingTask, LiveTest
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

TUNING_UTTERANCES = 2000
LM_WEIGHTS, WORD_SCORES = (0.0, 0.3, 0.6, 1.0, 1.5), (-1.0, 0.5, 2.0, 3.5)
FINER = (0.15, 0.75)  # steps from the best pair so far to its neighbours
ROUNDS = 4  # rounds of such steps at most; fewer if none is better


class Recorder:
    """Stands in for a search: records its inputs for later, and decodes greedily.

    greedy : decodes the input of a search
    text : writes the tokens of an utterance
    """

    def __init__(self, search: TokenSearch, greedy: Callable[[Tensor, Tensor], Iterable[TokenSpans]],
                 text: Callable[[TokenSpans], str]):
        self.search, self.tokenizer, self._greedy, self._text = search, search.tokenizer, greedy, text
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
        lms, words = ([round(at + step * size, 4) for step in (-1, 0, 1)]
                      for at, size in zip(best, FINER, strict=True))
        before, best = best, attempt(itertools.product(lms, words))
        if best == before:
            break
    found = dataclasses.replace(search.weights, lm=best[0], word=best[1])
    return found, tried[best], rate([row.hypothesis.split() for row in rows])


_PER_PROCESS = 1000  # utterances for which starting another process pays off
LARGE = 200e6  # bytes of an ARPA file that is too large to hold in every process


class SearchingTask(DecodingTask):
    """A recogniser whose tests may use a search: the recipe's ``decoder``, or the one of an evaluation's options."""

    Search: ClassVar[type[TokenSearch]]
    decoder: Any  # of any kind
    """A search, a recorder instead of it, or a recipe's own; None: greedy decoding."""
    live: LiveTest | None
    """Tests in chunks; None: on whole utterances only."""

    def prepare_search(self, search: Any) -> Any:  # a TokenSearch, or a recipe's own
        """Give a search the parts of the model that it needs; returns it."""
        if search.tokenizer is None:
            search.tokenizer = self.keys.tokenizer
        if isinstance(search, (TokenSearch, JointSearch)):
            search.model_spelling = self.spelling
        return search

    def transcribe(self, scores: Tensor, frames: Tensor, batch: Batch, stage: Stage, live: Sequence[Any] = (),
                   *more: Any) -> None:  # of ``LiveTest.scores``; further arguments of a recipe's own search
        """Add a row for each utterance of a batch, decoded by ``decoder`` in a test, otherwise greedily."""
        if not batch.weight:  # a placeholder for an empty batch
            return
        decoder = self.prepare_search(self.decoder) if stage == Stage.TEST and self.decoder is not None else None
        if self.live is not None and live:
            self.rows += self.live.rows(live, frames, batch, decoder)
        elif decoder is None:
            decoded = list(self.greedy(scores, frames))
            texts = map(self.spelling.text, decoded)
            confidences = (float(spans.confidence.mean()) if len(spans) else None for spans in decoded)
            self.rows += map(TranscribedUtterance, batch.ids, batch.texts, texts, confidences)
        else:
            for name, text, nbest in zip(batch.ids, batch.texts, decoder.decode(scores, frames, *more), strict=True):
                best = nbest[0]
                self.rows.append(TranscribedUtterance(name, text, best.text, best.confidence, nbest_entries(nbest)))

    def take_search(self, request: EvaluateRequest) -> None:
        """Build and load the search of an ``EvaluateRequest``, by default the recipe's own."""
        if request.joint:
            raise SbkitError(f"{type(self).__name__} has no attention decoder, so it can't use --joint",
                             hint="leave it out")
        if request.ctc_weight is not None:
            raise SbkitError("--ctc-weight is for the search with CTC and the attention decoder", hint="add --joint")
        if not request.lm and (request.tune_lm or request.lm_weight is not None):
            raise SbkitError("there is no language model to weight", hint="name one: --lm FILE.arpa (see sbkit lm)")
        search, keys = self.keys.decoder, self.keys
        if given := options(request, keys):
            search = self.Search(keys.tokenizer, blank_id=keys.blank_index, **given)
        if search is not None:
            self.prepare_search(search)
        self.decoder = search.load() if isinstance(search, TokenSearch) else search

    def tune_search(self, manifest: Manifest, evaluate: Callable[[Manifest], object]) -> dict[str, Any]:
        """Set the weights of the search that give the fewest errors on dev; returns facts for result.json."""
        search, manifest = self.decoder, tuning_subset(manifest)
        live, self.live = self.live, None  # tuning only needs final transcripts, with chunks of the first size
        self.decoder = recorder = Recorder(search, self.greedy, self.spelling.text)
        try:
            evaluate(manifest)
        finally:
            self.decoder, self.live = search, live
        with search_processes(search, len(recorder)):
            weights, rate, greedy = best_weights(recorder, self.rows)
        search.weights = weights
        if ranks.is_main():
            print(f"tuned on {counted(len(manifest), 'utterance')} of dev: --lm-weight {weights.lm:g} --word-score "
                  f"{weights.word:g} (WER {rate:.2f} %, greedy {greedy:.2f} %)")
        return {"tuned_on": len(manifest), "dev_WER": rate, "dev_WER_greedy": greedy}

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Context in which a search that ``keeps_events`` only records its inputs; at its end it searches all
        utterances and updates the rows.

        Searching many utterances at once is faster, and can use several processes.
        """
        search = self.decoder
        if self.live is not None or not isinstance(search, TokenSearch) or not search.keeps_events:
            yield
            return
        self.prepare_search(search)
        self.decoder = recorder = Recorder(search, self.greedy, self.spelling.text)
        try:
            yield
        finally:
            self.decoder = search
        with search_processes(search, len(recorder)):
            hypotheses = search.search(search.join(recorder.batches))
        self.rows = [
            row._replace(hypothesis=nbest[0].text, confidence=nbest[0].confidence, nbest=nbest_entries(nbest))
            for row, nbest in zip(self.rows, hypotheses, strict=True)]

    def search_facts(self) -> dict[str, Any]:
        search = self.decoder
        if search is None:
            return {}
        if isinstance(search, JointSearch):
            return {"joint": True, "ctc_weight": search.ctc_weight, "beam": search.beam}
        if not isinstance(search, TokenSearch):
            return {"class": type(search).__name__}
        weights = search.weights
        return {"lm": None if search.lm is None else str(search.lm), "lm_weight": weights.lm,
                "word_score": weights.word, "beam": search.beam, "hot_words": search.hot_words.boosts}


def options(request: EvaluateRequest, keys: EncoderKeys) -> dict[str, Any]:
    """Return the given options of a search."""
    names = "lm", "lm_weight", "word_score", "beam", "nbest"
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    if request.hot_words:
        normalised: dict[str, float] = {}  # by the rules of the run's transcripts: case, punctuation
        for phrase, boost in hot_words(request.hot_words).items():
            text = keys.corpus.text(phrase)
            if not text:
                raise SbkitError(f"the run's text rules leave nothing of the hot word {phrase!r}",
                                 hint="write words as they are spoken")
            normalised[text] = max(boost, normalised.get(text, boost))
        given["hot_words"] = normalised
    return given


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
