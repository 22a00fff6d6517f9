"""From log-probabilities to tokens: the best label of every frame, or a search with language model and hot words."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from sbkit.decode.best_path import best_path
from sbkit.decode.spans import Spans, collapse
from sbkit.errors import SbkitError
from sbkit.export.vocabulary import Vocabulary


class Found(NamedTuple):
    """Tokens, whose frames count from ``frame`` of the recording on."""

    frame: int
    spans: Spans


class Decoder(Protocol):
    """Keeps little of each stretch of a recording, and finds the tokens once all of it is there."""

    at_once: int
    """Recordings that are best finished together."""
    joins: bool
    """Whether a word may go on over the end of a stretch."""

    def keep(self, log_probs: np.ndarray) -> Any:
        """What is needed of a stretch [T, V] that ends in a pause."""

    def tokens(self, recordings: Sequence[Sequence[Any]]) -> list[list[Found]]:
        """The tokens of recordings, each given as its stretches in order."""

    def frames(self, kept: Any) -> int:
        """Of a stretch."""

    def after(self, stretches: Sequence[Any], frame: int) -> list[Any]:
        """What of stretches lies from a frame on: their end, or one where a token begins if it joins them."""


class Greedy:
    """The best label of every frame."""

    at_once = 1
    joins = True

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary, self._blank = vocabulary, vocabulary.config.blank_id

    def keep(self, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]), self._blank)
        self._vocabulary.check(labels)
        return labels[0].astype(np.int32), confidence[0]

    def tokens(self, recordings: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]) -> list[list[Found]]:
        found = []
        for stretches in recordings:
            labels, confidence = map(np.concatenate, zip(*stretches, strict=True))
            spans = collapse(labels[None].astype(np.int64), confidence[None], blank_id=self._blank)[0]
            found.append([Found(0, spans)])
        return found

    def frames(self, kept: tuple[np.ndarray, np.ndarray]) -> int:
        return len(kept[0])

    def after(self, stretches: Sequence[tuple[np.ndarray, np.ndarray]], frame: int) -> list[Any]:
        labels, confidence = map(np.concatenate, zip(*stretches, strict=True))
        return [(labels[frame:].copy(), confidence[frame:].copy())]


class Beam:
    """The best transcript by the model together with a language model, a lexicon and hot words.

    A search remembers what it looked up in its language model, so one thread searches at a time.

    Arguments
    ---------
    options : of ``sbkit.decode.beam.BeamSearch``: lm, lm_weight, word_score, hot_words, hot_boost, beam, ...
    """

    at_once = 32
    joins = False

    def __init__(self, vocabulary: Vocabulary, options: Mapping[str, Any]):
        from sbkit.decode.beam import BeamSearch
        from sbkit.decode.posteriors import Events

        config = vocabulary.config
        try:
            self._search = BeamSearch(vocabulary.symbols, blank_id=config.blank_id, separator=config.word_separator,
                                      **options)
        except TypeError as error:
            raise SbkitError(f"beam search: {error}") from None
        self._search.load()  # what is wrong with the files is told now
        self._join = Events.join
        self._lock = threading.Lock()

    def keep(self, log_probs: np.ndarray) -> tuple[Any, int]:
        with self._lock:
            return self._search.events(log_probs[None], np.array([len(log_probs)])), len(log_probs)

    def tokens(self, recordings: Sequence[Sequence[tuple[Any, int]]]) -> list[list[Found]]:
        with self._lock:
            best = iter(self._search.search(self._join([each for stretches in recordings for each, _ in stretches])))
        found = []
        for stretches in recordings:
            frame, parts = 0, []
            for _, frames in stretches:
                hypotheses = next(best)
                if hypotheses:
                    parts.append(Found(frame, hypotheses[0].spans))
                frame += frames
            found.append(parts)
        return found

    def frames(self, kept: tuple[Any, int]) -> int:
        return kept[1]

    def after(self, stretches: Sequence[tuple[Any, int]], frame: int) -> list[Any]:
        ends = accumulate(map(self.frames, stretches))
        return [each for each, end in zip(stretches, ends, strict=True) if end > frame]


def decoder(vocabulary: Vocabulary, search: Mapping[str, Any] | None) -> Decoder:
    """A search where any of its options is given."""
    return Beam(vocabulary, search) if search else Greedy(vocabulary)
