"""An n-gram language model as sorted integer arrays: scores many (history, word) pairs per call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sbkit.decode import workspace
from sbkit.decode.workspace import Workspace, chunks

UNKNOWN, BEGIN, END = SPECIAL = ("<unk>", "<s>", "</s>")
MAX_ORDER = 32  # of models that are read; character models have up to 20
LN10 = math.log(10)
_SENTENCE = 20  # words for which a sentence's own array has memory
NEVER = -99.0  # ARPA's log10 of the probability zero


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
        self.words, self.levels = list(words), list(levels)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if UNKNOWN not in self.ids:  # a closed vocabulary
            new = len(self.words)
            self.ids[UNKNOWN] = new
            self.words.append(UNKNOWN)
            self.levels[0] = Level(*(np.append(column, np.asarray(value, column.dtype)) for column, value in
                                     zip(self.levels[0], (0, new, NEVER, 0.0), strict=True)))
        self.unknown = self.ids[UNKNOWN]
        self.end = self.ids.get(END, self.unknown)
        self.empty = np.zeros((), np.int64)
        self.start = np.array(self.ids[BEGIN] + 1 if BEGIN in self.ids else 0)
        # The table of arcs: n-gram i leads from the state of its context to state ``_next[i]``. The state of n-gram i
        # is i + 1, numbered across all orders.
        files = self.files = files or Workspace()
        size = self._size = len(self.words)
        offsets = np.cumsum([0, *self.counts])
        count = int(offsets[-1])
        self._keys, self._ln = files.empty(count, np.int64), files.empty(count, np.float32)
        self._backoff = files.full(count + 1, 0, np.float32)
        self._parent, self._next = files.full(count + 1, 0, np.int32), files.full(count, 0, np.int32)
        is_state = files.full(count + 1, 0, np.bool_)  # a history without longer n-grams or a backoff weight is none
        for number, level in enumerate(self.levels):
            first_state = 1 + int(offsets[number - 1]) if number else 0  # of the contexts
            for part in chunks(len(level.word)):
                first, last = int(offsets[number]) + part.start, int(offsets[number]) + part.stop
                states = level.context[part].astype(np.int64) + first_state
                is_state[states] = True
                self._keys[first:last] = states * size + level.word[part]
                self._ln[first:last] = level.log10[part].astype(np.float32) * np.float32(LN10)
                backoff = level.backoff[part].astype(np.float32) * np.float32(LN10)
                self._backoff[first + 1:last + 1] = backoff
                is_state[first + 1:last + 1] |= backoff != 0
        for number, level in enumerate(self.levels):
            for part in chunks(len(level.word)):
                rows = np.arange(offsets[number] + part.start, offsets[number] + part.stop)
                if number:
                    # The state of the longest known n-gram at the end of the history and the word.
                    words_left, todo = level.word[part], np.arange(len(rows))
                    states = self._parent[self._keys[rows] // size]  # of the histories
                    found = np.zeros(len(rows), dtype=np.int32)
                    while todo.size:
                        arc, hit = self._find(states, words_left[todo])
                        found[todo[hit]] = arc[hit] + 1
                        states, todo = self._parent[states[~hit]], todo[~hit]
                    self._parent[rows + 1] = found
                own = is_state[rows + 1] if number + 1 < self.order else np.zeros(len(rows), dtype=bool)
                parent = self._parent[rows + 1]
                shorter = np.where(parent > 0, self._next[parent - 1], 0)
                self._next[rows] = np.where(own, rows + 1, shorter)

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
            arc, hit = self._find(states, words)
            scores[todo[hit]] += self._ln[arc[hit]]
            after[todo[hit]] = self._next[arc[hit]]
            miss = ~hit
            todo, words, states = todo[miss], words[miss], states[miss]
            scores[todo] += self._backoff[states]
            states = self._parent[states]
        return scores, after

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
        known, unknown, missing, total, count = 0.0, 0.0, 0, 0, 0
        for sentences in self._batches(texts):
            flat, scores = self._scored(sentences)
            out = flat == self.unknown
            missing += int(out.sum())
            known += float(scores[~out].sum(dtype=np.float64))
            unknown += float(scores[out].sum(dtype=np.float64))
            total += len(flat)
            count += len(sentences)
        return Quality(
            perplexity=math.exp(min(700.0, -known / max(1, total - missing))),
            perplexity_with_unknown=math.exp(min(700.0, -(known + unknown) / max(1, total))),
            words=total - count, unknown=missing, sentences=count,
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
                sentences, words = [], 0
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
