"""Errors in one line, and SbkitError on its way between processes."""

import pickle

import pytest

from sbkit.errors import SbkitError, first_line, summary


@pytest.mark.parametrize("message, line, described", [
    ("no such file", "no such file", "ValueError: no such file"),
    ("\n\n  no such file  \nTraceback ...", "no such file", "ValueError: no such file"),
    ("", "ValueError", "ValueError"),
    (" \n\t\n", "ValueError", "ValueError"),
])
def test_any_error_can_be_told_in_one_line(message, line, described):
    assert (first_line(ValueError(message)), summary(ValueError(message))) == (line, described)


def test_an_error_of_a_worker_process_arrives_as_it_was_raised():
    error = pickle.loads(pickle.dumps(SbkitError("train.tsv is empty", hint="copy it again", exit_code=3)))
    assert (str(error), error.message, error.hint, error.exit_code) == \
        ("train.tsv is empty; copy it again", "train.tsv is empty", "copy it again", 3)
