"""Verdicts of lines, of checks and of the whole."""

import importlib

import pytest

from tools.gpu.__main__ import APART
from tools.gpu.check import (
    CHECKS,
    DRY_RUN,
    FAILED,
    NOT_RUN,
    NOT_SHOWN,
    OK,
    SHORT,
    Check,
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


@pytest.mark.parametrize("found, how, late, cards, verdicts", [
    ([Observation("two", "b", OK), Observation("one", "a", SHORT)], "", False, 2, [SHORT, OK]),
    ([Observation("one", "a", OK)], "", False, 1, [OK, NOT_SHOWN]),
    ([Observation("one", "a", OK)], "", False, 2, [OK, FAILED]),
    ([Observation("one", "a", OK)], "its process was ended by SIGSEGV", False, 2, [OK, FAILED]),
    ([], "cut off after 9 s, its limit", True, 2, [NOT_RUN, NOT_RUN]),
    ([], "RuntimeError: CUDA error", False, 1, [FAILED, NOT_SHOWN]),
], ids=["told", "one card", "forgotten", "crashed", "late", "raised"])
def test_each_line_has_a_verdict_however_the_check_ended(found, how, late, cards, verdicts):
    seen = complete(PAIR, found, how, late, cards)
    assert [each.verdict for each in seen] == verdicts
    assert [each.key for each in seen] == ["one", "two"]
    if how:
        assert how in [each.seen for each in seen]


@pytest.mark.parametrize("verdicts, whole, good", [
    ((OK, OK), OK, True), ((OK, NOT_SHOWN), OK, True), ((NOT_SHOWN, NOT_SHOWN), NOT_SHOWN, True),
    ((DRY_RUN, DRY_RUN), DRY_RUN, True), ((OK, SHORT), SHORT, False), ((SHORT, FAILED), FAILED, False),
    ((OK, NOT_RUN), NOT_RUN, False),
])
def test_what_was_not_run_is_no_pass_and_what_cannot_be_shown_no_fault(verdicts, whole, good):
    assert result(*verdicts).verdict == whole
    assert passed([result(OK, OK), result(*verdicts)]) is good


def test_the_headline_names_what_is_short():
    told = headline([result(OK, SHORT), result(FAILED, NOT_SHOWN), left_out(PAIR, "no time", NOT_RUN)])
    assert told == ("1 of 5 as expected; short: pair (the second); failed: pair (the first); 2 not run; "
                    "1 not shown here")
    assert headline([result(OK, DRY_RUN)]) == "1 of 1 as expected; 1 dry run"


@pytest.mark.parametrize("cards", [1, 8])
def test_the_checks_fit_into_twenty_minutes_and_their_functions_are_there(cards):
    run = [check for check in CHECKS if not check.not_here(cards, on_fake_gpu=False)]
    assert sum(check.seconds for check in run) <= 1200 - APART - 10  # a look at the machine
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        module, name = check.function.split(":")
        assert callable(getattr(importlib.import_module(module, "tools.gpu"), name))
        assert len({each.key for each in check.expects}) == len(check.expects)
        assert all(each.what and each.expected for each in check.expects)


def test_on_fake_gpu_cards_only_checks_run_that_neither_values_nor_speed_decide():
    assert PAIR.not_here(2, on_fake_gpu=True) == "a fake GPU can't show it" and not PAIR.not_here(2, on_fake_gpu=False)
    shown = [check.name for check in CHECKS if not check.not_here(2, on_fake_gpu=True)]
    assert {"pair", "tests"} < set(shown) and not {"kernels", "large"} & set(shown)
    assert next(check for check in CHECKS if check.name == "pair").not_here(1, on_fake_gpu=True) == "needs 2 cards"


def test_six_minutes_show_what_decides_most():
    until, shown = 360 - APART, []
    for check in CHECKS:
        if check.seconds <= until:
            until -= check.seconds
            shown.append(check.name)
    assert shown[:5] == ["step", "kernels", "large", "training", "precisions"]
    assert [check.name for check in CHECKS[-4:]] == ["ship", "joint", "resume", "tests"]  # proven without a card, too
