"""Edits between many short sequences at once: a column of each pair's table is a number with a bit for each row.

Between neighbours the distances of the table differ by one at most, so that two bits say all of a cell, and a few
operations on integers all of a column (Myers 1999, Hyyrö 2003). Here each is an array of many pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sbkit.score.texts import Words

MOST = 63  # tokens of a sequence, that fit an integer with a bit to spare

_CELLS = 2_000_000  # of all tables that are held at once
_BITS = (1 << np.arange(8, dtype=np.uint8))[:, None]
_ONES = np.array([number.bit_count() for number in range(256)], np.uint8)


def _ones_by_table(numbers: np.ndarray) -> np.ndarray:
    """How many bits of each are set, [B] uint8."""
    return _ONES[numbers.view(np.uint8)].reshape(len(numbers), -1).sum(1, dtype=np.uint8)


_ones = getattr(np, "bitwise_count", _ones_by_table)  # from numpy 2 on


def count_short(references: Words, hypotheses: Words) -> tuple[np.ndarray, np.ndarray]:
    """Edits and substitutions of pairs of up to ``MOST`` words, [N] int64 both."""
    edits, substitutions = np.zeros((2, len(references.counts)), np.int64)
    for group in _groups(np.maximum(references.counts, hypotheses.counts)):
        rows, columns = references.counts[group], hypotheses.counts[group]
        same = _same(references, hypotheses, group)
        edits[group], substitutions[group] = _counted(same, rows, columns)
    return edits, substitutions


def _groups(sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Indices in groups of like size, the largest first."""
    order = np.argsort(sizes.astype(np.uint8), kind="stable")[::-1]
    start = 0
    while start < len(order):
        end = start + 1 + _CELLS // (int(sizes[order[start]]) ** 2 + 1)
        yield order[start:end]
        start = end


def _same(references: Words, hypotheses: Words, group: np.ndarray) -> np.ndarray:
    """The rows where each column's token stands too, [longest hypothesis, B] unsigned; beyond a pair's own anything."""
    rows, columns = int(references.counts[group].max()), int(hypotheses.counts[group].max())
    kind = next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if rows < 8 * kind().itemsize)
    ref = references.numbers.take(references.begins[group] + np.arange(rows)[:, None], mode="clip")
    hyp = hypotheses.numbers.take(hypotheses.begins[group] + np.arange(columns)[:, None], mode="clip")
    same = np.zeros(hyp.shape, kind)
    for row in range(0, rows, 8):
        eight = (ref[row:row + 8] == hyp[:, None]).view(np.uint8)
        eight *= _BITS[:eight.shape[1]]
        same |= np.bitwise_or.reduce(eight, axis=1).astype(kind) << kind(row)
    return same


def _counted(same: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edits and substitutions of pairs whose table has so many ``rows`` and ``columns``, [B] int64 all."""
    kind = same.dtype.type
    pairs = np.arange(len(rows))
    below = (kind(1) << rows.astype(kind)) - kind(1)  # the bits of a pair's own rows
    inserted, down, up = _table(same)
    edits = columns + _ones(down[columns, pairs] & below) - _ones(up[columns, pairs] & below)
    # Substitutions are edits - |longer| - 2 * (insertions that a deletion elsewhere makes up for), so they are bounded
    # from above. From below they are by the distance in which one costs two: no alignment has less.
    longer = columns - rows
    substitutions = edits - abs(longer)
    least = rows + columns - 2 * _ones(~_common(same)[columns, pairs] & below) - edits
    some = np.flatnonzero((substitutions > 1) & (least < substitutions))
    if len(some):
        insertions = _insertions(inserted[:, some], down[:, some], rows[some], columns[some],
                                 int((rows + (edits + longer) // 2)[some].max()))
        substitutions[some] = edits[some] + longer[some] - 2 * insertions
    return edits, substitutions


def _table(same: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns of tables of edit distances, [columns + 1, B] unsigned.

    The first says in bit i where row i has one more than in the column before; the others say in bit i where row i + 1
    has one more than row i, and where one less.
    """
    inserted, down, up = (np.empty((len(same) + 1, same.shape[1]), same.dtype) for _ in range(3))
    inserted[0], down[0], up[0] = 0, ~same.dtype.type(0), 0
    one = same.dtype.type(1)
    kept = np.empty_like(down[0])
    for column, equal in enumerate(same):
        down_before, up_before = down[column], up[column]
        more, down_now, up_now = inserted[column + 1], down[column + 1], up[column + 1]
        np.bitwise_and(equal, down_before, out=kept)
        kept += down_before
        kept ^= down_before
        kept |= equal
        kept |= up_before  # where the distance is that of the cell before in both ways
        np.bitwise_or(kept, down_before, out=more)
        np.invert(more, out=more)
        more |= up_before
        more <<= one
        more |= one
        np.bitwise_and(kept, down_before, out=up_now)  # where a row has one less than in the column before
        up_now <<= one
        np.bitwise_or(kept, more, out=down_now)
        np.invert(down_now, out=down_now)
        down_now |= up_now
        np.bitwise_and(kept, more, out=up_now)
    return inserted, down, up


def _common(same: np.ndarray) -> np.ndarray:
    """The columns of tables of longest common subsequences, [columns + 1, B]: a bit is 0 where a row has one more."""
    columns = np.empty((len(same) + 1, same.shape[1]), same.dtype)
    columns[0] = ~same.dtype.type(0)
    kept = np.empty_like(columns[0])
    for equal, before, now in zip(same, columns, columns[1:], strict=False):
        np.bitwise_and(before, equal, out=kept)
        np.subtract(before, kept, out=now)
        kept += before
        now |= kept
    return columns


def _insertions(inserted: np.ndarray, down: np.ndarray, rows: np.ndarray, columns: np.ndarray, steps: int,
                ) -> np.ndarray:
    """Insertions of the way back from the end that prefers an insertion to a deletion to a diagonal step, [B].

    ``steps`` are enough for each.
    """
    # Bit i says whether the way leaves row i, and whether it leaves the column: neither in the first cell.
    way = np.stack([~inserted.T, (inserted | ~(down << inserted.dtype.type(1))).T]).astype(np.int64)
    way[0, :, 0] &= ~1
    way[1, :, 0] = 0
    row = rows.copy()
    cell = np.arange(way.shape[1]) * way.shape[2] + columns + np.array([[0], [way[0].size]])
    left = np.empty((steps, *cell.shape), np.int64)
    for now in left:
        way.take(cell, out=now, mode="clip")
        now >>= row
        now &= 1
        row -= now[0]
        cell -= now[1]
    return columns - (left[:, 0] & left[:, 1]).sum(0)
