"""Scores added to the acoustic score: a language model over words or pieces, a lexicon, hot words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sbkit.decode import hashing
from sbkit.decode.hotwords import HotWords
from sbkit.decode.ngram import SPECIAL, NGram
from sbkit.decode.pieces import Pieces

# The score of a word outside the lexicon: lower than any other path's, but without another the search still has a
# result.
FORBIDDEN = -1e4


@dataclass(frozen=True)
class FusionWeights:
    """Weights of the scores added to the acoustic score; natural logarithms."""

    lm: float = 0.5
    word: float = 1.5  # for every word
    unknown: float = -14.0  # for a word outside the language model and hot words


class Fusion:
    """Scores complete words, unfinished words by the best completion, and pieces.

    model : over words or over pieces, or None
    lexicon : the only words allowed, or None for any
    per_piece : the model is over pieces
    """

    def __init__(self, pieces: Pieces, model: NGram | None, lexicon: Collection[str] | None, hot: HotWords,
                 per_piece: bool = False):
        self.pieces = pieces
        self.model = model
        self.hot = hot
        self.per_piece = per_piece
        self.closed = lexicon is not None
        self.start = np.zeros((), np.int64) if model is None else model.start
        """The state of the language model at an utterance's start."""
        self._word_model = None if per_piece else model
        if per_piece and model is not None:
            self.piece_ids = np.array([model.ids.get(text, model.unknown) for text in pieces.texts], np.int64)
        self.strict = self.closed or self._word_model is not None
        """Whether words can be unknown."""

        words = self._known_words(lexicon)
        encoded = [word.encode("utf-8", "surrogatepass") for word in words]
        ids = np.zeros(len(words), np.int64)
        unigram = np.zeros(len(words), np.float32)
        self._unknown_unigram = 0.0
        if self._word_model is not None:
            empty = self._word_model.empty[None]
            unknown = self._word_model.unknown
            ids = np.array([self._word_model.ids.get(word, unknown) for word in words], np.int64)
            unigram, _ = self._word_model.score(np.repeat(empty, len(ids), axis=0), ids)
            unknown_scores, _ = self._word_model.score(empty, np.array([unknown]))
            self._unknown_unigram = float(unknown_scores[0])
        self._vocabulary = hashing.HashTable(hashing.hash_all(encoded), ids)
        self._prefixes = _best_by_prefix(encoded, unigram)

    def _known_words(self, lexicon: Collection[str] | None) -> list[str]:
        """The lexicon's words or, without one, the language model's; and the hot words."""
        if lexicon is not None:
            words = list(lexicon)
        elif self._word_model is not None:
            words = [word for word in self._word_model.words if word not in SPECIAL]
        else:
            words = []
        known = set(words)
        return words + [word for word in self.hot.words if word not in known]

    def complete(self, states: np.ndarray, words: np.ndarray, weights: FusionWeights) -> tuple[np.ndarray, np.ndarray]:
        """The scores of complete words [N], given by hash, after states [N], and the states after them."""
        gain = np.full(len(words), weights.word)
        if not self.strict:
            return gain, states
        ids = self._vocabulary.get(words, -1)
        unknown = ids < 0
        gain[unknown] += FORBIDDEN if self.closed else weights.unknown
        if self._word_model is None:
            return gain, states
        ids[unknown] = self._word_model.unknown
        scores, after = self._word_model.score(states, ids)
        return gain + weights.lm * scores, after

    def expect(self, words: np.ndarray, weights: FusionWeights) -> np.ndarray:
        """The best score that unfinished words [N] can get; 0 without an unfinished word."""
        if not self.strict:
            return np.zeros(len(words))
        best = self._prefixes.get(words, -np.inf)
        unknown = np.isneginf(best)
        best = weights.lm * np.where(unknown, self._unknown_unigram, best) + weights.word
        best[unknown] += FORBIDDEN if self.closed else weights.unknown
        best[words == 0] = 0.0
        return best

    def extend(self, states: np.ndarray, tokens: np.ndarray, weights: FusionWeights) -> tuple[np.ndarray, np.ndarray]:
        """The scores of tokens [N] after states [N] with a model over pieces, and the states after them."""
        assert self.model is not None, "only a model over pieces extends"
        scores, after = self.model.score(states, self.piece_ids[tokens])
        return weights.lm * scores.astype(np.float64), after

    def finish(self, states: np.ndarray, weights: FusionWeights) -> np.ndarray:
        """The scores of the end of an utterance after states [N]."""
        if self.model is None:
            return np.zeros(len(states))
        scores, _ = self.model.score(states, np.full(len(states), self.model.end))
        return weights.lm * scores.astype(np.float64)


def _best_by_prefix(words: Sequence[bytes], scores: np.ndarray) -> hashing.HashTable:
    """All prefixes of words [N], each with the best score of its words."""
    hashes, begins = hashing.prefixes(words)
    best = np.repeat(scores, np.diff(begins))
    if len(hashes):
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        first_of_prefix = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        best = np.maximum.reduceat(best[order], first_of_prefix)
        hashes = hashes[first_of_prefix]
    return hashing.HashTable(hashes, best)
