"""The base of beam searches over CTC and transducers: language model, lexicon, hot words and worker processes."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sbkit.decode import arpa
from sbkit.decode import lm as language_models
from sbkit.decode.fusion import Fusion, FusionWeights
from sbkit.decode.hotwords import DEFAULT_BOOST, HotWords, phrase_boosts
from sbkit.decode.pieces import Pieces
from sbkit.decode.prefix_search import MAX_BATCH, TokenHypothesis
from sbkit.decode.spans import WORD_START, Spelling, TokenSpans
from sbkit.decode.streaming import StreamSearch
from sbkit.errors import SbkitError
from sbkit.system import helper_process

if TYPE_CHECKING:
    from torch import Tensor

    from sbkit.data.tokens import Tokenizer


@dataclass(frozen=True)
class Hypothesis:
    """One transcript. Scores are natural logarithms; the first in an utterance's list is the best."""

    text: str
    score: float  # the total: acoustic, language model, words, hot words
    acoustic: float  # the model's log-probability of the tokens
    spans: TokenSpans  # the tokens with their frames and confidences, as from greedy decoding

    @property
    def confidence(self) -> float | None:
        """The mean confidence of the tokens; None if there are none."""
        return float(self.spans.confidence.mean()) if len(self.spans) else None


class TokenSearch(ABC):
    """Beam search for the best transcripts of a batch. Files are loaded on first use, not by the constructor.

    It searches all utterances of a batch at once with array operations, in one process or in several
    (``workers``); its speed depends on how many tokens are likely per frame, not on the size of the vocabulary.

    tokenizer : the model's ``sbkit.data.tokens.Tokenizer``, or its pieces in order of their ids; can be set later
    lm : a language model over words or over the tokenizer's pieces: an ARPA file, ``.gz`` too
    lexicon : the only words that may be transcribed, or a file whose lines begin with them
    beam : hypotheses kept per utterance; None: 64 for CTC, 16 for a transducer
    token_beam : tokens considered per frame
    token_threshold : log-probability below which a token isn't considered
    width : how much worse than the best a hypothesis may be (natural logarithm)
    lm_weight, word_score, unknown_score : the factor of the language model's natural logarithms, the score of every
        word (by default 1.5, or 0 without a language model), and the score of a word that the language model
        doesn't know; ``sbkit evaluate --tune-lm`` finds the first two
    hot_words : words or phrases to expect, each with its boost, or all with ``hot_boost`` (natural logarithm)
    nbest : transcripts per utterance
    unit : ``word`` or ``piece``, the unit that the language model must have; None detects it
    workers : processes to search in besides this one
    """

    default_beam: ClassVar[int] = 64
    keeps_events: ClassVar[bool] = True
    """Whether :meth:`events` are small enough to be kept for a whole test set."""

    def __init__(self, tokenizer: Tokenizer | Sequence[str] | None = None, lm: str | Path | None = None,
                 lexicon: str | Path | Sequence[str] | None = None, beam: int | None = None, token_beam: int = 20,
                 token_threshold: float = -7.0, width: float = 12.0, lm_weight: float = 0.5,
                 word_score: float | None = None, unknown_score: float = -14.0,
                 hot_words: Mapping[str, float] | Sequence[str] | None = None,
                 hot_boost: float = DEFAULT_BOOST, nbest: int = 1, unit: str | None = None, blank_id: int = 0,
                 separator: str | None = WORD_START, workers: int = 0):
        beam = self.default_beam if beam is None else beam
        for name, value, low in (("beam", beam, 1), ("token_beam", token_beam, 1), ("nbest", nbest, 1),
                                 ("workers", workers, 0)):
            if not isinstance(value, int) or value < low:
                raise SbkitError("bad-value", f"beam search: {name} is {value!r}",
                                 hint=f"use a whole number of at least {low}", key=name, value=value)
        if not lm_weight >= 0:
            raise SbkitError("bad-value", f"beam search: lm_weight is {lm_weight}", hint="use 0 or more, such as 0.5",
                             key="lm_weight", value=lm_weight)
        if not width > 0 or not token_threshold < 0:
            raise SbkitError("bad-value", f"beam search: width is {width} and token_threshold {token_threshold}",
                             hint="width must be above 0 and token_threshold below, such as 12 and -7", key="width",
                             value=width)
        self.lm = lm or None
        self.lexicon = lexicon or None
        self.beam = beam
        self.token_beam = token_beam
        self.token_threshold = float(token_threshold)
        self.width = float(width)
        self.nbest = nbest
        if word_score is None:  # compensates the language model's penalty on each word
            word_score = FusionWeights.word if self.lm else 0.0
        self.weights = FusionWeights(float(lm_weight), float(word_score), float(unknown_score))
        self.hot_words = HotWords(phrase_boosts(hot_words, hot_boost))
        self.unit = unit
        self.blank_id = blank_id
        self.separator = separator
        self.workers = workers
        self.model_spelling: Spelling | None = None
        """How the model's tokens are written. None: the length of a frame is unknown, so pauses end no word."""
        self._tokenizer = tokenizer
        self._pool: ProcessPoolExecutor | None = None

    # ------------------------------------------------------------------ use

    @abstractmethod
    def events(self, scores: np.ndarray | Tensor, lengths: np.ndarray | Tensor) -> Any:  # what ``search`` takes
        """Run the first half of :meth:`decode`; :meth:`search` runs the second on its result."""

    @abstractmethod
    def join(self, batches: Sequence[Any]) -> Any:  # as above
        """Join results of :meth:`events`."""

    @abstractmethod
    def stream(self, spelling: Spelling) -> StreamSearch:
        """Make the search of one stream."""

    @abstractmethod
    def _search_spans(self, batch: Any, weights: FusionWeights, nbest: int,  # as above
                      ) -> list[list[tuple[TokenHypothesis, TokenSpans]]]:
        """Search, and return the spans of each transcript's tokens."""

    def decode(self, scores: np.ndarray | Tensor, lengths: np.ndarray | Tensor) -> list[list[Hypothesis]]:
        """The ``nbest`` transcripts of each utterance.

        scores : [B, T, ...] the model's output for each frame, a tensor on any device or an array
        lengths : [B] frames of each utterance, integers
        """
        return self.search(self.events(scores, lengths))

    def search(self, batch: Any,  # as above
               weights: FusionWeights | None = None) -> list[list[Hypothesis]]:
        """Run the second half of :meth:`decode` on the result of :meth:`events`, optionally with other weights."""
        weights = weights or self.weights
        count = max(self.workers + 1, math.ceil(len(batch) / MAX_BATCH))
        cuts = np.linspace(0, len(batch), min(len(batch), count) + 1).astype(int).tolist()
        parts = [batch.part(start, stop) for start, stop in pairwise(cuts)]
        if self.workers and len(parts) > 1:
            results = self._search_in_processes(parts, weights)
        else:
            results = [self._search(part, weights) for part in parts]
        return [hypotheses for result in results for hypotheses in result]

    def _search_in_processes(self, parts: Sequence[Any],  # as above
                             weights: FusionWeights) -> list[list[list[Hypothesis]]]:
        """Search the first part in this process and the others in worker processes."""
        if self._pool is None:
            self.load()  # so that errors are raised once, in this process
            # Spawned, because a fork of a process with threads and a device may hang.
            with helper_process.without_working_directory():
                self._pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _init_worker, (self,))
        try:
            with helper_process.without_working_directory():
                futures = [self._pool.submit(_search_part, part, weights) for part in parts[1:]]
            return [self._search(parts[0], weights), *(future.result() for future in futures)]
        except BrokenProcessPool as error:
            self.close()
            raise SbkitError("worker-died", "a worker process of the beam search died",
                             hint="is there enough memory? use fewer workers") from error

    def spelling(self, frame_seconds: float) -> Spelling:
        """Return how the search's own tokens are written, for :meth:`stream` and for a transcript's words."""
        return Spelling(self.pieces.texts, frame_seconds, self._silent, self.separator)

    @property
    def tokenizer(self) -> Any:  # a Tokenizer or pieces, as it was given
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | Sequence[str] | None) -> None:
        self.close()
        self._tokenizer = tokenizer
        for name in ("pieces", "fusion", "_silent"):
            self.__dict__.pop(name, None)

    # ---------------------------------------------------------------- loaded

    def load(self) -> TokenSearch:
        """Load and check everything now rather than with the first batch."""
        _ = self.fusion
        return self

    @cached_property
    def pieces(self) -> Pieces:
        if self._tokenizer is None:
            raise SbkitError("no-tokenizer", "the beam search has no tokenizer",
                             hint="give it one: tokenizer: !ref <tokenizer>")
        pieces = self._tokenizer.pieces() if hasattr(self._tokenizer, "pieces") else self._tokenizer
        return Pieces(pieces, self.separator)

    @cached_property
    def _silent(self) -> frozenset[int]:
        return frozenset(i for i, text in enumerate(self.pieces.texts) if text not in self.pieces.spoken)

    @cached_property
    def fusion(self) -> Fusion:
        """Language model, lexicon and hot words, checked against the tokens."""
        pieces = self.pieces
        model = None
        per_piece = False
        if self.lm is not None:
            model = arpa.read(self.lm)
            per_piece = language_models.unit_of(model, pieces, self.unit, str(self.lm)) == "piece"
        for word in self.hot_words.words:
            if not pieces.spells(word):
                raise SbkitError("unspellable-word", f"the hot word {word!r} can't be spelled with this model's tokens",
                                 hint="write it as in the transcripts", value=word)
        lexicon = None if self.lexicon is None else self._read_lexicon(self.lexicon)
        return Fusion(pieces, model, lexicon, self.hot_words, per_piece)

    def _read_lexicon(self, lexicon: str | Path | Sequence[str]) -> list[str]:
        """Return the distinct words of a file or list, most of which the tokens must be able to spell."""
        name = "the lexicon"
        if isinstance(lexicon, (str, Path)):
            name = str(lexicon)
            lexicon = [line.split()[0] for line in language_models.read_texts([lexicon]) if line]
        words = list(dict.fromkeys(lexicon))
        spelled = sum(map(self.pieces.spells, words))
        if spelled * 2 <= len(words):
            raise SbkitError("unspellable-word", f"{name}: {len(words) - spelled} of its {len(words)} words can't be "
                             "spelled with this model's tokens", hint="write them as in the transcripts, one per line")
        return words

    # ---------------------------------------------------------------- search

    def _search(self, batch: Any,  # as above
                weights: FusionWeights) -> list[list[Hypothesis]]:
        # With a model over pieces, several spellings of a transcript can be found; only the best is kept.
        nbest = 2 * self.nbest if self.fusion.per_piece else self.nbest
        results = []
        for hypotheses in self._search_spans(batch, weights, nbest):
            best_by_text: dict[str, Hypothesis] = {}
            for hypothesis, spans in hypotheses:
                text = self._text(spans)
                best_by_text.setdefault(text, Hypothesis(text, hypothesis.score, hypothesis.acoustic, spans))
            results.append(list(best_by_text.values())[:self.nbest])
        return results

    def _text(self, spans: TokenSpans) -> str:
        spelling = self.model_spelling or replace(self.spelling(1.0), pause_seconds=math.inf)
        return spelling.text(spans)

    # -------------------------------------------------------------- processes

    def close(self) -> None:
        """End the processes; the next search starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        loaded = ("fusion", "pieces", "_silent")  # each process loads these itself
        return {name: value for name, value in self.__dict__.items() if name not in loaded} | {"_pool": None}


_worker_search: TokenSearch | None = None  # set in a worker process


def _init_worker(search: TokenSearch) -> None:
    global _worker_search
    os.environ["OMP_NUM_THREADS"] = "1"
    _worker_search = search


def _search_part(part: Any,  # of what ``search`` takes
                 weights: FusionWeights) -> list[list[Hypothesis]]:
    assert _worker_search is not None, "_init_worker runs first"
    return _worker_search._search(part, weights)
