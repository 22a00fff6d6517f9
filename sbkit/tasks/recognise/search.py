"""The search of ``sbkit evaluate``: builds it, tunes its weights, and runs it over a whole test set at once."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from speechbrain.core import Stage
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.decode import kenlm_binary
from sbkit.decode.joint import JointSearch
from sbkit.decode.search_options import hot_words
from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import TokenSearch
from sbkit.errors import SbkitError
from sbkit.runs.evaluation import EvaluateRequest
from sbkit.system.cores import usable_cores
from sbkit.tasks.asr import ASR, TranscribedUtterance, choices
from sbkit.tasks.recognise import lm_weights
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.live import LiveTest
from sbkit.train.distributed import ranks

_PAYS = 1000  # utterances for which another process is worth its start
LARGE = 200e6  # bytes of an ARPA file that is too large to hold in every process


class SearchingTask(ASR):
    """A recogniser whose tests may be searched, by what ``decoder`` is or an evaluation asks for."""

    Search: ClassVar[type[TokenSearch]]
    keys: EncoderKeys
    decoder: Any  # of any kind
    """A search, a recorder in its place, or a recipe's own; None: none."""
    live: LiveTest | None
    """Hears tests in chunks; None: none does."""

    @abstractmethod
    def greedy(self, scores: Tensor, frames: Tensor) -> Iterable[TokenSpans]:
        """Decode what a ``Search`` takes [B, T, ...], and frames [B], without one."""

    def equip(self, search: Any) -> Any:  # a TokenSearch, or a recipe's own
        """Give a search what it needs of the model; returns it."""
        if search.tokenizer is None:
            search.tokenizer = self.keys.tokenizer
        return search

    def transcribe(self, scores: Tensor, frames: Tensor, batch: Batch, stage: Stage, live: Sequence[Any] = (),
                   *more: Any) -> None:  # of ``LiveTest.scores``; what else a recipe's own search takes
        """Add a row for each utterance of a batch: what ``decoder`` finds in a test, otherwise greedily."""
        if not batch.weight:  # a placeholder for an empty batch
            return
        decoder = self.equip(self.decoder) if stage == Stage.TEST and self.decoder is not None else None
        if self.live is not None and live:
            self.rows += self.live.rows(live, frames, batch, decoder)
        elif decoder is None:
            found = list(self.greedy(scores, frames))
            texts = (self.keys.tokenizer.decode(spans.ids.tolist()) for spans in found)
            confidences = (float(spans.confidence.mean()) if len(spans) else None for spans in found)
            self.rows += map(TranscribedUtterance, batch.ids, batch.texts, texts, confidences)
        else:
            for name, text, several in zip(batch.ids, batch.texts, decoder.decode(scores, frames, *more), strict=True):
                best = several[0]
                self.rows.append(TranscribedUtterance(name, text, best.text, best.confidence, choices(several)))

    def take_search(self, request: EvaluateRequest) -> None:
        self.decoder = build(request, self)

    def tune_search(self, manifest: Manifest, hear: Callable[[Manifest], object]) -> dict[str, Any]:
        live, self.live = self.live, None  # tuning needs the last transcripts alone, with chunks of the first size
        try:
            return tune(self, manifest, hear)
        finally:
            self.live = live

    def searching(self) -> contextlib.AbstractContextManager[object]:
        return over_all(self) if self.live is None else contextlib.nullcontext()

    def search_facts(self) -> dict[str, Any]:
        return {} if self.decoder is None else describe(self.decoder)


def build(request: EvaluateRequest, brain: SearchingTask) -> Any:  # a TokenSearch, or a recipe's own
    """Build and load the search that an ``EvaluateRequest`` describes; the recipe's own if it describes none."""
    if request.joint:
        raise SbkitError(f"{type(brain).__name__} has no attention decoder, so it can't use --joint",
                         hint="leave it out")
    if request.ctc_weight is not None:
        raise SbkitError("--ctc-weight is for the search with CTC and the attention decoder", hint="add --joint")
    if not request.lm and (request.tune_lm or request.lm_weight is not None):
        raise SbkitError("there is no language model to weight", hint="name one: --lm FILE.arpa (see sbkit lm)")
    search, keys = brain.keys.decoder, brain.keys
    if given := options(request, keys):
        search = brain.Search(keys.tokenizer, blank_id=keys.blank_index, **given)
    if search is None:
        return None
    brain.equip(search)
    return search.load() if isinstance(search, TokenSearch) else search


def options(request: EvaluateRequest, keys: EncoderKeys) -> dict[str, Any]:
    """Return the options of a search that were given."""
    names = "lm", "lm_weight", "word_score", "beam", "nbest"
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    if request.hot_words:
        given["hot_words"] = _normalised(hot_words(request.hot_words), keys.corpus.text)
    return given


def _normalised(phrases: Mapping[str, float], rules: Callable[[str], str]) -> dict[str, float]:
    """Normalise hot words by the rules of the run's transcripts: case, punctuation."""
    normalised: dict[str, float] = {}
    for phrase, boost in phrases.items():
        text = rules(phrase)
        if not text:
            raise SbkitError(f"the run's text rules leave nothing of the hot word {phrase!r}",
                             hint="write words as they are spoken")
        normalised[text] = max(boost, normalised.get(text, boost))
    return normalised


def describe(search: object) -> dict[str, Any]:
    """Describe a search for result.json."""
    if isinstance(search, JointSearch):
        return {"joint": True, "ctc_weight": search.ctc_weight, "beam": search.beam}
    if not isinstance(search, TokenSearch):
        return {"class": type(search).__name__}
    weights = search.weights
    return {"lm": None if search.lm is None else str(search.lm), "lm_weight": weights.lm, "word_score": weights.word,
            "beam": search.beam, "hot_words": search.hot_words.boosts}


def tune(brain: SearchingTask, manifest: Manifest, hear: Callable[[Manifest], object]) -> dict[str, Any]:
    """Give the brain's search the weights that make the fewest errors on dev; returns facts for result.json."""
    search = brain.decoder
    manifest = lm_weights.some_of(manifest)
    brain.decoder = recorder = lm_weights.Recorder(search, brain.greedy)
    hear(manifest)
    with search_processes(search, len(recorder)):
        tuned = lm_weights.tune(recorder, brain.rows)
    search.weights = tuned.weights
    brain.decoder = search
    if ranks.is_main():
        print(f"tuned on {len(manifest)} utterances of dev: --lm-weight {tuned.weights.lm:g} --word-score "
              f"{tuned.weights.word:g} (WER {tuned.rate:.2f} %, greedily {tuned.greedy:.2f} %)")
    return {"tuned_on": len(manifest), "dev_WER": tuned.rate, "dev_WER_greedy": tuned.greedy}


@contextlib.contextmanager
def over_all(brain: SearchingTask) -> Iterator[None]:
    """Context in which a search that ``keeps_all`` only records; at its end it searches all utterances and updates the
    brain's rows.

    It is faster on many utterances at once, and can use several processes.
    """
    search = brain.decoder
    if not isinstance(search, TokenSearch) or not search.keeps_all:
        yield
        return
    brain.decoder = recorder = lm_weights.Recorder(search, brain.greedy)
    try:
        yield
    finally:
        brain.decoder = search
    with search_processes(search, len(recorder)):
        found = search.search(search.join(recorder.batches))
    brain.rows = [row._replace(hypothesis=hypotheses[0].text, confidence=hypotheses[0].confidence,
                               nbest=choices(hypotheses))
                  for row, hypotheses in zip(brain.rows, found, strict=True)]


@contextlib.contextmanager
def search_processes(search: TokenSearch, utterances: int) -> Iterator[None]:
    """Context in which a search has as many processes as are worth their start."""
    before = search.workers
    small = search.lm is None or kenlm_binary.recognise(search.lm) or os.path.getsize(search.lm) < LARGE
    if small and search.keeps_all:
        search.workers = max(before, min(usable_cores() // ranks.world_size(), utterances // _PAYS) - 1)
    try:
        yield
    finally:
        search.close()
        search.workers = before
