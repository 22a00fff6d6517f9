"""Errors in one line, and SbkitError on its way between processes."""

import io
import logging
import pickle
from pathlib import Path

import pytest

from sbkit.errors import SbkitError, first_line, shown_names, summary
from sbkit.infer.recordings import Recording
from sbkit.system.console import TerminalHandler, table


@pytest.mark.parametrize("message, line, described", [
    ("no such file", "no such file", "ValueError: no such file"),
    ("\n\n  no such file  \nTraceback ...", "no such file", "ValueError: no such file"),
    ("a" * 10**6, "a" * 600 + "...", "ValueError: " + "a" * 600 + "..."),
    ("", "ValueError", "ValueError"),
    (" \n\t\n", "ValueError", "ValueError"),
])
def test_any_error_can_be_told_in_one_line(message, line, described):
    assert (first_line(ValueError(message)), summary(ValueError(message))) == (line, described)


def test_an_error_of_a_worker_process_arrives_as_it_was_raised():
    raised = SbkitError("empty-file", "train.tsv is empty", hint="copy it again", exit_code=3, file=Path("train.tsv"),
                        line=1, key="--data", value="x")
    error = pickle.loads(pickle.dumps(raised))
    assert (str(error), error.message, error.hint, error.exit_code) == \
        ("train.tsv is empty; copy it again", "train.tsv is empty", "copy it again", 3)
    assert (error.code, error.file, error.line, error.key, error.value) == ("empty-file", "train.tsv", 1, "--data", "x")
    assert error.shown == "error: train.tsv is empty; copy it again [empty-file]"


def test_json_of_an_error_has_the_fields_that_it_has():
    error = SbkitError("empty-file", "train.tsv is empty", file="train.tsv")
    assert error.as_json() == {"code": "empty-file", "message": "train.tsv is empty", "file": "train.tsv"}
    assert set(SbkitError("x", "y", hint="z", file="f", line=2, key="k", value=3).as_json()) == {
        "code", "message", "hint", "file", "line", "key", "value"}


def test_control_characters_of_a_stranger_never_reach_the_terminal():
    error = SbkitError("no-such-path", "no such file: a\x1b]0;title\x07.wav\r",
                       hint="is\x9b2J it there?\n  a second\tline")
    assert str(error) == r"no such file: a\x1b]0;title\x07.wav\r; is\x9b2J it there?" "\n  a second\tline"
    assert error.message == r"no such file: a\x1b]0;title\x07.wav\r"
    assert shown_names(["a\x1b[2J", "b" * 200]) == r"a\x1b[2J, " + "b" * 100 + "..."
    assert Recording("dir/\x1b[2Ja.wav").name == r"dir/\x1b[2Ja.wav"
    stream = io.StringIO()
    TerminalHandler(stream).emit(logging.LogRecord("sbkit", logging.WARNING, "", 0, "left out: %s", ("\x1b[2J",), None))
    assert stream.getvalue() == "left out: \\x1b[2J\n"
    assert table(["example"], [["a\x1b[2J"]]).splitlines()[-1] == r"a\x1b[2J"
