"""Insertions, deletions and substitutions between token sequences, counted and aligned as SpeechBrain does.

Several shortest alignments can exist, and they can differ in how many edits are substitutions. SpeechBrain
takes Kaldi's: walking back from the end it prefers an insertion to a deletion to a diagonal step. Rapidfuzz counts
the edits wherever all shortest alignments agree, which is nearly everywhere; the other pairs, and every requested
alignment, are traced back as SpeechBrain does, for many pairs at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from itertools import compress
from operator import ne
from typing import NamedTuple, TypeVar, cast

import numpy as np
from rapidfuzz.distance import Levenshtein, Prefix
from rapidfuzz.process import cpdist

Tokens = Sequence[str]

UTF_32 = f"utf-32-{sys.byteorder[0]}e"
EQUAL, INSERTION, DELETION, SUBSTITUTION = "=IDS"
_INSERT, _DELETE, _DIAGONAL = 1, 2, 3

# A path through the table is encoded as one number: its edits, then its last step, then its substitutions. The
# smallest number is that of the preferred path.
_AN_EDIT, _A_STEP, _SUBSTITUTIONS = 1 << 34, 1 << 32, (1 << 32) - 1
_STEPS = 3 * _A_STEP
_UNREACHABLE = 1 << 60

_AT_ONCE = 10_000  # pairs whose tokens are encoded at once
_FRONT = 100_000  # cells of all fronts in memory at once
CELLS = 16_000_000  # bytes of the table in memory at once


_Item = TypeVar("_Item")
_Coded = Sequence[Hashable]  # letters of a text, words, or numbers that stand for them


class EditCounts(NamedTuple):
    """Edits of each pair, [N] int64."""

    insertions: np.ndarray
    deletions: np.ndarray
    substitutions: np.ndarray

    @property
    def edits(self) -> np.ndarray:
        return self.insertions + self.deletions + self.substitutions


def count(references: Sequence[Tokens], hypotheses: Sequence[Tokens]) -> EditCounts:
    """Count the edits that turn each reference into its hypothesis."""
    differ = bytes(map(ne, references, hypotheses))
    refs, hyps = (list(compress(side, differ)) for side in (references, hypotheses))
    parts = []
    for start in range(0, len(refs), _AT_ONCE):
        some: list[list[_Coded]] = [list(side[start:start + _AT_ONCE]) for side in (refs, hyps)]
        longer = _lengths(some[1]) - _lengths(some[0])
        # Rapidfuzz compares hashes: an empty word hashes like "\0", and other objects may have any hash. So anything
        # but texts and words is numbered.
        if not _are_strings(*some) and any("" in tokens or not set(map(type, tokens)) <= {str}
                                           for side in some for tokens in side):
            number = _Numbers().__getitem__
            some = [[list(map(number, tokens)) for tokens in side] for side in some]
        parts.append(_count(some[0], some[1], longer))
    counts = np.zeros((3, len(differ)), dtype=np.int64)
    counts[:, np.frombuffer(differ, bool)] = np.concatenate(parts, axis=1) if parts else 0
    return EditCounts(*counts)


def _count(references: Sequence[_Coded], hypotheses: Sequence[_Coded], longer: np.ndarray) -> EditCounts:
    """Count the edits of pairs whose hypothesis is ``longer`` by this many tokens, [N] int64."""
    edits = _distances(references, hypotheses, 1)
    # edits = substitutions + |longer| + 2 * (insertions that are balanced by a deletion elsewhere), which is an upper
    # bound of the substitutions. The lower bound is the distance in which a substitution costs two.
    substitutions = edits - abs(longer)
    unclear = np.flatnonzero(substitutions > 1)
    least = _distances(_pick(references, unclear), _pick(hypotheses, unclear), 2) - edits[unclear]
    unclear = unclear[least < substitutions[unclear]]
    references, hypotheses = _pick(references, unclear), _pick(hypotheses, unclear)
    if references:  # a common start goes: every preferred path follows the diagonal there (not so at a common end)
        same = cpdist(references, hypotheses, scorer=Prefix.similarity, dtype=np.int64).tolist()
        references, hypotheses = ([tokens[start:] for tokens, start in zip(side, same, strict=True)]
                                  for side in (references, hypotheses))
    order = np.argsort(_lengths(references), kind="stable")
    at_once = max(1, _FRONT // max(map(len, references), default=1))
    for start in range(0, len(order), at_once):
        group = order[start:start + at_once]
        which = unclear[group]
        sides = _pick(references, group), _pick(hypotheses, group)
        rows, columns = map(_lengths, sides)
        # The substitutions in the preferred alignment, which has no more deletions and insertions than the edits allow.
        for front in _fronts(*_encode(*sides), int((edits[which] - columns + rows).max() // 2),
                             int((edits[which] + columns - rows).max() // 2)):
            ending = np.flatnonzero(rows + columns == front.number)
            substitutions[which[ending]] = front.substitutions[rows[ending] - front.cells.start, ending]
    insertions = (edits - substitutions + longer) // 2
    return EditCounts(insertions, insertions - longer, substitutions)


def _are_strings(*sides: Sequence[_Coded]) -> bool:
    return all(isinstance(tokens, str) for side in sides for tokens in side)


def _lengths(texts: Sequence[_Coded]) -> np.ndarray:
    return np.fromiter(map(len, texts), np.int64, len(texts))


def _distances(references: Sequence[_Coded], hypotheses: Sequence[_Coded], substitution: int) -> np.ndarray:
    """The lowest cost of turning each reference into its hypothesis, an insertion or deletion costing 1, [N] int64."""
    if not references:
        return np.zeros(0, dtype=np.int64)
    return cpdist(references, hypotheses, scorer=Levenshtein.distance, dtype=np.int64,
                  scorer_kwargs={"weights": (1, 1, substitution)})


def align(references: Sequence[Tokens], hypotheses: Sequence[Tokens]) -> list[str]:
    """Align each pair, as a string of steps from the first token to the last.

    ``=`` and ``S`` consume a token of both, ``D`` one of the reference, ``I`` one of the hypothesis.

    >>> align([["a", "b", "c"]], [["a", "x", "c", "d"]])
    ['=S=I']
    """
    alignments = [""] * len(references)
    for group in _groups(references, hypotheses):
        found = _alignments(_pick(references, group), _pick(hypotheses, group))
        for i, alignment in zip(group, found, strict=True):
            alignments[i] = alignment
    return alignments


def _pick(items: Sequence[_Item], which: Sequence[int] | np.ndarray) -> list[_Item]:
    if isinstance(which, np.ndarray):
        which = which.tolist()  # indexing with numpy integers is three times slower
    return [items[i] for i in which]


def _groups(references: Sequence[Tokens], hypotheses: Sequence[Tokens]) -> Iterator[list[int]]:
    """Group indices by size, so that a group's padded table wastes little and fits in memory."""
    order = sorted(range(len(references)), key=lambda i: (len(references[i]), len(hypotheses[i])))
    group: list[int] = []
    widest = 0
    for i in order:
        rows, columns = len(references[i]) + 1, len(hypotheses[i]) + 1
        widest = max(widest, columns)
        if group and (len(group) + 1) * rows * (rows + widest) > CELLS:
            yield group
            group, widest = [], columns
        group.append(i)
    if group:
        yield group


class _Numbers(dict[Hashable, int]):
    """Numbers the distinct tokens in order of appearance."""

    def __missing__(self, token: Hashable) -> int:
        self[token] = number = len(self)
        return number


def _encode(references: Sequence[_Coded], hypotheses: Sequence[_Coded]) -> tuple[np.ndarray, np.ndarray]:
    """Encode tokens as numbers, [longest reference, B] and [longest hypothesis, B]; padding matches no token."""
    numbers = _Numbers()
    encoded = []
    for side, padding in ((references, -1), (hypotheses, -2)):
        if _are_strings(references, hypotheses):
            flat = np.frombuffer("".join(cast("Sequence[str]", side)).encode(UTF_32, "surrogatepass"), dtype=np.int32)
        else:
            flat = np.array([numbers[token] for tokens in side for token in tokens], dtype=np.int32)
        lengths = _lengths(side)
        codes = np.full((len(side), lengths.max()), padding, dtype=np.int32)
        codes[np.arange(codes.shape[1]) < lengths[:, None]] = flat
        encoded.append(np.ascontiguousarray(codes.T))
    return encoded[0], encoded[1]


class _Front(NamedTuple):
    """The cells (i, j) with i + j = number of the table over prefixes (i reference, j hypothesis tokens)."""

    number: int
    cells: slice  # over i
    paths: np.ndarray  # [cells, B] the preferred path to each

    @property
    def steps(self) -> np.ndarray:
        return self.paths // _A_STEP & 3

    @property
    def substitutions(self) -> np.ndarray:
        return self.paths & _SUBSTITUTIONS


def _fronts(ref: np.ndarray, hyp: np.ndarray, deletions: int, insertions: int) -> Iterator[_Front]:
    """Yield the edit-distance table by anti-diagonals: the cells of one depend only on the two before it.

    Only cells that a path with at most this many ``deletions`` and ``insertions`` can reach, -deletions <= j - i <=
    insertions. Cells beyond a pair's own lengths are meaningless.
    """
    (rows, batch), columns = ref.shape, len(hyp)
    hyp = hyp[::-1]
    # One extra, unreachable row on either side.
    paths = np.full((3, rows + 3, batch), _UNREACHABLE, dtype=np.int64)
    paths[0, 1] = 0
    for number in range(1, rows + columns + 1):
        first = max(0, number - columns, (number - insertions + 1) // 2)
        end = min(rows, number, (number + deletions) // 2) + 1
        if first >= end:
            return
        now, before, earlier = number % 3, (number - 1) % 3, (number - 2) % 3
        here, above = slice(first + 1, end + 1), slice(first, end)
        diagonal = paths[earlier, above] + _DIAGONAL * _A_STEP
        low, high = max(first, 1), min(end, number)  # there are no diagonal steps into the first row and column
        differ = ref[low - 1:high - 1] != hyp[columns - number + low:columns - number + high]
        diagonal[low - first:high - first] += differ * (_AN_EDIT + 1)
        least = np.minimum(diagonal, paths[before, above] + (_AN_EDIT + _DELETE * _A_STEP))
        np.minimum(least, paths[before, here] + (_AN_EDIT + _INSERT * _A_STEP), out=least)
        paths[now, here] = least & ~_STEPS
        paths[now, first] = paths[now, end + 1] = _UNREACHABLE  # the cells next to them hold values of an earlier front
        yield _Front(number, above, least)


def _alignments(references: Sequence[_Coded], hypotheses: Sequence[_Coded]) -> list[str]:
    """The preferred alignment of each pair, from the table of steps, walked back for all pairs at once."""
    i, j = (np.array([len(text) for text in side]) for side in (references, hypotheses))
    batch, longest = len(i), i.max() + j.max()
    table = np.zeros((longest + 1, i.max() + 1, batch), dtype=np.int8)
    ref, hyp = _encode(references, hypotheses)
    for front in _fronts(ref, hyp, len(ref), len(hyp)):
        table[front.number, front.cells] = front.steps
    steps = np.zeros((batch, longest), dtype=np.uint8)
    names = np.frombuffer(b"\0IDS", dtype=np.uint8)
    active = np.flatnonzero(i + j)
    for back in range(longest - 1, -1, -1):
        row, column = i[active], j[active]
        step = table[row + column, row, active]
        row, column = row - (step != _INSERT), column - (step != _DELETE)
        name = names[step]
        diagonal = np.flatnonzero(step == _DIAGONAL)
        same = ref[row[diagonal], active[diagonal]] == hyp[column[diagonal], active[diagonal]]
        name[diagonal[same]] = ord(EQUAL)
        steps[active, back] = name
        i[active], j[active] = row, column
        active = active[(row + column) > 0]
    return [row.tobytes().lstrip(b"\0").decode() for row in steps]
