"""Durations of a text's characters in a recording, from a recogniser's alignment of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sbkit.decode.spans import WORD_START
from sbkit.errors import SbkitError

#: Decibels below a recording's loudest window under which it is silent before and after the speech.
SILENT = -35.0
_WINDOW = 0.02  # seconds


class Alignment(NamedTuple):
    """The pieces of a known text, and their starts and ends in seconds by a recogniser."""

    pieces: list[str]
    starts: np.ndarray
    ends: np.ndarray
    separator: str | None = WORD_START
    """How pieces write the space before a word; None: not at all."""


def spell(text: str, pieces: Sequence[str], separator: str | None = WORD_START) -> list[int]:
    """Spell a text with as few pieces as possible; returns their ids.

    pieces : by id
    separator : how they write the space before a word; None: not at all
    """
    written = text if separator is None else separator + text.replace(" ", separator)
    ids = {piece: number for number, piece in reversed(list(enumerate(pieces)))}
    longest = max(map(len, ids))
    # The best spelling of the text up to each character: its length in pieces, where the last piece begins, its id.
    best: list[tuple[int, int, int] | None] = [(0, 0, 0)]
    for end in range(1, len(written) + 1):
        options = []
        for begin in range(max(0, end - longest), end):
            before = best[begin]
            piece = ids.get(written[begin:end])
            if before is not None and piece is not None:
                options.append((before[0] + 1, begin, piece))
        best.append(min(options, default=None))

    spelled = []
    end = len(written)
    while end:
        last = best[end]
        if last is None:
            unknown = sorted(set(written) - {character for piece in ids for character in piece})
            raise SbkitError("unspellable-word", "the recogniser has no tokens for "
                             f"{', '.join(map(repr, unknown)) or 'this text'}",
                             hint="use one that was trained on the same alphabet")
        _, end, piece = last
        spelled.append(piece)
    return spelled[::-1]


def durations(text: str, alignment: Alignment, signal: np.ndarray, sample_rate: int, frames: int) -> np.ndarray:
    """Return the frames of the silence before, of each character, and of the silence after: [U + 2], ``frames`` in all.

    A character ends in the middle between its end and the next one's start in the alignment; the first begins and the
    last ends with the recording's speech.

    text : U characters
    alignment : of its pieces
    signal : the recording [S]
    """
    rate = frames * sample_rate / len(signal)  # frames per second; the last frame may be partial
    begins = []
    ends = []
    for piece, start, end in zip(alignment.pieces, alignment.starts * rate, alignment.ends * rate, strict=True):
        edges = np.linspace(start, end, len(piece) + 1)
        begins += list(edges[:-1])
        ends += list(edges[1:])
    if alignment.separator is not None:  # the first separator is not in the text
        begins = begins[1:]
        ends = ends[1:]
    if len(begins) != len(text) or not text:
        raise ValueError(f"{len(text)} characters are spelled with {len(begins)}")

    speech_start, speech_end = speech(signal, sample_rate)
    first = rate * speech_start
    last = rate * speech_end
    between = (np.array(ends[:-1]) + np.array(begins[1:])) / 2
    edges = np.concatenate([[0.0, first], between.clip(first, last), [last, float(frames)]])
    return np.diff(np.maximum.accumulate(edges.round().clip(0, frames)).astype(np.int64))


def symbol_durations(frames: np.ndarray, ends: Sequence[float]) -> np.ndarray:
    """Return the frames of symbols [U + 2] from those of characters [C + 2], both with the silence before and after.

    ends : where each symbol ends in the text, in characters [U]
    """
    edges = frames[:-1].cumsum()
    inside = np.interp(ends, np.arange(len(edges)), edges).round().astype(np.int64)
    return np.diff(np.concatenate([[0, edges[0]], inside, [frames.sum()]]))


def speech(signal: np.ndarray, sample_rate: int) -> tuple[float, float]:
    """Return the start and end of speech in a recording [S] in seconds; all of it if it is silent."""
    size = round(_WINDOW * sample_rate)
    windows = signal[: len(signal) // size * size].reshape(-1, size)
    power = np.square(windows, dtype=np.float64).mean(axis=1)
    if not len(power) or not power.max() > 0:
        return 0.0, len(signal) / sample_rate
    loud = np.flatnonzero(power > power.max() * 10 ** (SILENT / 10))
    return float(loud[0] * size / sample_rate), float((loud[-1] + 1) * size / sample_rate)
