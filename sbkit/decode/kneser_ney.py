"""Estimates an n-gram model from text: interpolated Kneser-Ney smoothing with three discounts per order.

N-grams are counted by sorting integers instead of filling dictionaries: an n-gram is one 64-bit number, its key, made
of the row of its first words and its last word. Text, keys and all other arrays with an entry for each of them are in
files if they are large (``Workspace``) and computed in chunks, so that memory is needed for the vocabulary and a chunk.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sbkit.decode import workspace
from sbkit.decode.ngram import BEGIN, END, NEVER, SPECIAL, Level, NGram
from sbkit.decode.workspace import Appended, Workspace, add_by_row, chunks
from sbkit.errors import SbkitError

# Discounts for texts too small to estimate them from.
FALLBACK = (0.5, 1.0, 1.5)
#: Keys of a run of a chunk that are looked at to divide all keys into ranges.
_SAMPLES = 1000


@dataclass(frozen=True)
class EncodedText:
    """Text as integers: each sentence is a start symbol, its words and an end symbol."""

    words: list[str]
    ids: np.ndarray  # [P] int32
    sentences: int
    files: Workspace = field(default_factory=Workspace)

    @property
    def tokens(self) -> int:
        """The number of words, without start and end symbols."""
        return len(self.ids) - 2 * self.sentences

    def texts(self) -> Iterator[str]:
        """The sentences, with words outside the vocabulary replaced by the unknown word."""
        end = SPECIAL.index(END)
        sentence: list[str] = []
        for part in chunks(len(self.ids)):
            for number in self.ids[part].tolist():
                if number == end:
                    yield " ".join(sentence[1:])
                    sentence = []
                else:
                    sentence.append(self.words[number])


@dataclass
class NgramCounts:
    """The n-grams of one order, sorted by (context, word); arrays of equal length [N]."""

    keys: np.ndarray  # the row of the first words in the order below, times the size of the vocabulary, plus the word
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


class _WordNumbers(dict[str, int]):
    """Numbers of words, in the order in which they are first asked for."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def read(texts: Iterable[str], min_count: int = 1, files: Workspace | None = None) -> EncodedText:
    """Read text; words that occur less than ``min_count`` times become the unknown word.

    files : where large arrays are
    """
    files = files or Workspace()
    numbers = _WordNumbers((word, number) for number, word in enumerate(SPECIAL))
    begin = numbers[BEGIN]
    end = numbers[END]
    encoded = Appended(files, np.int32)
    counts = np.zeros(0, np.int64)  # of each word
    sentences = 0
    batch = array("i")

    def store() -> None:
        nonlocal counts, batch
        part = np.frombuffer(batch, np.int32)
        encoded.add(part)
        new_counts = np.bincount(part, minlength=len(numbers))
        new_counts[:len(counts)] += counts
        counts = new_counts
        batch = array("i")

    number_of = numbers.__getitem__
    for sentence in map(str.split, texts):
        if not sentence:
            continue
        sentences += 1
        batch.append(begin)
        batch.extend(map(number_of, sentence))
        batch.append(end)
        if len(batch) > workspace.CHUNK:
            store()
    if not sentences:
        raise SbkitError("no-text", "there is no text to estimate a language model from",
                         hint="give files with a sentence per line")
    store()
    for word in BEGIN, END:
        if counts[numbers[word]] > sentences:
            raise SbkitError("reserved-word", f"the text contains the word {word}, which marks where sentences begin "
                             "and end", hint="remove it from the text", value=word)
    is_kept = counts >= min_count
    is_kept[:len(SPECIAL)] = True
    new_numbers = np.where(is_kept, np.cumsum(is_kept) - 1, 0).astype(np.int32)
    ids = encoded.finish()
    for part in chunks(len(ids)):
        ids[part] = new_numbers[ids[part]]
    words = [word for word, keep in zip(numbers, is_kept.tolist(), strict=True) if keep]
    return EncodedText(words, ids, sentences, files)


def count(corpus: EncodedText, order: int) -> list[NgramCounts]:
    """Count all n-grams up to ``order``, with a row for every word of the vocabulary, even if its count is 0."""
    ids = corpus.ids
    size = len(corpus.words)
    files = corpus.files
    raw = np.zeros(size, np.int64)
    for part in chunks(len(ids)):
        raw += np.bincount(ids[part], minlength=size)
    levels = [NgramCounts(np.arange(size, dtype=np.int64), np.zeros(size, np.int32), raw, raw.copy())]
    rows = ids  # row, in the current level, of the n-gram that ends at each position
    for k in range(2, order + 1):
        below = levels[-1]
        unique, raw = _distinct(corpus, rows, k)
        suffix = files.empty(len(unique), np.int32)
        before = files.full(len(below.keys), 0, np.int64)
        for part in chunks(len(unique)):
            context, word = np.divmod(unique[part], size)
            # The last words of "a b c" are "b c", whose own first words are the last of "a b".
            shorter = word if k == 2 else below.suffix[context] * np.int64(size) + word
            suffix[part] = np.searchsorted(below.keys, shorter)
            followed, words_before = np.unique(suffix[part], return_counts=True)
            before[followed] += words_before
        # Only n-grams that begin a sentence have nothing before them; they keep their plain counts.
        for part in chunks(len(before)):
            before[part] = np.where(before[part] > 0, before[part], below.raw[part])
        below.adjusted = before
        levels.append(NgramCounts(unique, suffix, raw, raw))
        if k < order:
            longer = files.full(len(ids), 0, np.int32)
            for at, keys in _keys(corpus, rows, k):
                distinct, inverse = np.unique(keys, return_inverse=True)  # sorted, they are found in one pass
                longer[at] = np.searchsorted(unique, distinct)[inverse]
            rows = longer
    return levels


def _keys(corpus: EncodedText, rows: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield positions at which n-grams of order ``k`` end, and their keys, a chunk of text at a time.

    rows : of the n-grams of the order below that end at each position
    """
    ids = corpus.ids
    size = len(corpus.words)
    begin = corpus.words.index(BEGIN)
    start = 0  # of the sentence of the last position
    for part in chunks(len(ids)):
        words = ids[part]
        positions = np.arange(part.start, part.stop)
        starts = np.maximum.accumulate(np.where(words == begin, positions, start))
        start = int(starts[-1])
        at = positions[positions - starts >= k - 1]
        if len(at):
            yield at, rows[at - 1] * np.int64(size) + ids[at]


def _distinct(corpus: EncodedText, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of all n-grams of order ``k``, sorted, and how often each occurs."""
    files = corpus.files
    written_keys = Appended(files, np.int64)
    written_counts = Appended(files, np.int64)
    ends = [0]  # of runs: the distinct keys of a chunk of text each, sorted
    for _, keys in _keys(corpus, rows, k):
        keys, counts = np.unique(keys, return_counts=True)
        written_keys.add(keys)
        written_counts.add(counts)
        ends.append(written_keys.count)
    runs = [slice(first, end) for first, end in itertools.pairwise(ends)]
    all_keys = written_keys.finish()
    all_counts = written_counts.finish()
    # Runs are merged range by range: limits, from a sample of all runs, leave about a chunk of entries in each.
    step = max(1, workspace.CHUNK // _SAMPLES)
    sample = np.sort(np.concatenate([np.zeros(0, np.int64), *(all_keys[run][::step] for run in runs)]))
    limits = np.unique(sample[::max(1, workspace.CHUNK // step)][1:])
    cuts = [run.start + np.concatenate([[0], np.searchsorted(all_keys[run], limits), [run.stop - run.start]])
            for run in runs]
    unique = Appended(files, np.int64)
    raw = Appended(files, np.int64)
    for number in range(len(limits) + 1):
        parts = [slice(int(cut[number]), int(cut[number + 1])) for cut in cuts]
        none = np.zeros(0, np.int64)
        keys = np.concatenate([none, *(all_keys[part] for part in parts)])
        counts = np.concatenate([none, *(all_counts[part] for part in parts)])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        counts = counts[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        if len(first):
            unique.add(keys[first])
            raw.add(np.add.reduceat(counts, first))
    return unique.finish(), raw.finish()


def discounts(once: int, twice: int, thrice: int, four: int) -> Discounts:
    """Estimate discounts from the numbers of n-grams counted once, twice, three and four times (Chen and Goodman 1998).

    Returns ``FALLBACK`` if one of these numbers is zero or a discount is invalid, as for texts of a few sentences
    and for the single characters of any text.
    """
    if not (once and twice and thrice):
        return Discounts(FALLBACK, True)
    share = once / (once + 2 * twice)
    values = (1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four / thrice)
    if not (four and all(0 < value < times for times, value in enumerate(values, start=1))):
        return Discounts(FALLBACK, True)
    return Discounts(values, False)


def _discounts_of(level: NgramCounts, size: int, begin: int) -> Discounts:
    numbers = np.zeros(5, np.int64)
    for part in chunks(len(level.keys)):
        predicted = level.keys[part] % size != begin  # sentence starts are not predicted, so not counted
        numbers += np.bincount(np.minimum(level.adjusted[part], 5)[predicted], minlength=6)[:5]
    return discounts(*map(int, numbers[1:]))


def estimate(corpus: EncodedText, order: int, cutoffs: Sequence[int] = ()) -> Estimate:
    """Estimate a model up to an order.

    cutoffs : n-grams with this count or less are dropped, one number per order; the last also holds for higher orders,
        and words are never dropped. Their probability goes to shorter n-grams.
    """
    levels = count(corpus, order)
    files = corpus.files
    size = len(corpus.words)
    begin = corpus.words.index(BEGIN)
    levels[0].adjusted[begin] = 0  # not predicted, so without a share of the probability
    discounts_by_order = [_discounts_of(level, size, begin) for level in levels]
    counted = [len(level.keys) for level in levels]
    cutoff_by_order = [0]
    for number in range(1, order):
        cutoff_by_order.append(cutoffs[min(number, len(cutoffs) - 1)] if cutoffs else 0)

    built: list[Level] = []
    probability = np.full(1, 1 / (size - 1))  # uniform over all words but the start symbol
    rows = np.zeros(1, dtype=np.int32)
    for number in range(order):
        # Taken from the list, so that its files end with it.
        smoothed = _smooth(levels.pop(0), probability, rows, discounts_by_order[number], cutoff_by_order[number], size,
                           files, highest=number + 1 == order)
        if number == 0:
            smoothed.level.log10[begin] = NEVER
        if built:
            built[-1] = built[-1]._replace(backoff=_backoffs(smoothed.share, rows, len(built[-1].word), files))
        built.append(smoothed.level)
        probability = smoothed.probability
        rows = smoothed.rows
    return Estimate(NGram(corpus.words, built, files), discounts_by_order, counted)


class _SmoothedLevel(NamedTuple):
    """The n-grams of an order that stay, and what the next order needs to know of all N that were counted."""

    level: Level  # with backoffs of 0
    share: np.ndarray  # of the probability after each n-gram of the order below: what it leaves to shorter ones
    probability: np.ndarray  # [N] of each; empty for the highest order
    rows: np.ndarray  # [N] the place of each in ``level``, -1 if it is dropped; empty for the highest order


def _smooth(level: NgramCounts, shorter_probability: np.ndarray, context_rows: np.ndarray, discounts: Discounts,
            cutoff: int, size: int, files: Workspace, highest: bool) -> _SmoothedLevel:
    """Compute the probabilities of the n-grams of one order.

    shorter_probability : of each n-gram of the order below
    context_rows : their places in the model, -1 for those that are dropped
    cutoff : n-grams that occur this often or less are dropped
    size : of the vocabulary
    """
    discount_by_count = (0, *discounts.values)

    def split(part: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Contexts, counts, discounts, and whether n-grams stay."""
        context = level.keys[part] // size
        adjusted = level.adjusted[part].astype(np.float64)
        discount = np.minimum(np.take(discount_by_count, np.minimum(level.adjusted[part], 3)), adjusted)
        stays = context_rows[context] >= 0
        if cutoff:
            stays &= level.raw[part] > cutoff
        return context, adjusted, discount, stays

    total = files.full(len(shorter_probability), 0, np.float64)
    share = files.full(len(shorter_probability), 0, np.float64)
    for part in chunks(len(level.keys)):
        context, adjusted, discount, stays = split(part)
        add_by_row(total, context, adjusted)
        # A dropped n-gram leaves all its mass to shorter ones, another its discount.
        add_by_row(share, context, np.where(stays, discount, adjusted))
    for part in chunks(len(total)):
        # A context without n-grams leaves all its mass to the shorter ones.
        share[part] = np.divide(share[part], total[part], out=np.ones_like(share[part]), where=total[part] > 0)

    count = len(level.keys)
    probability = files.empty(0 if highest else count, np.float64)
    rows = files.empty(0 if highest else count, np.int32)
    contexts = files.empty(count, np.int32)
    words = files.empty(count, np.int32)
    log10s = files.empty(count, np.float32)
    filled = 0
    for part in chunks(count):
        context, adjusted, discount, stays = split(part)
        with np.errstate(invalid="ignore"):
            discounted = np.where(stays, adjusted - discount, 0) / total[context]
        values = discounted + share[context] * shorter_probability[level.suffix[part]]
        log10 = np.log10(np.maximum(values[stays], 1e-99)).astype(np.float32)
        here = slice(filled, filled + len(log10))
        contexts[here] = context_rows[context[stays]]
        words[here] = level.keys[part][stays] % size
        log10s[here] = log10
        if not highest:
            probability[part] = values
            rows[part] = np.where(stays, filled + np.cumsum(stays) - 1, -1)
        filled = here.stop
    smoothed = Level(contexts[:filled], words[:filled], log10s[:filled], files.full(filled, 0, np.float32))
    return _SmoothedLevel(smoothed, share, probability, rows)


def _backoffs(share: np.ndarray, rows: np.ndarray, count: int, files: Workspace) -> np.ndarray:
    """The logarithms of the mass that those contexts which stay leave to shorter n-grams."""
    backoff = files.empty(count, np.float32)
    filled = 0
    for part in chunks(len(share)):
        values = np.log10(share[part][rows[part] >= 0])
        backoff[filled:filled + len(values)] = values
        filled += len(values)
    return backoff
