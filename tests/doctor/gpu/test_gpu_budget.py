"""Which checks have room in the time there is, and how long each may take."""

from sbkit.doctor.gpu.budget import APART, Budget, chosen
from sbkit.doctor.gpu.check import Check, Expect

WORTH = [Check(name, "", ".nowhere:check", seconds, (Expect("it", "it", ""),))
         for name, seconds in (("first", 60), ("second", 90), ("third", 30))]


def names(checks):
    return [check.name for check in checks]


def test_all_are_run_where_all_have_room():
    assert names(chosen(WORTH, 180 + APART)) == ["first", "second", "third"]


def test_where_time_is_short_the_first_ones_are_run_and_smaller_ones_in_what_is_left():
    assert names(chosen(WORTH, 100 + APART)) == ["first", "third"]
    assert names(chosen(WORTH, 20 + APART)) == []


def test_a_check_may_use_what_those_before_it_have_left_and_no_share_of_those_behind():
    now = [0.0]
    budget = Budget(WORTH, 200 + APART, clock=lambda: now[0])
    assert budget.limit(WORTH[0]) == 80  # its 60, and the 20 that nobody needs
    now[0] = 10.0  # it took 10
    assert budget.limit(WORTH[1]) == 160
    now[0] = 170.0  # cut off at its limit
    assert budget.limit(WORTH[2]) == 30
