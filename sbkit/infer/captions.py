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

#: Terminal codes: dim, normal, erase from the cursor on.
_DIM, _NORMAL, _ERASE_BELOW = "\x1b[2m", "\x1b[0m", "\x1b[J"
_WIDE = {"W": 2, "F": 2}
_NO_CELL = ("Mn", "Me", "Cf")  # marks on a letter, and joiners


class Captions(ABC):
    """Shows the lines of one stream.

    out : the output
    """

    def __init__(self, out: TextIO):
        self._out = out

    @abstractmethod
    def show(self, line: TranscriptLine) -> None:
        """Show a line's current state."""

    def end(self, seconds: float) -> None:
        """Show that the stream ended after ``seconds``; by default nothing."""
        return

    def close(self) -> None:
        """End an unfinished line; by default there is none."""
        return


class Plain(Captions):
    """Writes each line of text once it is complete.

    text : joins words
    out : the output
    """

    def __init__(self, text: Callable[[Sequence[Word]], str], out: TextIO):
        super().__init__(out)
        self._text = text

    def show(self, line: TranscriptLine) -> None:
        if line.complete:
            self._out.write(self._text(line.settled) + "\n")
            self._out.flush()


class Json(Captions):
    """Writes a line of JSON for each change: ``partial`` or ``final``, and ``end`` at the end."""

    def __init__(self, text: Callable[[Sequence[Word]], str], out: TextIO):
        super().__init__(out)
        self._messages = LineMessages(text)

    def show(self, line: TranscriptLine) -> None:
        message = self._messages.message(line)
        if message is not None:
            self._write(message)

    def end(self, seconds: float) -> None:
        self._write({"type": "end", "duration": round(seconds, 3)})

    def _write(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message, ensure_ascii=False) + "\n")
        self._out.flush()


class TerminalCaptions(Captions):
    """Rewrites the line in progress in a terminal, with words that may change in dim letters; … during silence.

    Only rows that have words that may change are rewritten.

    space : the separator of words
    out : the terminal
    """

    def __init__(self, space: str, out: TextIO):
        super().__init__(out)
        self._space = space
        self._dims = not os.environ.get("NO_COLOR")
        self._silence = f"{_DIM}…{_NORMAL}" if self._dims else "…"
        self._final_words = 0  # words of the line in rows that never change again
        self._drawn = [""]  # the rows below those

    def show(self, line: TranscriptLine) -> None:
        words = [word.text for word in line.words[self._final_words :]]
        settled = len(line.settled) - self._final_words
        rows = self._wrap(words)
        self._draw([self._row_text(row, settled) for row in rows] if line.words else [self._silence])
        if line.complete:
            self._out.write("\n")
            self._begin_line()
        else:
            self._freeze_rows(rows, settled)
        self._out.flush()

    def _wrap(self, words: list[str]) -> list[list[_CaptionPart]]:
        """Break words into rows of the terminal's width; a word that is wider than a row continues in the next."""
        width = max(2, shutil.get_terminal_size().columns - 1)
        rows: list[list[_CaptionPart]] = [[]]
        used = 0  # cells of the last row
        for number, word in enumerate(words):
            for part_number, text in enumerate(_split(word, width)):
                begins = part_number == 0
                gap = len(self._space) if rows[-1] and begins else 0
                if rows[-1] and used + gap + _cells(text) > width:
                    rows.append([])
                    used = gap = 0
                rows[-1].append(_CaptionPart(text, number, begins))
                used += gap + _cells(text)
        return rows

    def _row_text(self, row: list[_CaptionPart], settled: int) -> str:
        """Join a row; the words after the first ``settled`` ones are dim."""
        text = ""
        dim = False
        for part in row:
            if text and part.begins:
                text += self._space
            if self._dims and not dim and part.word >= settled:
                text += _DIM
                dim = True
            text += part.text
        return text + _NORMAL if dim else text

    def _freeze_rows(self, rows: list[list[_CaptionPart]], settled: int) -> None:
        """Leave out of later drawings the rows above the last one that begins with a settled word."""
        for number in range(len(rows) - 1, 0, -1):
            first = rows[number][0]
            if first.begins and first.word < settled:
                self._final_words += first.word
                self._drawn = self._drawn[number:]
                return

    def _begin_line(self) -> None:
        self._final_words = 0
        self._drawn = [""]

    def close(self) -> None:
        if self._drawn == [self._silence]:
            self._draw([""])
        if self._drawn != [""]:
            self._out.write("\n")
            self._begin_line()
            self._out.flush()

    def _draw(self, rows: list[str]) -> None:
        if rows != self._drawn:
            up = f"\x1b[{len(self._drawn) - 1}A" if len(self._drawn) > 1 else ""
            self._out.write(up + "\r" + _ERASE_BELOW + "\n".join(rows))
            self._drawn = rows


class _CaptionPart(NamedTuple):
    """A word, or a part of one that is wider than the terminal."""

    text: str
    word: int
    """The word's number."""
    begins: bool
    """Whether the word begins with this part."""


def _split(word: str, width: int) -> list[str]:
    """Split a word into parts of at most ``width`` cells; control characters become replacement characters."""
    parts = [""]
    for character in word:
        shown = "\ufffd" if unicodedata.category(character) == "Cc" else character
        if parts[-1] and _cells(parts[-1] + shown) > width:
            parts.append("")
        parts[-1] += shown
    return parts


def _cells(text: str) -> int:
    """The cells of a terminal that a text takes."""
    return sum(_WIDE.get(unicodedata.east_asian_width(character), 1) for character in text
               if unicodedata.category(character) not in _NO_CELL)
