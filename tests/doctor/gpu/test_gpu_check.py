"""Verdicts of lines, of checks and of the whole."""

import importlib

import pytest

from sbkit.doctor.gpu import catalogue
from sbkit.doctor.gpu.budget import APART
from sbkit.doctor.gpu.check import (
    FAILED,
    NOT_RUN,
    NOT_SHOWN,
    OK,
    REHEARSED,
    SHORT,
    Check,
    Exit,
    Expect,
    Observation,
    Result,
    complete,
    headline,
    left_out,
    passed,
)

PAIR = Check("pair", "two lines", ".nowhere:check", 5, (
    Expect("one", "the first", "good"), Expect("two", "the second", "good", cards=2)))


def result(*verdicts):
    return Result(PAIR, [Observation(each.key, "something", verdict)
                         for each, verdict in zip(PAIR.expects, verdicts, strict=True)])


@pytest.mark.parametrize("found, ended, cards, verdicts", [
    ([Observation("two", "b", OK), Observation("one", "a", SHORT)], Exit(1), 2, [SHORT, OK]),
    ([Observation("one", "a", OK)], Exit(1), 1, [OK, NOT_SHOWN]),
    ([Observation("one", "a", OK)], Exit(1), 2, [OK, FAILED]),
    ([Observation("one", "a", OK)], Exit(1, "its process was ended by SIGSEGV"), 2, [OK, FAILED]),
    ([], Exit(9, "cut off after 9 s, its limit", late=True), 2, [NOT_RUN, NOT_RUN]),
    ([], Exit(9, "RuntimeError: CUDA error"), 1, [FAILED, NOT_SHOWN]),
], ids=["told", "one card", "forgotten", "crashed", "late", "raised"])
def test_each_line_has_a_verdict_however_the_check_ended(found, ended, cards, verdicts):
    made = complete(PAIR, found, [], ended, cards, "")
    assert [each.verdict for each in made.seen] == verdicts
    assert [each.key for each in made.seen] == ["one", "two"]
    if ended.how:
        assert ended.how in [each.seen for each in made.seen]


@pytest.mark.parametrize("verdicts, whole, good", [
    ((OK, OK), OK, True), ((OK, NOT_SHOWN), OK, True), ((NOT_SHOWN, NOT_SHOWN), NOT_SHOWN, True),
    ((REHEARSED, REHEARSED), REHEARSED, True), ((OK, SHORT), SHORT, False), ((SHORT, FAILED), FAILED, False),
    ((OK, NOT_RUN), NOT_RUN, False),
])
def test_what_was_not_run_is_no_pass_and_what_cannot_be_shown_no_fault(verdicts, whole, good):
    assert result(*verdicts).verdict == whole
    assert passed([result(OK, OK), result(*verdicts)]) is good


def test_the_headline_names_what_is_short():
    told = headline([result(OK, SHORT), result(FAILED, NOT_SHOWN), left_out(PAIR, "no time", NOT_RUN)])
    assert told == ("1 of 5 as expected; short: pair (the second); failed: pair (the first); 2 not run; "
                    "1 not shown here")
    assert headline([result(OK, REHEARSED)]) == "1 of 1 as expected; 1 rehearsed"


def test_the_catalogue_fits_into_ten_minutes_and_its_functions_are_there():
    checks = catalogue.CHECKS
    assert sum(check.seconds for check in checks) <= 600 - APART
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        module, name = check.function.split(":")
        assert callable(getattr(importlib.import_module(module, "sbkit.doctor.gpu"), name))
        assert len({each.key for each in check.expects}) == len(check.expects)
        assert all(each.what and each.expected for each in check.expects)
