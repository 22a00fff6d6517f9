"""Sampling of codes: what may come where is masked before it is sampled, so that no other id can come.

A model's logits for a level have a column for each entry of its codebook, and behind these one for each special token;
columns behind those, which pad a table to a round size, are never sampled. A code and a special token have different
places in what is sampled, so that no number of one can be taken for the other: what looks codes up has a table of
exactly as many rows as the codebook, and what looks special tokens up has a table of its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbkit.codes.books import Books
from sbkit.errors import SbkitError


class Special(enum.IntEnum):
    """Tokens that are no codes, by the row of their own table."""

    BEGIN = 0
    END = 1
    PAD = 2


class SlotState(enum.IntEnum):
    """Where a sequence stands, which says what may come next."""

    INSIDE = 0
    """Within a frame, or before the fewest frames: a code."""
    BOUNDARY = 1
    """At the beginning of a frame: a code or the end."""
    FULL = 2
    """At the beginning of a frame that would be one too many: the end."""
    ENDED = 3
    """Behind the end: padding."""


#: Whether a code may come in a state, and which of the special tokens.
_MAY = {SlotState.INSIDE: (True, False, False, False), SlotState.BOUNDARY: (True, False, True, False),
        SlotState.FULL: (False, False, True, False), SlotState.ENDED: (False, False, False, True)}


class NoChoice(SbkitError):
    """Logits from which nothing can be sampled."""


@dataclass(frozen=True)
class Sampled:
    """A sample of each row: a code or a special token.

    codes : [B] int64, ids within their codebook; 0 where a row has a special token
    special : [B] int64, rows of the table of special tokens; -1 where a row has a code
    """

    codes: np.ndarray
    special: np.ndarray


class Slots:
    """Knows what may come in which slot, and samples it.

    books : a slot is a level of them
    """

    def __init__(self, books: Books):
        self.books = books

    def width(self, slot: int) -> int:
        """The columns of a slot's logits that mean anything."""
        return self.books.sizes[slot] + len(Special)

    def mask(self, slot: int, state: np.ndarray) -> np.ndarray:
        """Return what may be sampled [B, width] in states [B] of ``SlotState``."""
        if slot not in range(len(self.books.sizes)):
            raise ValueError(f"there is no slot {slot} among {len(self.books.sizes)}")
        if any(each not in _MAY for each in state.tolist()):
            raise ValueError(f"there is no state {state}")
        size, may = self.books.sizes[slot], np.array([_MAY[each] for each in state.tolist()], bool).reshape(-1, 4)
        if slot and may[:, 1 + Special.END].any():
            raise ValueError(f"a frame begins with slot 0, not {slot}")
        allowed = np.zeros((len(state), self.width(slot)), bool)
        allowed[:, :size], allowed[:, size:] = may[:, :1], may[:, 1:]
        return allowed

    def sample(self, logits: np.ndarray, slot: int, state: np.ndarray,
               generator: np.random.Generator | Sequence[np.random.Generator], temperature: float = 1.0,
               top_k: int | None = None) -> Sampled:
        """Sample a code or a special token for each row.

        Arguments
        ---------
        logits : [B, width or more]; -inf is for what the model itself rules out. Columns for special tokens may be
            left out where none may come
        slot : the level
        state : [B], of ``SlotState``
        generator : of all rows, or one for each: then what a row gets does not depend on the others
        temperature : 0 takes the likeliest
        top_k : takes one of so many of the likeliest, among those that may come

        Raises ``NoChoice`` if a logit of what may come is not a number or infinite, or all of them are ruled out.
        """
        _check_options(temperature, top_k)
        allowed = self.mask(slot, state)
        scores = self._scores(logits, slot, allowed)
        rows, width = scores.shape
        if top_k is not None and top_k < width:
            keep = np.argpartition(scores, width - top_k, axis=1)[:, width - top_k :]
            kept = np.full_like(scores, -np.inf)
            np.put_along_axis(kept, keep, np.take_along_axis(scores, keep, axis=1), axis=1)
            scores = kept
        if temperature:
            with np.errstate(over="ignore"):  # what is so unlikely becomes -inf
                scores = (scores - scores.max(axis=1, keepdims=True)) / temperature
            scores = scores + _noise(generator, rows, width)
        chosen = scores.argmax(axis=1)
        assert allowed[np.arange(rows), chosen].all(), "all others are -inf"
        return self._split(slot, chosen)

    def _scores(self, logits: np.ndarray, slot: int, allowed: np.ndarray) -> np.ndarray:
        """Return the logits of what may come [B, width], and -inf for all else."""
        rows, width = allowed.shape
        # Where there is no choice, the model isn't asked: behind its end a row may hold anything.
        forced = (allowed.sum(axis=1) == 1)[:, None] & allowed
        asked = allowed & ~forced
        least = max(np.flatnonzero(asked.any(axis=0)), default=-1) + 1
        if logits.ndim != 2 or len(logits) != rows or logits.shape[1] < least:
            raise SbkitError(f"the logits of slot {slot} are {list(logits.shape)}, but must be [{rows}, {width}]: "
                             f"{self.books.sizes[slot]} codes and {len(Special)} special tokens")
        scores = np.full(allowed.shape, -np.inf)
        columns = min(width, logits.shape[1])
        np.copyto(scores[:, :columns], logits[:, :columns], where=asked[:, :columns])
        scores[forced] = 0.0
        _check_scores(scores, slot)
        return scores

    def _split(self, slot: int, chosen: np.ndarray) -> Sampled:
        special = chosen - self.books.sizes[slot]
        return Sampled(np.where(special < 0, chosen, 0), np.where(special < 0, -1, special))


class Sequences:
    """Sequences that grow by one sample each at a time, level by level and frame by frame, until each has its end.

    Arguments
    ---------
    slots : what may come
    rows : number of sequences
    least, most : frames of a sequence; its end comes neither before nor after
    """

    def __init__(self, slots: Slots, rows: int, most: int, least: int = 1):
        if not 0 <= least <= most:
            raise ValueError(f"from {least} to {most} frames is no range")
        self._slots, self._least, self._most = slots, least, most
        self.slot = 0
        """The level that comes next."""
        self.ended = np.zeros(rows, bool)
        self._levels: list[np.ndarray] = []
        self._frames: list[np.ndarray] = []
        self._lengths = np.zeros(rows, np.int64)

    @property
    def state(self) -> np.ndarray:
        """Where each sequence stands [B]."""
        frames = len(self._frames)
        if self.slot or frames < self._least:
            here = SlotState.INSIDE
        else:
            here = SlotState.FULL if frames == self._most else SlotState.BOUNDARY
        return np.where(self.ended, SlotState.ENDED, here)

    @property
    def done(self) -> bool:
        """Whether all have their end."""
        return bool(self.ended.all())

    def take(self, sampled: Sampled) -> None:
        """Append what ``Slots.sample`` gave for :attr:`slot` and :attr:`state`; refuses what may not come there."""
        size, rows = self._slots.books.sizes[self.slot], np.arange(len(self.ended))
        column = np.where(sampled.special < 0, sampled.codes, size + sampled.special)
        allowed = self._slots.mask(self.slot, self.state)
        inside = (column >= 0) & (column < allowed.shape[1]) & (sampled.special >= -1)
        if not (inside & ((sampled.special >= 0) | (column < size))).all() or not allowed[rows, column].all():
            raise ValueError(f"what was sampled may not come in slot {self.slot}: {sampled}")
        self.ended = self.ended | (sampled.special == Special.END)
        self._levels.append(sampled.codes)
        self.slot = (self.slot + 1) % len(self._slots.books.sizes)
        if self.slot == 0:
            self._frames.append(np.stack(self._levels, axis=1))
            self._lengths += ~self.ended
            self._levels = []

    def codes(self, row: int) -> np.ndarray:
        """Return the whole frames of a sequence [T, Q]."""
        whole = self._frames[: self._lengths[row]]
        return np.array([frame[row] for frame in whole], np.int64).reshape(-1, len(self._slots.books.sizes))


def _check_options(temperature: float, top_k: int | None) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise SbkitError(f"the temperature is {temperature}, but must be a number of 0 or more")
    if top_k is not None and top_k < 1:
        raise SbkitError(f"top_k is {top_k}, but must be 1 or more")


def _check_scores(scores: np.ndarray, slot: int) -> None:
    wrong = np.argwhere(np.isnan(scores) | (scores == np.inf))
    if len(wrong):
        row, column = map(int, wrong[0])
        raise NoChoice(f"the model gives {scores[row, column]} for id {column} in slot {slot}, row {row}",
                       hint="a model that learnt gives finite numbers: is its input right?")
    empty = np.flatnonzero((scores == -np.inf).all(axis=1))
    if len(empty):
        raise NoChoice(f"the model rules out all that may come in slot {slot}, row {empty[0]}")


def _noise(generator: np.random.Generator | Sequence[np.random.Generator], rows: int, width: int) -> np.ndarray:
    """Draw what makes the largest sum a sample of the distribution (Gumbel's trick)."""
    if isinstance(generator, np.random.Generator):
        return generator.gumbel(size=(rows, width))
    if len(generator) != rows:
        raise ValueError(f"{len(generator)} generators are given for {rows} rows")
    return np.stack([each.gumbel(size=width) for each in generator])
