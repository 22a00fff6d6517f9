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
EQUAL = "="
INSERTION = "I"
DELETION = "D"
SUBSTITUTION = "S"
# Steps as numbers: of several shortest paths, that with the smallest last step is preferred.
_INSERT = 1
_DELETE = 2
_DIAGONAL = 3

# A path through the table is encoded as one number: its edits, then its last step, then its substitutions. The
# smallest number is that of the preferred path.
_AN_EDIT = 1 << 34
_A_STEP = 1 << 32
_SUBSTITUTIONS = (1 << 32) - 1
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
    differing_refs = list(compress(references, differ))
    differing_hyps = list(compress(hypotheses, differ))
    parts = []
    for start in range(0, len(differing_refs), _AT_ONCE):
        refs: list[_Coded] = list(differing_refs[start:start + _AT_ONCE])
        hyps: list[_Coded] = list(differing_hyps[start:start + _AT_ONCE])
        longer = _lengths(hyps) - _lengths(refs)
        if _must_be_numbered(refs, hyps):
            number = _Numbers().__getitem__
            refs = [list(map(number, tokens)) for tokens in refs]
            hyps = [list(map(number, tokens)) for tokens in hyps]
        parts.append(_count(refs, hyps, longer))
    counts = np.zeros((3, len(differ)), dtype=np.int64)
    if parts:
        counts[:, np.frombuffer(differ, bool)] = np.concatenate(parts, axis=1)
    return EditCounts(*counts)


def _must_be_numbered(references: Sequence[_Coded], hypotheses: Sequence[_Coded]) -> bool:
    """Whether rapidfuzz can't compare the tokens, because it compares hashes: an empty word hashes like "\\0", and
    objects other than texts may have any hash."""
    if _are_strings(references, hypotheses):
        return False
    return any("" in tokens or not set(map(type, tokens)) <= {str} for side in (references, hypotheses)
               for tokens in side)


def _count(references: Sequence[_Coded], hypotheses: Sequence[_Coded], longer: np.ndarray) -> EditCounts:
    """Count the edits of pairs whose hypothesis is ``longer`` by this many tokens, [N] int64."""
    edits = _distances(references, hypotheses, 1)
    # edits = substitutions + |longer| + 2 * (insertions that are balanced by a deletion elsewhere), which is an upper
    # bound of the substitutions. The lower bound is the distance in which a substitution costs two.
    substitutions = edits - abs(longer)
    unclear = np.flatnonzero(substitutions > 1)
    least = _distances(_pick(references, unclear), _pick(hypotheses, unclear), 2) - edits[unclear]
    unclear = unclear[least < substitutions[unclear]]
    substitutions[unclear] = _preferred_substitutions(
        _pick(references, unclear), _pick(hypotheses, unclear), edits[unclear])
    insertions = (edits - substitutions + longer) // 2
    return EditCounts(insertions, insertions - longer, substitutions)


def _preferred_substitutions(references: list[_Coded], hypotheses: list[_Coded], edits: np.ndarray) -> np.ndarray:
    """The substitutions in the preferred alignment of each pair, of which the number of edits [N] is known."""
    substitutions = np.zeros(len(references), np.int64)
    if not references:
        return substitutions
    # A common start goes: every preferred path follows the diagonal there (not so at a common end).
    common = cpdist(references, hypotheses, scorer=Prefix.similarity, dtype=np.int64).tolist()
    references = [tokens[start:] for tokens, start in zip(references, common, strict=True)]
    hypotheses = [tokens[start:] for tokens, start in zip(hypotheses, common, strict=True)]

    order = np.argsort(_lengths(references), kind="stable")
    at_once = max(1, _FRONT // max(map(len, references)))
    for start in range(0, len(order), at_once):
        group = order[start:start + at_once]
        group_refs = _pick(references, group)
        group_hyps = _pick(hypotheses, group)
        rows = _lengths(group_refs)
        columns = _lengths(group_hyps)
        # An alignment has no more deletions and insertions than the edits allow.
        deletions = int((edits[group] - columns + rows).max() // 2)
        insertions = int((edits[group] + columns - rows).max() // 2)
        for front in _fronts(*_encode(group_refs, group_hyps), deletions, insertions):
            ending = np.flatnonzero(rows + columns == front.number)
            substitutions[group[ending]] = front.substitutions[rows[ending] - front.cells.start, ending]
    return substitutions


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
        group_alignments = _alignments(_pick(references, group), _pick(hypotheses, group))
        for i, alignment in zip(group, group_alignments, strict=True):
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
        rows = len(references[i]) + 1
        columns = len(hypotheses[i]) + 1
        widest = max(widest, columns)
        if group and (len(group) + 1) * rows * (rows + widest) > CELLS:
            yield group
            group = []
            widest = columns
        group.append(i)
    if group:
        yield group


class _Numbers(dict[Hashable, int]):
    """Numbers the distinct tokens in order of appearance."""

    def __missing__(self, token: Hashable) -> int:
        number = len(self)
        self[token] = number
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
    (rows, batch) = ref.shape
    columns = len(hyp)
    hyp = hyp[::-1]
    # One extra, unreachable row on either side.
    paths = np.full((3, rows + 3, batch), _UNREACHABLE, dtype=np.int64)
    paths[0, 1] = 0
    for number in range(1, rows + columns + 1):
        first = max(0, number - columns, (number - insertions + 1) // 2)
        end = min(rows, number, (number + deletions) // 2) + 1
        if first >= end:
            return
        # Three fronts are kept, in turn.
        now = number % 3
        before = (number - 1) % 3
        earlier = (number - 2) % 3
        here = slice(first + 1, end + 1)
        above = slice(first, end)

        diagonal = paths[earlier, above] + _DIAGONAL * _A_STEP
        low = max(first, 1)  # there are no diagonal steps into the first row and column
        high = min(end, number)
        differ = ref[low - 1:high - 1] != hyp[columns - number + low:columns - number + high]
        diagonal[low - first:high - first] += differ * (_AN_EDIT + 1)
        least = np.minimum(diagonal, paths[before, above] + (_AN_EDIT + _DELETE * _A_STEP))
        np.minimum(least, paths[before, here] + (_AN_EDIT + _INSERT * _A_STEP), out=least)
        paths[now, here] = least & ~_STEPS
        # The cells next to them hold values of an earlier front.
        paths[now, first] = _UNREACHABLE
        paths[now, end + 1] = _UNREACHABLE
        yield _Front(number, above, least)


def _alignments(references: Sequence[_Coded], hypotheses: Sequence[_Coded]) -> list[str]:
    """The preferred alignment of each pair, from the table of steps, walked back for all pairs at once."""
    i = np.array([len(tokens) for tokens in references])
    j = np.array([len(tokens) for tokens in hypotheses])
    batch = len(i)
    longest = i.max() + j.max()
    table = np.zeros((longest + 1, i.max() + 1, batch), dtype=np.int8)
    ref, hyp = _encode(references, hypotheses)
    for front in _fronts(ref, hyp, len(ref), len(hyp)):
        table[front.number, front.cells] = front.steps
    steps = np.zeros((batch, longest), dtype=np.uint8)
    names = np.frombuffer(b"\0IDS", dtype=np.uint8)
    active = np.flatnonzero(i + j)
    for back in range(longest - 1, -1, -1):
        step = table[i[active] + j[active], i[active], active]
        row = i[active] - (step != _INSERT)
        column = j[active] - (step != _DELETE)
        name = names[step]
        diagonal = np.flatnonzero(step == _DIAGONAL)
        same = ref[row[diagonal], active[diagonal]] == hyp[column[diagonal], active[diagonal]]
        name[diagonal[same]] = ord(EQUAL)
        steps[active, back] = name
        i[active] = row
        j[active] = column
        active = active[(row + column) > 0]
    return [row.tobytes().lstrip(b"\0").decode() for row in steps]
