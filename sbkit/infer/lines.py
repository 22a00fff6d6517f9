"""Lines of a stream: words up to a pause, and those of the line in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sbkit.decode.spans import Word
from sbkit.decode.streaming import StreamResult


@dataclass(frozen=True)
class TranscriptLine:
    """The current state of a line."""

    settled: list[Word]
    """Words that are final."""
    partial: list[Word]
    """Words after them, which may change."""
    complete: bool
    """Whether the line has ended; the next words begin another one."""

    @property
    def words(self) -> list[Word]:
        return self.settled + self.partial


class Lines:
    """Collects a stream's results into lines.

    longest : seconds after which a line without a pause ends, to bound memory
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._settled: list[Word] = []

    def add(self, result: StreamResult) -> list[TranscriptLine]:
        """Return the lines that changed: the one that ended, if any, and the one in progress."""
        self._settled += result.settled
        changed = []
        if self._settled and (result.endpoint or self._settled[-1].end - self._settled[0].start >= self._longest):
            changed.append(TranscriptLine(self._settled, [], True))
            self._settled = []
        if result.partial or not changed:
            changed.append(TranscriptLine(list(self._settled), result.partial, False))
        return changed


class LineMessages:
    """Makes the JSON objects of a stream's lines: of a complete one, and of the one in progress if it changed.

    text : joins words
    """

    def __init__(self, text: Callable[[Sequence[Word]], str]):
        self._text = text
        self._shown = ("", "")  # the settled text and the whole text of the line in progress

    def message(self, line: TranscriptLine) -> dict[str, Any] | None:
        """Return the object of a line; None if nothing is new."""
        words = line.words
        settled = self._text(line.settled)
        text = self._text(words)
        start = {"start": round(words[0].start, 3)} if words else {}
        if line.complete:
            self._shown = ("", "")
            return {"type": "final", **start, "end": round(words[-1].end, 3), "text": text,
                    "words": [{"word": word.text, **word.facts()} for word in words]}
        if (settled, text) == self._shown:
            return None
        self._shown = settled, text
        return {"type": "partial", **start, "text": text, "settled": settled}
