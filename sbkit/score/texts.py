"""Many texts as one block of letters (an Arrow array), in which words are found and numbered all at once.

An object for each word, or a look at each text, takes Python longer than all the counting of edits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

Tokens = Sequence[str]

_FIRST, _CHARACTERS = 0x10000, 0x100000  # those that stand for words begin here, and are so many
_AT_ONCE = 400_000  # bytes of texts whose words are numbered together: more needs memory anew each time, which is slow
UTF_32 = f"utf-32-{sys.byteorder[0]}e"
_SPACE = ord(" ")
_SOME_OF_EIGHT = np.array([(1 << 8 * kept) - 1 for kept in range(9)], dtype=np.uint64)


def as_texts(side: Sequence[str | Tokens]) -> pa.Array | None:
    """Texts, or lists of words, with one space between words and none around.

    None where there is something else, or a word that a text would not give back.
    """
    try:
        texts = pa.array(side, pa.large_string())
        if not texts.null_count and not _is_spaced(texts):
            texts = pa.array([" ".join(text.split()) for text in side], pa.large_string())
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    except TypeError:
        return _as_joined(side)
    return None if texts.null_count else texts


def _as_joined(side: Sequence[str | Tokens]) -> pa.Array | None:
    if str in map(type, side):
        side = [words.split() if isinstance(words, str) else words for words in side]
    try:
        texts = pa.array([" ".join(words) for words in side], pa.large_string())
    except (TypeError, UnicodeEncodeError):
        return None
    lengths = [len(words) for words in side]  # no text has fewer words, but that of a single empty one
    same = lengths.count(0) == np.count_nonzero(empty(texts)) and sum(lengths) == word_count(texts)
    return texts if same and _is_spaced(texts) else None


def _is_spaced(texts: pa.Array) -> bool:
    """Whether each text is words with one space between them, and nothing else.

    Of texts with rare characters, that might be spaces of another kind, it says no.
    """
    letters, offsets = _block(texts)
    if not len(letters):
        return True
    spaces = letters == _SPACE
    around = spaces[offsets[offsets < len(letters)]].any() or spaces[offsets[offsets > 0] - 1].any()
    return not (around or np.any(spaces[1:] & spaces[:-1])) and bool(
        letters.min() > 31 if letters.max() < 128 else letters.tobytes().decode().isprintable())


def _block(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The letters of all texts, uint8, and where each text begins and the last one ends, [N + 1] int64."""
    _, offsets, letters = texts.buffers()
    if not len(texts):
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(offsets, np.int64)[texts.offset:texts.offset + len(texts) + 1]
    return np.frombuffer(letters or b"", np.uint8)[offsets[0]:offsets[-1]], offsets - offsets[0]


def empty(texts: pa.Array) -> np.ndarray:
    """Whether each text has no words, [N] bool."""
    return np.diff(_block(texts)[1]) == 0


def word_count(texts: pa.Array) -> int:
    """Words of all texts."""
    return int(np.count_nonzero(_block(texts)[0] == _SPACE) + len(texts) - np.count_nonzero(empty(texts)))


class Words(NamedTuple):
    """The words of spaced texts, W in all."""

    starts: np.ndarray  # [W] int64, in the letters
    sizes: np.ndarray  # [W] int64, letters of each
    counts: np.ndarray  # [N] int64, words of each text


def words_of(texts: pa.Array) -> Words:
    letters, offsets = _block(texts)
    begins = np.empty(len(letters) + 1, bool)
    np.equal(letters, _SPACE, out=begins[1:])
    begins[offsets] = True
    starts = np.flatnonzero(begins)
    last = letters[starts[1:] - 1] != _SPACE  # of its text
    counts = np.zeros(len(texts), np.int64)
    counts[~empty(texts)] = np.diff(np.flatnonzero(last), prepend=-1)
    return Words(starts[:-1], np.diff(starts) - ~last, counts)


def as_tokens(references: pa.Array, hypotheses: pa.Array) -> tuple[list[Tokens], list[Tokens], np.ndarray]:
    """The tokens of pairs of texts, and by how many words each hypothesis is longer, [N] int64.

    A token is a character that stands for the word within its pair, since strings are what rapidfuzz is fastest with.
    """
    pairs = len(references)
    found = None
    if pairs < 2 or references.nbytes + hypotheses.nbytes < _AT_ONCE:
        found = _as_characters(pa.concat_arrays([references, hypotheses]))
    if found is None and pairs > 1:
        first, second = (as_tokens(references[part], hypotheses[part])
                         for part in (slice(pairs // 2), slice(pairs // 2, None)))
        return first[0] + second[0], first[1] + second[1], np.concatenate([first[2], second[2]])
    if found is None:  # a single pair with more words than there are characters
        tokens = [text.split() for text in (*references.to_pylist(), *hypotheses.to_pylist())]
        return [tokens[0]], [tokens[1]], np.array([len(tokens[1]) - len(tokens[0])])
    characters, words = found
    return characters[:pairs], characters[pairs:], words[pairs:] - words[:pairs]


def _as_characters(texts: pa.Array) -> tuple[list[str], np.ndarray] | None:
    """Texts with a character in the place of each word, and the words of each, [N]; None where there are too many."""
    words = words_of(texts)
    numbers, different = _numbered(_block(texts)[0], words)
    if different > _CHARACTERS:
        return None
    characters = np.full(len(numbers) + len(texts), ord("\n"), np.int32)
    characters[np.arange(len(numbers)) + np.repeat(np.arange(len(texts)), words.counts)] = numbers + np.int32(_FIRST)
    return characters.tobytes().decode(UTF_32).split("\n")[:-1], words.counts


def _numbered(letters: np.ndarray, words: Words) -> tuple[np.ndarray, int]:
    """A number for each word, the same for the same one, [W] int32, and how many are different.

    Eight letters at once are one integer, and integers Arrow numbers far faster than it does words.
    """
    padded = letters.tobytes() + bytes(8)
    eight = np.ndarray(len(letters) + 1, "<u8", padded, strides=(1,))
    numbers, different = _distinct(eight[words.starts] & _SOME_OF_EIGHT.take(words.sizes, mode="clip"))
    for begin in range(8, int(words.sizes.max(initial=0)), 8):
        longer = np.flatnonzero(words.sizes > begin)
        rest, _ = _distinct(eight[words.starts[longer] + begin]
                            & _SOME_OF_EIGHT.take(words.sizes[longer] - begin, mode="clip"))
        found, more = _distinct(numbers[longer].astype(np.int64) << 32 | rest)
        numbers[longer] = found + np.int32(different)
        different += more
    return numbers, different


def _distinct(integers: np.ndarray) -> tuple[np.ndarray, int]:
    found = pa.array(integers).dictionary_encode()
    return np.array(found.indices), len(found.dictionary)
