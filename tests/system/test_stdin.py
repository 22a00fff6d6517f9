"""A closed standard input is told in one line by whatever would read it."""

import sys
from types import SimpleNamespace

import pytest

from sbkit.decode import lm
from sbkit.errors import SbkitError
from sbkit.infer import inputs, speaking
from sbkit.system.stdin import standard_input


@pytest.mark.parametrize("read", [
    lambda: inputs.collect(["-"]),
    lambda: list(lm.read_texts(["-"])),
    lambda: list(speaking.text_bytes(SimpleNamespace(text="-", file=None))),
], ids=["transcribe", "lm", "speak"])
def test_a_closed_one_is_told_and_so_is_a_command_that_works(monkeypatch, read):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it then
    with pytest.raises(SbkitError, match=r"^- reads \w.* from standard input, but standard input is closed; \w+ .* -"):
        read()


def test_a_terminal_is_told_and_a_pipe_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(SbkitError, match=r"^- reads audio from standard input, but that is a terminal; cat a$"):
        standard_input("audio", "cat a")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    assert standard_input("audio", "cat a") is sys.stdin
