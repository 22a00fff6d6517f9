"""Interface of n-gram language models, independent of how they are stored."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

UNKNOWN, BEGIN, END = SPECIAL = ("<unk>", "<s>", "</s>")
MAX_ORDER = 32  # of models that are read; character models have up to 20
LN10 = math.log(10)


class Quality(NamedTuple):
    """How well a model predicts a text. Sentence ends count as words, as in other tools."""

    perplexity: float  # over the words that the model knows
    perplexity_with_unknown: float
    words: int  # without sentence ends
    unknown: int
    sentences: int

    @property
    def unknown_share(self) -> float:
        return 100 * self.unknown / max(1, self.words)


class LanguageModel(ABC):
    """A back-off model. A state represents a history as one or several numbers [N, ...].

    ``words`` is the vocabulary, ``ids`` the index of each word, ``unknown`` and ``end`` the ids of the unknown word and
    the sentence end, ``empty`` the state without a history, ``start`` the state at a sentence start, ``counts`` the
    number of n-grams of each order.
    """

    words: list[str]
    ids: dict[str, int]
    unknown: int
    end: int
    empty: np.ndarray
    start: np.ndarray
    counts: list[int]

    @abstractmethod
    def score(self, states: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Natural logarithms of the probabilities [N] of words [N] after states [N], and the states after."""

    @property
    def order(self) -> int:
        return len(self.counts)

    def lookup(self, words: Iterable[str]) -> np.ndarray:
        """Look up the ids of words; words outside the vocabulary get the unknown word's."""
        get, unknown = self.ids.get, self.unknown
        return np.fromiter((get(word, unknown) for word in words), dtype=np.int64)

    def sentence(self, text: str) -> float:
        """The natural logarithm of a sentence's probability, including its end."""
        state, total = self.start[None], 0.0
        for word in [*self.lookup(text.split()), self.end]:
            score, state = self.score(state, np.array([word]))
            total += float(score[0])
        return total

    def quality(self, texts: Iterable[str]) -> Quality:
        """Measure the perplexity of a text, and how many of its words are unknown."""
        sentences = sorted((self.lookup(text.split()) for text in texts), key=len, reverse=True)
        lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
        flat = np.concatenate([np.append(sentence, self.end) for sentence in sentences] or [np.zeros(0, np.int64)])
        begins = np.cumsum(lengths + 1) - lengths - 1
        state = np.repeat(self.start[None], len(sentences), axis=0)
        known, unknown, missing = 0.0, 0.0, 0
        for step in range(int(lengths.max(initial=-1)) + 1):
            active = int(np.searchsorted(-lengths, -step, side="right"))
            words = flat[begins[:active] + step]
            scores, after = self.score(state[:active], words)
            state = after
            out = words == self.unknown
            missing += int(out.sum())
            known += float(scores[~out].sum(dtype=np.float64))
            unknown += float(scores[out].sum(dtype=np.float64))
        total = len(flat)
        return Quality(
            perplexity=math.exp(min(700.0, -known / max(1, total - missing))),
            perplexity_with_unknown=math.exp(min(700.0, -(known + unknown) / max(1, total))),
            words=total - len(sentences), unknown=missing, sentences=len(sentences),
        )
