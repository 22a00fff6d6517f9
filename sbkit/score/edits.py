"""Insertions, deletions and substitutions between token sequences, counted and aligned as SpeechBrain does.

Several shortest alignments can exist, and they can differ in how many edits are substitutions. SpeechBrain
takes Kaldi's: walking back from the end it prefers an insertion to a deletion to a diagonal step. Counting
is by rapidfuzz wherever all shortest alignments agree, which is nearly everywhere; the rest, and every
alignment that is asked for, goes the same way back as SpeechBrain, for many pairs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import ne
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cpdist

Tokens = Sequence[str]

EQUAL, INSERTION, DELETION, SUBSTITUTION = "=IDS"
_INSERT, _DELETE, _DIAGONAL = np.arange(1, 4, dtype=np.int8)

_EDIT = 1 << 24  # an edit's cost, beside which a substitution more or less is no more than a tie-break
_FAR = 1 << 28  # no way leads here
_CELLS = 16_000_000  # bytes of the table that is held at once


class Counts(NamedTuple):
    """Edits of each pair, [N] int64."""

    insertions: np.ndarray
    deletions: np.ndarray
    substitutions: np.ndarray

    @property
    def edits(self) -> np.ndarray:
        return self.insertions + self.deletions + self.substitutions


def count(references: Sequence[Tokens], hypotheses: Sequence[Tokens]) -> Counts:
    """The edits that turn each reference into its hypothesis."""
    differ = np.fromiter(map(ne, references, hypotheses), dtype=bool, count=len(references))
    wrong = differ.nonzero()[0].tolist()
    counts = Counts(*np.zeros((3, len(references)), dtype=np.int64))
    for column, found in zip(counts, _count(_pick(references, wrong), _pick(hypotheses, wrong)), strict=True):
        column[differ] = found
    return counts


def _count(references: list[Tokens], hypotheses: list[Tokens]) -> Counts:
    longer = (np.fromiter(map(len, hypotheses), np.int64, len(hypotheses))
              - np.fromiter(map(len, references), np.int64, len(references)))
    # edits = substitutions + |longer| + 2 * (insertions that a deletion elsewhere makes up for)
    edits = _distances(references, hypotheses)
    substitutions = edits - abs(longer)

    def distances(which: np.ndarray, substitution: int, other: int) -> np.ndarray:
        return _distances(_pick(references, which), _pick(hypotheses, which), substitution, other)

    # An insertion and a deletion take the place of two substitutions only where they match one token more.
    some = np.flatnonzero(substitutions >= 2)
    some = some[distances(some, substitution=2, other=1) < (abs(longer) + 2 * substitutions)[some]]
    substitutions[some] = fewest = distances(some, _EDIT + 1, _EDIT) - _EDIT * edits[some]
    some = some[fewest < _EDIT * edits[some] - distances(some, _EDIT - 1, _EDIT)]
    tails = [_without_common_start(references[i], hypotheses[i]) for i in some]
    references, hypotheses = [ref for ref, _ in tails], [hyp for _, hyp in tails]
    for group in _groups(references, hypotheses):
        substitutions[some[group]] = _preferred(_pick(references, group), _pick(hypotheses, group))
    insertions = (edits - substitutions - abs(longer)) // 2 + np.maximum(longer, 0)
    return Counts(insertions, insertions - longer, substitutions)


def _distances(references: list[Tokens], hypotheses: list[Tokens], substitution: int = 1, other: int = 1,
               ) -> np.ndarray:
    """The least cost of turning each reference into its hypothesis, [N] int64."""
    if not references:
        return np.zeros(0, dtype=np.int64)
    return cpdist(references, hypotheses, scorer=Levenshtein.distance, dtype=np.int64,
                  scorer_kwargs={"weights": (other, other, substitution)})


def align(references: Sequence[Tokens], hypotheses: Sequence[Tokens]) -> list[str]:
    """The alignment of each pair as a string of steps from the first token to the last.

    ``=`` and ``S`` take a token of both, ``D`` one of the reference, ``I`` one of the hypothesis.

    >>> align([["a", "b", "c"]], [["a", "x", "c", "d"]])
    ['=S=I']
    """
    ways = [""] * len(references)
    for group in _groups(references, hypotheses):
        found = _ways(_pick(references, group), _pick(hypotheses, group))
        for i, way in zip(group, found, strict=True):
            ways[i] = way
    return ways


def _pick(items: Sequence, which: Sequence[int]) -> list:
    return [items[i] for i in which]


def _groups(references: Sequence[Tokens], hypotheses: Sequence[Tokens]) -> Iterator[list[int]]:
    """Indices in groups of like size, so that a padded table of a group wastes little and fits memory."""
    order = sorted(range(len(references)), key=lambda i: (len(references[i]), len(hypotheses[i])))
    group: list[int] = []
    widest = 0
    for i in order:
        rows, columns = len(references[i]) + 1, len(hypotheses[i]) + 1
        widest = max(widest, columns)
        if group and (len(group) + 1) * rows * (rows + widest) > _CELLS:
            yield group
            group, widest = [], columns
        group.append(i)
    if group:
        yield group


def _without_common_start(reference: Tokens, hypothesis: Tokens) -> tuple[Tokens, Tokens]:
    """Every preferred way ends in the diagonal through a common start (a common end has no such rule)."""
    same = next((i for i, (ref, hyp) in enumerate(zip(reference, hypothesis, strict=False)) if ref != hyp),
                min(len(reference), len(hypothesis)))
    return reference[same:], hypothesis[same:]


class _Numbers(dict):
    """A number for each different token."""

    def __missing__(self, token: str) -> int:
        self[token] = number = len(self)
        return number


def _encode(references: list[Tokens], hypotheses: list[Tokens]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens as numbers, [longest reference, B] and [longest hypothesis, B]; padding equals nothing."""
    numbers = _Numbers()
    encoded = []
    for side, padding in ((references, -1), (hypotheses, -2)):
        codes = np.full((len(side), max(map(len, side))), padding, dtype=np.int32)
        for row, tokens in zip(codes, side, strict=True):
            row[:len(tokens)] = [numbers[token] for token in tokens]
        encoded.append(np.ascontiguousarray(codes.T))
    return encoded[0], encoded[1]


class _Front(NamedTuple):
    """All cells (i, j) with i + j = number, of the table over prefixes (i reference, j hypothesis tokens)."""

    number: int
    cells: slice  # over i
    step: np.ndarray  # [cells, B] the preferred last step
    substitutions: np.ndarray  # [cells, B] on the preferred way


def _fronts(ref: np.ndarray, hyp: np.ndarray) -> Iterator[_Front]:
    """The edit-distance table by anti-diagonals: every cell of one depends on the two before it alone.

    What lies beyond a pair's own lengths means nothing.
    """
    (rows, batch), columns = ref.shape, len(hyp)
    hyp = hyp[::-1]
    # One row more than there are i, so that the row of i = 0 has one above it that no way leads to.
    cost = np.full((3, rows + 2, batch), _FAR, dtype=np.int32)
    subs = np.zeros((3, rows + 2, batch), dtype=np.int32)
    cost[0, 1] = 0
    for number in range(1, rows + columns + 1):
        first, end = max(0, number - columns), min(rows, number) + 1
        now, before, earlier = number % 3, (number - 1) % 3, (number - 2) % 3
        here, above = slice(first + 1, end + 1), slice(first, end)
        differ = np.ones((end - first, batch), dtype=bool)  # in the first row and column there's no diagonal
        inner = slice(max(first, 1), min(end, number))  # j is at least 1
        differ[inner.start - first:inner.stop - first] = (
            ref[inner.start - 1:inner.stop - 1]
            != hyp[columns - number + inner.start:columns - number + inner.stop])
        insertion = cost[before, here] + 1
        deletion = cost[before, above] + 1
        diagonal = cost[earlier, above] + differ
        cheaper = np.minimum(insertion, deletion)
        straight = diagonal < cheaper
        down = deletion < insertion
        cost[now, here] = np.minimum(diagonal, cheaper)
        subs[now, here] = np.where(
            straight, subs[earlier, above] + differ, np.where(down, subs[before, above], subs[before, here]))
        yield _Front(number, above, np.where(straight, _DIAGONAL, np.where(down, _DELETE, _INSERT)),
                     subs[now, here])


def _preferred(references: list[Tokens], hypotheses: list[Tokens]) -> np.ndarray:
    """How many substitutions the preferred alignment of each pair has, [B]."""
    rows, columns = (np.array([len(text) for text in side]) for side in (references, hypotheses))
    result = np.zeros(len(rows), dtype=np.int64)
    for front in _fronts(*_encode(references, hypotheses)):
        ending = np.flatnonzero(rows + columns == front.number)
        result[ending] = front.substitutions[rows[ending] - front.cells.start, ending]
    return result


def _ways(references: list[Tokens], hypotheses: list[Tokens]) -> list[str]:
    """The preferred alignment of each pair, from the table of steps, walked back for all pairs at once."""
    i, j = (np.array([len(text) for text in side]) for side in (references, hypotheses))
    batch, longest = len(i), i.max() + j.max()
    table = np.zeros((longest + 1, i.max() + 1, batch), dtype=np.int8)
    ref, hyp = _encode(references, hypotheses)
    for front in _fronts(ref, hyp):
        table[front.number, front.cells] = front.step
    way = np.zeros((batch, longest), dtype=np.uint8)
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
        way[active, back] = name
        i[active], j[active] = row, column
        active = active[(row + column) > 0]
    return [row.tobytes().lstrip(b"\0").decode() for row in way]
