"""Chunk sizes on command lines and in tables: milliseconds, or ``whole`` for whole utterances, None in code."""

from __future__ import annotations

WHOLE = "whole"


def to_label(chunk: int | str | None) -> str:
    """Format a size for a table.

    >>> to_label(320), to_label(None), to_label("whole")
    ('320 ms', 'whole', 'whole')
    """
    return WHOLE if chunk in (None, WHOLE) else f"{chunk} ms"
