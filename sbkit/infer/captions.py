"""Shows the lines of a stream as they come: in a terminal, as text, or as JSON for programs."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

from sbkit.decode.spans import Word
from sbkit.infer.lines import LineMessages, TranscriptLine

#: What a terminal is told: weak letters, usual ones, to erase from the cursor on.
_DIM, _USUAL, _ERASE_BELOW = "\x1b[2m", "\x1b[0m", "\x1b[J"
_WIDE = {"W": 2, "F": 2}
_NO_CELL = ("Mn", "Me", "Cf")  # marks on a letter, and joiners


class Captions(ABC):
    """Shows the lines of one stream.

    out : where to
    """

    def __init__(self, out: TextIO):
        self._out = out

    @abstractmethod
    def show(self, line: TranscriptLine) -> None:
        """Show a line as it stands now."""

    def end(self, seconds: float) -> None:
        """Say that the stream is over, after so many seconds; most have nothing to say then."""
        return

    def close(self) -> None:
        """Leave the output fit for others, wherever the stream is; where whole lines are written, it is."""
        return


class Plain(Captions):
    """Writes each line of text once it is complete.

    text : joins words
    out : where to
    """

    def __init__(self, text: Callable[[Sequence[Word]], str], out: TextIO):
        super().__init__(out)
        self._text = text

    def show(self, line: TranscriptLine) -> None:
        if line.over:
            self._out.write(self._text(line.settled) + "\n")
            self._out.flush()


class Json(Captions):
    """Writes a JSON object in a line for each change: ``partial``, ``final``, and ``end`` at last."""

    def __init__(self, text: Callable[[Sequence[Word]], str], out: TextIO):
        super().__init__(out)
        self._messages = LineMessages(text)

    def show(self, line: TranscriptLine) -> None:
        if (message := self._messages.of(line)) is not None:
            self._write(message)

    def end(self, seconds: float) -> None:
        self._write({"type": "end", "duration": round(seconds, 3)})

    def _write(self, facts: dict[str, Any]) -> None:
        self._out.write(json.dumps(facts, ensure_ascii=False) + "\n")
        self._out.flush()


class TerminalCaptions(Captions):
    """Rewrites the line in progress in a terminal, with what may change in it dim. Lines that are complete stay.

    Rows of settled words stay too, so that only the last few rows are ever rewritten.

    space : stands between words
    out : the terminal
    """

    def __init__(self, space: str, out: TextIO):
        super().__init__(out)
        self._space = space
        self._dims = not os.environ.get("NO_COLOR")
        self._kept = 0  # words of the line that are in rows that stay
        self._drawn = [""]  # the rows below those

    def show(self, line: TranscriptLine) -> None:
        words, settled = [word.text for word in line.words[self._kept :]], len(line.settled) - self._kept
        rows = _rows(words, self._space, max(2, shutil.get_terminal_size().columns - 1))
        self._draw([self._row(row, settled) for row in rows])
        if line.over:
            self._out.write("\n")
            self._kept, self._drawn = 0, [""]
        else:
            stay = max((i for i, row in enumerate(rows) if i and row[0].begins and row[0].word < settled), default=0)
            if stay:
                self._kept += rows[stay][0].word
                self._drawn = self._drawn[stay:]
        self._out.flush()

    def close(self) -> None:
        if self._drawn != [""]:
            self._out.write("\n")
            self._kept, self._drawn = 0, [""]
            self._out.flush()

    def _draw(self, rows: list[str]) -> None:
        if rows != self._drawn:
            up = f"\x1b[{len(self._drawn) - 1}A" if len(self._drawn) > 1 else ""
            self._out.write(up + "\r" + _ERASE_BELOW + "\n".join(rows))
            self._drawn = rows

    def _row(self, row: list[_CaptionPart], settled: int) -> str:
        text, dim = "", False
        for piece in row:
            text += self._space if text and piece.begins else ""
            if self._dims and not dim and piece.word >= settled:
                text, dim = text + _DIM, True
            text += piece.text
        return text + _USUAL * dim


class _CaptionPart(NamedTuple):
    """A word, or a part of one that is wider than the terminal."""

    text: str
    word: int
    begins: bool


def _rows(words: Sequence[str], space: str, width: int) -> list[list[_CaptionPart]]:
    """Break words into rows of so many cells."""
    rows: list[list[_CaptionPart]] = [[]]
    used = 0
    for number, word in enumerate(words):
        for place, part in enumerate(_parts(word, width)):
            gap = len(space) if rows[-1] and not place else 0
            if rows[-1] and used + gap + _cells(part) > width:
                rows.append([])
                used = gap = 0
            rows[-1].append(_CaptionPart(part, number, not place))
            used += gap + _cells(part)
    return rows


def _parts(word: str, width: int) -> list[str]:
    """Split a word into parts that fit into a row."""
    parts = [""]
    for character in word:
        shown = "\ufffd" if unicodedata.category(character) == "Cc" else character
        if parts[-1] and _cells(parts[-1] + shown) > width:
            parts.append("")
        parts[-1] += shown
    return parts


def _cells(text: str) -> int:
    return sum(_WIDE.get(unicodedata.east_asian_width(each), 1) for each in text
               if unicodedata.category(each) not in _NO_CELL)
