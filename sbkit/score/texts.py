"""The words of many texts as numbers, all found at once in one block of letters.

An object for each word, or a look at each text, takes Python longer than all the counting of edits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Tokens = Sequence[str]

_SPACE, _LINE = b" \n"
_LISTS = 200  # of words that are looked at together: at each further look they are in the core's own cache
_SOME_OF_EIGHT = np.array([(1 << 8 * kept) - 1 for kept in range(9)], dtype=np.uint64)
_TABLE = 14  # bits of a place in the table in which long words are found again: it stays in a core's own cache
_MIX = 0x9E3779B97F4A7C15
_LARGE = 1 << 17  # bytes that glibc takes from the kernel anew each time, at first


class Words(NamedTuple):
    """The words of N texts, one after another; W in all."""

    numbers: np.ndarray  # [W] uint64, equal for equal words
    begins: np.ndarray  # [N] int64, where each text's words begin
    counts: np.ndarray  # [N] int64


class Spaced(NamedTuple):
    """Texts with one space between words and none around."""

    texts: Sequence[str]
    words: int  # of all
    empty: int  # texts without words


def as_texts(side: Sequence[str | Tokens]) -> Spaced | None:
    """Texts, or lists of words; None where there is something else, or a word that a text would not give back."""
    try:
        return _spaced(side)
    except TypeError:
        return _joined(side)


def _joined(side: Sequence[str | Tokens]) -> Spaced | None:
    texts: list[str] = []
    lengths: list[int] = []
    for start in range(0, len(side), _LISTS):
        part = side[start:start + _LISTS]
        if any(issubclass(kind, str) for kind in set(map(type, part))):
            part = [words.split() if isinstance(words, str) else words for words in part]
        try:
            texts += map(" ".join, part)
        except TypeError:
            return None
        lengths += map(len, part)
    found = _spaced(texts)  # no text has fewer words than its list, but that of a single empty one
    if found is None or found.words != sum(lengths) or found.empty != lengths.count(0):
        return None
    return found if found.texts is texts or found.texts == texts else None


def _spaced(texts: Sequence[str]) -> Spaced | None:
    if not texts:
        return Spaced(texts, 0, 0)
    letters = _letters(texts)
    breaks = _breaks(letters)
    if not _is_spaced(letters[:-7], breaks, texts):
        texts = [" ".join(text.split()) for text in texts]
        letters = _letters(texts)
        if not letters[:-7].all():  # a word that ends with zeros would have the number of the one without
            return None
        breaks = _breaks(letters)
    empty = int(breaks[0]) + int(np.count_nonzero(breaks[1:] & breaks[:-1]))
    return Spaced(texts, int(np.count_nonzero(breaks)) - empty, empty)


def words_of(texts: Sequence[str]) -> Words:
    """Of spaced texts."""
    letters = _letters(texts)
    ends = np.flatnonzero(_breaks(letters))
    lines = np.flatnonzero(letters.take(ends) == _LINE) + 1
    begins = _shifted(lines)
    starts = _shifted(ends + 1)
    counts = lines - begins
    counts[starts.take(begins) == ends.take(begins)] = 0  # an empty line is no word
    return Words(_numbers(letters, starts, ends - starts), begins, counts)


def _letters(texts: Sequence[str]) -> np.ndarray:
    """A line of UTF-8 for each text, [L + 7] uint8: from each of the first L, eight letters can be read."""
    letters = "\n".join([*texts, "\0" * 7]).encode(errors="surrogatepass")
    if len(letters) > _LARGE:
        _keep_freed()
    return np.frombuffer(letters, np.uint8)


@functools.cache
def _keep_freed() -> None:
    """Once a large block was freed, glibc keeps what is freed later, up to that size.

    Else the arrays of each call are made of memory that the kernel gives page by page, which takes longer than the
    counting.
    """
    with contextlib.suppress(MemoryError):  # of a process with a bound, which keeps nothing
        np.empty(24 << 20, np.uint8)


def _breaks(letters: np.ndarray) -> np.ndarray:
    """Where a word ends, [L] bool."""
    letters = letters[:-7]
    return (letters == _SPACE) | (letters == _LINE)


def _is_spaced(letters: np.ndarray, breaks: np.ndarray, texts: Sequence[str]) -> bool:
    """Whether the texts' lines have no other spaces than single ones between words. Rare characters may say no."""
    if letters[0] == _SPACE or np.count_nonzero(letters < _SPACE) > len(texts):
        return False
    double = np.flatnonzero(breaks[1:] & breaks[:-1])  # the ends of lines can follow on each other
    if np.any((letters[double] == _SPACE) | (letters[double + 1] == _SPACE)):
        return False
    return bool(letters.max() < 128) or "".join(texts).isprintable()


def _shifted(ends: np.ndarray) -> np.ndarray:
    """Where each part begins if the one before it ends there, [N] both."""
    begins = np.empty_like(ends)
    begins[:1] = 0
    begins[1:] = ends[:-1]
    return begins


def _numbers(letters: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """A number for each word, [W] uint64: its letters, if eight hold it, or one that no letters make."""
    eight = np.ndarray(len(letters) - 7, "<u8", letters, strides=(1,))
    numbers = eight[starts]
    numbers &= _SOME_OF_EIGHT.take(sizes, mode="clip")
    given = 0
    for begin in range(8, int(sizes.max(initial=0)), 8):
        longer = np.flatnonzero(sizes > begin)
        rest = eight[starts[longer] + begin] & _SOME_OF_EIGHT.take(sizes[longer] - begin, mode="clip")
        numbers[longer] = ~(_first_of_same(numbers[longer], rest) + np.uint64(given))  # no text has a byte of all ones
        given += len(longer)
    return numbers


def _first_of_same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """For each pair of integers the index of an equal pair, the same one for all that are equal, [n] uint64.

    Each pair writes itself to its place in a table. Those that find another pair there are left for another round.
    """
    found = np.empty(len(one), np.uint64)
    table = np.empty(1 << _TABLE, np.int64)
    left = np.arange(len(one))
    mix = np.uint64(_MIX)
    while len(left):
        first, second = one[left], other[left]
        place = ((first ^ second * mix) * mix >> np.uint64(64 - _TABLE)).astype(np.int64)
        table[place] = left
        there = table[place]
        same = (one[there] == first) & (other[there] == second)
        found[left[same]] = there[same]
        left = left[~same]
        mix += np.uint64(2 * len(one))
    return found
