"""Estimates an n-gram model from text: interpolated Kneser-Ney smoothing with three discounts per order.

N-grams are counted by sorting integers instead of filling dictionaries: an n-gram is one 64-bit number, made of the
row of its first words and its last word, and ``np.unique`` over the text returns rows, counts and suffixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from sbkit.decode.ngram import BEGIN, END, NEVER, SPECIAL, Level, NGram
from sbkit.errors import SbkitError

# Discounts for texts too small to estimate them from.
FALLBACK = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class EncodedText:
    """Text as integers: each sentence is a start symbol, its words and an end symbol."""

    words: list[str]
    ids: np.ndarray  # [P] int32
    sentences: int

    @property
    def tokens(self) -> int:
        """The number of words, without start and end symbols."""
        return len(self.ids) - 2 * self.sentences

    def texts(self) -> Iterator[str]:
        """The sentences, with words outside the vocabulary replaced by the unknown word."""
        begin = SPECIAL.index(BEGIN)
        for sentence in np.split(self.ids, np.flatnonzero(self.ids == begin)[1:]):
            yield " ".join(map(self.words.__getitem__, sentence[1:-1].tolist()))


@dataclass
class NgramCounts:
    """The n-grams of one order, sorted by (context, word); arrays of equal length [N]."""

    context: np.ndarray  # row of the first words in the order below
    word: np.ndarray
    suffix: np.ndarray  # row of the last words in the order below
    raw: np.ndarray  # how often it occurs
    adjusted: np.ndarray  # Kneser-Ney's count: distinct words before it, or ``raw`` for the highest order


@dataclass(frozen=True)
class Discounts:
    """Discounts for the counts 1, 2, and 3 or more of an order, and whether they are the fallback."""

    values: tuple[float, float, float]
    fallback: bool


class Estimate(NamedTuple):
    """A model and how it was estimated."""

    model: NGram
    discounts: list[Discounts]  # of each order
    counted: list[int]  # n-grams of each order in the text, before pruning


def read(texts: Iterable[str], min_count: int = 1) -> EncodedText:
    """Read text; words that occur less than ``min_count`` times become the unknown word."""
    sentences = [words for words in map(str.split, texts) if words]
    if not sentences:
        raise SbkitError("there is no text to estimate a language model from")
    counts = Counter(chain.from_iterable(sentences))
    reserved = [word for word in (BEGIN, END) if word in counts]
    if reserved:
        raise SbkitError(f"the text contains the word {reserved[0]}, which marks where sentences begin and end",
                         hint="remove it from the text")
    vocabulary = {word: i for i, word in enumerate(SPECIAL)}
    for word, count in counts.items():
        if count >= min_count:
            vocabulary.setdefault(word, len(vocabulary))
    get = vocabulary.get
    begin, end = vocabulary[BEGIN], vocabulary[END]
    size = sum(map(len, sentences)) + 2 * len(sentences)
    flat = chain.from_iterable((begin, *(get(word, 0) for word in words), end) for words in sentences)
    return EncodedText(list(vocabulary), np.fromiter(flat, dtype=np.int32, count=size), len(sentences))


def count(corpus: EncodedText, order: int) -> list[NgramCounts]:
    """Count all n-grams up to ``order``, with a row for every word of the vocabulary, even if its count is 0."""
    ids, size = corpus.ids, len(corpus.words)
    begin = corpus.words.index(BEGIN)
    starts = np.flatnonzero(ids == begin)
    depth = np.arange(len(ids)) - np.repeat(starts, np.diff(np.append(starts, len(ids))))
    raw = np.bincount(ids, minlength=size)
    everything = np.arange(size, dtype=np.int32)
    levels = [NgramCounts(np.zeros(size, np.int32), everything, np.zeros(size, np.int32), raw, raw.copy())]
    rows = ids  # row, in the current level, of the n-gram that ends at each position
    for k in range(2, order + 1):
        at = np.flatnonzero(depth >= k - 1)
        keys = rows[at - 1] * np.int64(size) + ids[at]
        keys, first, inverse, raw = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        below = levels[-1]
        suffix = rows[at[first]].astype(np.int32)
        # Only n-grams that begin a sentence have nothing before them; they keep their plain counts.
        before = np.bincount(suffix, minlength=len(below.word))
        below.adjusted = np.where(before > 0, before, below.raw)
        levels.append(NgramCounts((keys // size).astype(np.int32), (keys % size).astype(np.int32), suffix, raw,
                                  raw.copy()))
        rows = np.zeros(len(ids), dtype=np.int64)
        rows[at] = inverse
    return levels


def discounts(adjusted: np.ndarray) -> Discounts:
    """Estimate discounts from the numbers of n-grams counted once, twice, three and four times (Chen and Goodman 1998).

    Returns ``FALLBACK`` if one of these numbers is zero or a discount is invalid, as for texts of a few sentences
    and for the single characters of any text.
    """
    once, twice, thrice, four = (int((adjusted == times).sum()) for times in (1, 2, 3, 4))
    if not (once and twice and thrice):
        return Discounts(FALLBACK, True)
    share = once / (once + 2 * twice)
    values = (1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four / thrice)
    if not (four and all(0 < value < times for times, value in enumerate(values, start=1))):
        return Discounts(FALLBACK, True)
    return Discounts(values, False)


def estimate(corpus: EncodedText, order: int, cutoffs: Sequence[int] = ()) -> Estimate:
    """Estimate a model up to an order.

    cutoffs : n-grams with this count or less are dropped, one number per order; the last also holds for higher orders,
        and words are never dropped. Their probability goes to shorter n-grams.
    """
    levels = count(corpus, order)
    begin = corpus.words.index(BEGIN)  # sentence starts are not predicted, so not counted for discounts
    taken = [discounts(level.adjusted[level.word != begin]) for level in levels]
    cutoffs = [0, *(cutoffs[min(k, len(cutoffs) - 1)] if cutoffs else 0 for k in range(1, order))]
    built: list[Level] = []
    probability = np.full(1, 1 / (len(corpus.words) - 1))  # uniform over all words but the start symbol
    rows = np.zeros(1, dtype=np.int32)  # new rows of the n-grams of the level below
    for number, level in enumerate(levels):
        contexts = len(probability)
        adjusted = level.adjusted.astype(np.float64)
        if not number:
            adjusted[begin] = 0
        total = np.bincount(level.context, weights=adjusted, minlength=contexts)
        off = np.minimum(np.take((0, *taken[number].values), np.minimum(level.adjusted, 3)), adjusted)
        keep = rows[level.context] >= 0
        if cutoffs[number]:
            keep &= level.raw > cutoffs[number]
        lower = np.where(keep, off, adjusted)  # mass for shorter n-grams: the discount, or everything
        # A context without n-grams leaves all its mass to the shorter ones.
        share = np.ones(contexts)
        np.divide(np.bincount(level.context, weights=lower, minlength=contexts), total, out=share, where=total > 0)
        with np.errstate(invalid="ignore"):
            own = np.where(keep, adjusted - off, 0) / total[level.context]
        probability = own + share[level.context] * probability[level.suffix]
        if built:
            backoff = np.log10(share[rows >= 0]).astype(np.float32)
            built[-1] = built[-1]._replace(backoff=backoff)
        log10 = np.log10(np.maximum(probability[keep], 1e-99)).astype(np.float32)
        if not number:
            log10[begin] = NEVER
        built.append(Level(rows[level.context[keep]], level.word[keep], log10, np.zeros(len(log10), np.float32)))
        rows = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
    return Estimate(NGram(corpus.words, built), taken, [len(level.word) for level in levels])
