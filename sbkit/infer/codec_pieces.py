"""Pieces of long recordings for a codec: they overlap by what decides a frame, so that what is kept is as of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sbkit.errors import SbkitError
from sbkit.export import layout

#: Seconds that a codec is given at once, besides what decides the frames at both ends.
PIECE_SECONDS = 30.0
#: The longest recording of a codec that looks at all of it.
MAX_SECONDS = 600.0
#: Seconds in one batch, with padding.
BATCH_SECONDS = 60.0


class CodecChunk(NamedTuple):
    """Frames ``begin`` to ``end`` of a recording, of which ``first`` to ``last`` are kept."""

    source: int  # number of the recording
    begin: int
    end: int
    first: int
    last: int


def too_long(frames: int, config: layout.CodecConfig) -> SbkitError | None:
    """Say that a recording of so many frames can't be given to a codec that looks at all of it."""
    seconds = frames * config.stride / config.sample_rate
    if config.context is not None or seconds <= MAX_SECONDS:
        return None
    return SbkitError(f"it has {seconds:.0f} s, but this codec looks at a recording as a whole, up to "
                      f"{MAX_SECONDS:g} s", hint="split it")


def pieces(source: int, frames: int, config: layout.CodecConfig) -> list[CodecChunk]:
    """Cut a recording of so many frames into pieces."""
    at_once = max(1, round(PIECE_SECONDS * config.sample_rate / config.stride))
    context = config.context
    if frames <= at_once or context is None:
        return [CodecChunk(source, 0, frames, 0, frames)] if frames else []
    return [CodecChunk(source, max(0, first - context), min(frames, first + at_once + context), first,
                       min(frames, first + at_once)) for first in range(0, frames, at_once)]


def batches(parts: Sequence[CodecChunk], config: layout.CodecConfig) -> list[list[CodecChunk]]:
    """Put pieces of about the same length together."""
    most = BATCH_SECONDS * config.sample_rate / config.stride
    made: list[list[CodecChunk]] = []
    for piece in sorted(parts, key=lambda each: each.begin - each.end):  # the longest is the first of its batch
        if made and (len(made[-1]) + 1) * (made[-1][0].end - made[-1][0].begin) <= most:
            made[-1].append(piece)
        else:
            made.append([piece])
    return made
