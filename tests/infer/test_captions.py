"""What a terminal shows in the end, whatever its width and however words change."""

from __future__ import annotations

import io
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.decode.spans import Word
from sbkit.infer import captions
from sbkit.infer.captions import TerminalCaptions
from sbkit.infer.lines import TranscriptLine

WORDS = st.lists(st.text(st.sampled_from("abcdefg漢字é"), min_size=1, max_size=14), max_size=12)


class Screen:
    """A terminal of so many cells."""

    def __init__(self, width):
        self.width, self.rows, self.row, self.cell = width, [[]], 0, 0

    def take(self, text):
        for found in re.finditer(r"\x1b\[(\d*)([A-Za-z])|[\s\S]", text):
            self._one(found[0], found[1], found[2])

    def _one(self, text, number, kind):
        if text == "\r":
            self.cell = 0
        elif text == "\n":
            self.row, self.cell = self.row + 1, 0  # as a terminal does with what a program writes
            self.rows += [[]] * (self.row == len(self.rows))
        elif kind == "A":
            self.row -= int(number)
            assert self.row >= 0
        elif kind == "J":
            self.rows[self.row + 1 :] = []
            self.rows[self.row] = self.rows[self.row][: self.cell]
        elif not kind:
            cells = 2 if text in "漢字" else 1
            assert self.cell + cells <= self.width, "a terminal would begin another row by itself"
            self.rows[self.row][self.cell :] = [text] + [""] * (cells - 1)
            self.cell += cells

    @property
    def text(self):
        return ["".join(row) for row in self.rows]


def words(texts):
    return [Word(text, 0.0, 0.0, 1.0) for text in texts]


@pytest.fixture
def at(monkeypatch):
    def width(columns):
        monkeypatch.setattr(captions.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
        return columns

    return width


@pytest.mark.slow
@settings(max_examples=80)
@given(width=st.integers(4, 40), lines=st.lists(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6), max_size=3),
       space=st.sampled_from([" ", ""]))
def test_the_screen_has_complete_lines_and_the_whole_line_in_progress(width, lines, space):
    out, screen = io.StringIO(), Screen(width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captions.shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))
        terminal, done = TerminalCaptions(space, out), ""
        for steps in lines:
            settled = []
            for more, partial in steps:
                settled = settled + more
                terminal.show(TranscriptLine(words(settled), words(partial), False))
                screen.take(out.getvalue())
                out.seek(0)
                out.truncate()
                assert "".join(screen.text).replace(" ", "") == done + ("".join(settled + partial) or "…")
            if settled:
                terminal.show(TranscriptLine(words(settled), [], True))
                done += "".join(settled)
        terminal.close()
        screen.take(out.getvalue())
    assert screen.text[-1] == ""


def test_rows_break_between_words(at):
    out, screen = io.StringIO(), Screen(at(11))
    terminal = TerminalCaptions(" ", out)
    for count in range(7):
        said = words("ab cd efg hij k lmn".split())
        terminal.show(TranscriptLine(said[:count], said[count:count + 1], count == 6))
    screen.take(out.getvalue())
    assert screen.text == ["ab cd efg", "hij k lmn", ""]


def test_an_ellipsis_is_shown_during_silence(at):
    out, screen, shown = io.StringIO(), Screen(at(40)), []
    terminal = TerminalCaptions(" ", out)
    for said, complete in ([], False), (["a"], False), (["a"], True), ([], False):
        terminal.show(TranscriptLine(words(said), [], complete))
        screen.take(out.getvalue())
        shown.append(screen.text)
        out.seek(0)
        out.truncate()
    terminal.close()
    screen.take(out.getvalue())
    assert [*shown, screen.text] == [["…"], ["a"], ["a", ""], ["a", "…"], ["a", ""]]


def test_rows_of_settled_words_are_written_once(at):
    out = io.StringIO()
    at(11)
    terminal, said = TerminalCaptions(" ", out), words(f"word{i}" for i in range(40))
    for count in range(len(said)):
        terminal.show(TranscriptLine(said[:count], [], False))
    assert out.getvalue().count("word0") <= 3 and "\x1b[2A" not in out.getvalue()


def test_no_color_turns_dim_letters_off(at, monkeypatch):
    at(40)
    for value, dim in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", value)
        out = io.StringIO()
        TerminalCaptions(" ", out).show(TranscriptLine(words(["a"]), words(["b"]), False))
        assert ("\x1b[2m" in out.getvalue()) == dim


def test_control_characters_become_replacement_characters(at):
    at(40)
    out = io.StringIO()
    TerminalCaptions(" ", out).show(TranscriptLine(words(["a\x1b[31mb\n"]), [], True))
    assert "a\ufffd[31mb\ufffd\n" in out.getvalue()
