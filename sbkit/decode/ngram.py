"""An n-gram language model as sorted integer arrays: scores many (history, word) pairs per call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sbkit.decode import workspace
from sbkit.decode.workspace import Workspace, chunks

UNKNOWN = "<unk>"
BEGIN = "<s>"
END = "</s>"
SPECIAL = (UNKNOWN, BEGIN, END)
MAX_ORDER = 32  # of models that are read; character models have up to 20
LN10 = math.log(10)
_SENTENCE = 20  # words for which a sentence's own array has memory
NEVER = -99.0  # ARPA's log10 of the probability zero
_MAX_EXPONENT = 700.0  # of a perplexity: a larger one is no float


class Quality(NamedTuple):
    """How well a model predicts a text. Sentence ends count as words, as in other tools."""

    perplexity: float  # over the words that the model knows
    perplexity_with_unknown: float
    words: int  # without sentence ends
    unknown: int
    sentences: int


class Level(NamedTuple):
    """All n-grams of one order, sorted by (context, word); arrays of equal length [N].

    ``context`` is the row of the first words in the level below (0 for single words), ``word`` the id of the last
    word. ``log10`` and ``backoff`` are as in an ARPA file.
    """

    context: np.ndarray
    word: np.ndarray
    log10: np.ndarray
    backoff: np.ndarray


class NGram:
    """A back-off model. A state is a history that the model can distinguish; 0 is the empty one.

    words : the vocabulary; row i of the first level is word i
    levels : one per order
    files : where large arrays are; by default in memory

    ``ids`` is the index of each word, ``unknown`` and ``end`` the ids of the unknown word and the sentence end,
    ``empty`` the state without a history, ``start`` the state at a sentence start.
    """

    def __init__(self, words: Sequence[str], levels: Sequence[Level], files: Workspace | None = None):
        self.words = list(words)
        self.levels = list(levels)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if UNKNOWN not in self.ids:  # a closed vocabulary
            self._add_unknown()
        self.unknown = self.ids[UNKNOWN]
        self.end = self.ids.get(END, self.unknown)
        self.empty = np.zeros((), np.int64)
        self.start = np.array(self.ids[BEGIN] + 1 if BEGIN in self.ids else 0)

        # The table of arcs: n-gram i leads from the state of its context to state ``_next[i]``. The state of n-gram i
        # is i + 1, numbered across all orders; ``_parent`` is the state of the longest known n-gram that it ends with.
        self.files = files or Workspace()
        self._size = len(self.words)
        count = sum(self.counts)
        self._keys = self.files.empty(count, np.int64)
        self._ln = self.files.empty(count, np.float32)
        self._next = self.files.full(count, 0, np.int32)
        self._backoff = self.files.full(count + 1, 0, np.float32)
        self._parent = self.files.full(count + 1, 0, np.int32)
        self._link_arcs(self._fill_arcs())

    def _add_unknown(self) -> None:
        row = (0, len(self.words), NEVER, 0.0)
        self.ids[UNKNOWN] = len(self.words)
        self.words.append(UNKNOWN)
        self.levels[0] = Level(*(np.append(column, np.asarray(value, column.dtype))
                                 for column, value in zip(self.levels[0], row, strict=True)))

    def _fill_arcs(self) -> np.ndarray:
        """Fill in the keys and scores of all arcs.

        Returns [N + 1] which states are needed: those of histories with longer n-grams or a backoff weight.
        """
        is_state = self.files.full(len(self._keys) + 1, 0, np.bool_)
        offset = 0  # of the level's n-grams among all
        first_context_state = 0
        for number, level in enumerate(self.levels):
            for part in chunks(len(level.word)):
                arcs = slice(offset + part.start, offset + part.stop)
                states_of_arcs = slice(arcs.start + 1, arcs.stop + 1)
                contexts = level.context[part].astype(np.int64) + first_context_state
                is_state[contexts] = True
                self._keys[arcs] = contexts * self._size + level.word[part]
                self._ln[arcs] = level.log10[part].astype(np.float32) * np.float32(LN10)
                backoff = level.backoff[part].astype(np.float32) * np.float32(LN10)
                self._backoff[states_of_arcs] = backoff
                is_state[states_of_arcs] |= backoff != 0
            first_context_state = offset + 1
            offset += self.counts[number]
        return is_state

    def _link_arcs(self, is_state: np.ndarray) -> None:
        """Fill in the states to which arcs lead: n-grams of an order need those of the order below."""
        offset = 0
        for number, level in enumerate(self.levels):
            for part in chunks(len(level.word)):
                rows = np.arange(offset + part.start, offset + part.stop)
                if number:
                    self._parent[rows + 1] = self._longest_suffixes(rows, level.word[part])
                parent = self._parent[rows + 1]
                shorter = np.where(parent > 0, self._next[parent - 1], 0)
                if number + 1 < self.order:
                    self._next[rows] = np.where(is_state[rows + 1], rows + 1, shorter)
                else:  # nothing is longer than an n-gram of the highest order
                    self._next[rows] = shorter
            offset += self.counts[number]

    def _longest_suffixes(self, rows: np.ndarray, words: np.ndarray) -> np.ndarray:
        """The states of the longest known n-grams that n-grams in these rows end with; ``words`` are their last."""
        suffixes = np.zeros(len(rows), dtype=np.int32)
        todo = np.arange(len(rows))
        states = self._parent[self._keys[rows] // self._size]  # of the histories
        while todo.size:
            arc, exists = self._find(states, words[todo])
            suffixes[todo[exists]] = arc[exists] + 1
            states = self._parent[states[~exists]]
            todo = todo[~exists]
        return suffixes

    @property
    def counts(self) -> list[int]:
        """The number of n-grams of each order."""
        return [len(level.word) for level in self.levels]

    # ------------------------------------------------------------- scoring

    def suffixes(self, number: int, part: slice) -> np.ndarray:
        """The rows, in the level below, of some of a level's n-grams without their first words; -1 if missing."""
        offset = sum(self.counts[:number])
        parent = self._parent[offset + 1 + part.start:offset + 1 + part.stop]
        below = offset - self.counts[number - 1]
        return np.where(parent > below, parent - 1 - below, -1)

    def after_shorter(self, number: int, part: slice) -> np.ndarray:
        """The natural log-probabilities of the last words of some of a level's n-grams given histories one word
        shorter."""
        offset = sum(self.counts[:number])
        histories = self._keys[offset + part.start:offset + part.stop] // self._size
        return self.score(self._parent[histories], self.levels[number].word[part])[0]

    def _find(self, states: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the n-gram of (state, word), and whether it exists. Every word exists after the empty history."""
        wanted = states * np.int64(self._size) + words
        arc = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return arc, self._keys[arc] == wanted

    def score(self, states: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Natural logarithms of the probabilities [N] of words [N] after states [N], and the states after."""
        scores = np.zeros(len(words), dtype=np.float32)
        after = np.zeros(len(words), dtype=np.int32)
        todo = np.arange(len(words))
        while todo.size:
            arc, exists = self._find(states, words)
            scores[todo[exists]] += self._ln[arc[exists]]
            after[todo[exists]] = self._next[arc[exists]]
            # The others back off to a history one word shorter.
            todo = todo[~exists]
            words = words[~exists]
            states = states[~exists]
            scores[todo] += self._backoff[states]
            states = self._parent[states]
        return scores, after

    @property
    def order(self) -> int:
        return len(self.counts)

    def lookup(self, words: Iterable[str]) -> np.ndarray:
        """Look up the ids of words; words outside the vocabulary get the unknown word's."""
        return np.fromiter((self.ids.get(word, self.unknown) for word in words), dtype=np.int64)

    def sentence(self, text: str) -> float:
        """The natural logarithm of a sentence's probability, including its end."""
        state = self.start[None]
        total = 0.0
        for word in [*self.lookup(text.split()), self.end]:
            score, state = self.score(state, np.array([word]))
            total += float(score[0])
        return total

    def quality(self, texts: Iterable[str]) -> Quality:
        """Measure the perplexity of a text, and how many of its words are unknown."""
        known_score = 0.0
        unknown_score = 0.0
        unknown_words = 0
        tokens = 0  # words and ends of sentences
        sentence_count = 0
        for sentences in self._batches(texts):
            ids, scores = self._scored(sentences)
            is_unknown = ids == self.unknown
            unknown_words += int(is_unknown.sum())
            known_score += float(scores[~is_unknown].sum(dtype=np.float64))
            unknown_score += float(scores[is_unknown].sum(dtype=np.float64))
            tokens += len(ids)
            sentence_count += len(sentences)
        mean_known = known_score / max(1, tokens - unknown_words)
        mean = (known_score + unknown_score) / max(1, tokens)
        return Quality(
            perplexity=math.exp(min(_MAX_EXPONENT, -mean_known)),
            perplexity_with_unknown=math.exp(min(_MAX_EXPONENT, -mean)),
            words=tokens - sentence_count,
            unknown=unknown_words,
            sentences=sentence_count,
        )

    def _batches(self, texts: Iterable[str]) -> Iterator[list[np.ndarray]]:
        """Yield the ids of sentences, some of them at a time."""
        sentences: list[np.ndarray] = []
        words = 0
        for text in texts:
            sentences.append(self.lookup(text.split()))
            words += len(sentences[-1]) + _SENTENCE
            if words > workspace.CHUNK:
                yield sentences
                sentences = []
                words = 0
        yield sentences

    def _scored(self, sentences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The words of sentences, including their ends, and natural logarithms of their probabilities."""
        sentences = sorted(sentences, key=len, reverse=True)
        lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
        flat = np.concatenate([np.append(sentence, self.end) for sentence in sentences] or [np.zeros(0, np.int64)])
        scores = np.zeros(len(flat), np.float32)
        begins = np.cumsum(lengths + 1) - lengths - 1
        state = np.repeat(self.start[None], len(sentences), axis=0)
        for step in range(int(lengths.max(initial=-1)) + 1):
            at = begins[:int(np.searchsorted(-lengths, -step, side="right"))] + step
            scores[at], state = self.score(state[:len(at)], flat[at])
        return flat, scores
