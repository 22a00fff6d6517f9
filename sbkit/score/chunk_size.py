"""Chunk sizes as users write and read them: milliseconds, or ``whole`` for whole utterances, which is None in code."""

from __future__ import annotations

WHOLE = "whole"


def written(chunk: int | None) -> str:
    """Write a size as the command line has it.

    >>> written(320), written(None)
    ('320', 'whole')
    """
    return WHOLE if chunk is None else str(chunk)


def named(chunk: int | str | None) -> str:
    """Name a size in a table.

    >>> named(320), named(None), named("whole")
    ('320 ms', 'whole', 'whole')
    """
    return WHOLE if chunk in (None, WHOLE) else f"{chunk} ms"
