"""Kneser-Ney with all of the text in memory at once: what ``sbkit.decode.kneser_ney`` has to equal.

N-grams are counted by sorting integers instead of filling dictionaries: an n-gram is one 64-bit number, made of the
row of its first words and its last word, and ``np.unique`` over the text returns rows, counts and suffixes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

import numpy as np

from sbkit.decode import kneser_ney
from sbkit.decode.ngram import BEGIN, END, LN10, NEVER, SPECIAL, Level, NGram


@dataclass
class NgramCounts:
    """The n-grams of one order, sorted by (context, word); arrays of equal length [N]."""

    context: np.ndarray  # row of the first words in the order below
    word: np.ndarray
    suffix: np.ndarray  # row of the last words in the order below
    raw: np.ndarray  # how often it occurs
    adjusted: np.ndarray  # Kneser-Ney's count: distinct words before it, or ``raw`` for the highest order


def read(texts, min_count=1):
    """The words, and their numbers one sentence after another."""
    sentences = [words for words in map(str.split, texts) if words]
    counts = Counter(chain.from_iterable(sentences))
    vocabulary = {word: i for i, word in enumerate(SPECIAL)}
    for word, count in counts.items():
        if count >= min_count:
            vocabulary.setdefault(word, len(vocabulary))
    flat = []
    for words in sentences:
        flat += [vocabulary[BEGIN], *(vocabulary.get(word, 0) for word in words), vocabulary[END]]
    return SimpleNamespace(words=list(vocabulary), ids=np.array(flat, np.int32))


def count(corpus, order):
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


def discounts(adjusted):
    return kneser_ney.discounts(*(int((adjusted == times).sum()) for times in (1, 2, 3, 4)))


def estimate(corpus, order, cutoffs=()):
    """Estimate a model up to an order.

    cutoffs : n-grams with this count or less are dropped, one number per order; the last also holds for higher orders,
        and words are never dropped. Their probability goes to shorter n-grams.
    """
    levels = count(corpus, order)
    begin = corpus.words.index(BEGIN)  # sentence starts are not predicted, so not counted for discounts
    taken = [discounts(level.adjusted[level.word != begin]) for level in levels]
    cutoffs = [0, *(cutoffs[min(k, len(cutoffs) - 1)] if cutoffs else 0 for k in range(1, order))]
    built = []
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
    return kneser_ney.Estimate(NGram(corpus.words, built), taken, [len(level.word) for level in levels])


def prune_by_entropy(model, threshold):
    """Drop n-grams without which the perplexity rises by less than this share, such as 1e-7 (Stolcke 1998).

    Words stay, and so do n-grams that a remaining longer one begins or ends with.
    """
    kept = [np.ones(len(level.word), bool) for level in model.levels]
    backoffs = [level.backoff for level in model.levels]
    needed = np.zeros(0, bool)  # n-grams of this level that longer ones need
    # The probability that each n-gram occurs; sentences start as often as they end.
    first = np.exp(model.levels[0].log10.astype(np.float64) * LN10)
    if BEGIN in model.ids and END in model.ids:
        first[model.ids[BEGIN]] = first[model.ids[END]]
    history = [first]
    for level in model.levels[1:]:
        history.append(history[-1][level.context] * np.exp(level.log10.astype(np.float64) * LN10))
    for number in range(model.order - 1, 0, -1):
        level = model.levels[number]
        contexts = len(model.levels[number - 1].word)
        own = np.exp(level.log10.astype(np.float64) * LN10)
        shorter = np.exp(model.after_shorter(number, slice(0, len(level.word))).astype(np.float64))
        left = _backoff_mass(level.context, own, contexts)
        left_shorter = _backoff_mass(level.context, shorter, contexts)
        at = level.context
        backoff = np.log(left[at] / left_shorter[at])
        without = np.log((left[at] + own) / (left_shorter[at] + shorter))
        moved = own * (np.log(shorter) + without - np.log(own)) + left[at] * (without - backoff)
        keep = np.expm1(-history[number - 1][at] * moved) >= threshold
        if len(needed):
            keep |= needed
        kept[number] = keep
        needed = np.zeros(contexts, bool)
        needed[at[keep]] = True
        suffix = model.suffixes(number, slice(0, len(level.word)))[keep]
        needed[suffix[suffix >= 0]] = True
        ratio = _backoff_mass(at[keep], own[keep], contexts) / _backoff_mass(at[keep], shorter[keep], contexts)
        has = np.bincount(at, minlength=contexts) > 0
        backoffs[number - 1] = np.where(has, np.log10(ratio), model.levels[number - 1].backoff).astype(np.float32)
    levels, rows = [], np.zeros(1, np.int32)
    for level, keep, backoff in zip(model.levels, kept, backoffs, strict=True):
        levels.append(Level(rows[level.context[keep]], level.word[keep], level.log10[keep], backoff[keep]))
        rows = (np.cumsum(keep) - 1).astype(np.int32)
    return NGram(model.words, levels)


def _backoff_mass(contexts, probabilities, size):
    """The probability mass that each context leaves for words without an n-gram; never exactly zero."""
    return np.maximum(1 - np.bincount(contexts, weights=probabilities, minlength=size), 1e-9)
