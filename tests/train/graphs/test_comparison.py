"""How far a first replay may be from what Python computes."""

import math

import numpy as np
import pytest

from sbkit.train.graphs.comparison import check_micro_step, check_update
from sbkit.train.graphs.repeatable import NotRepeatable

#: A loss and its count, then the norms of two gradients.
FIGURES = np.array([200.0, 40.0, 3.0, 4.0])


def differing(place, value):
    figures = FIGURES.copy()
    figures[place] = value
    return figures


@pytest.mark.parametrize("factor", [1.0, 1.005, 0.995])
def test_rounding_is_no_difference(factor):
    check_micro_step(FIGURES, FIGURES * factor, sums=2)


@pytest.mark.parametrize(("place", "value", "what"), [
    (0, 205.0, "loss"), (1, 44.0, "loss"), (2, 3.2, "gradient"), (3, 0.0, "gradient"), (0, math.nan, "loss"),
    (3, math.inf, "gradient")])
def test_another_loss_count_or_gradient_is_refused(place, value, what):
    with pytest.raises(NotRepeatable, match=f"another {what} than the step: {value:g}, not {FIGURES[place]:g}"):
        check_micro_step(FIGURES, differing(place, value), sums=2)


@pytest.mark.parametrize(("place", "small", "other"), [(1, 0.5, 1.5), (2, 0.001, 0.03)])
def test_what_is_rounding_beside_the_loss_or_all_gradients_may_differ(place, small, other):
    check_micro_step(differing(place, small), differing(place, other), sums=2)


def test_a_gradient_that_is_infinite_in_both_is_right():
    check_micro_step(differing(2, math.inf), differing(2, math.inf), sums=2)


def test_a_loss_that_is_no_number_in_both_is_right():
    check_micro_step(differing(0, math.nan), differing(0, math.nan), sums=2)


SHAPES = [(4, 2), (3,)]


def test_an_update_that_moves_all_weights_alike_is_right():
    check_update(np.array([1.0, 0.5]), np.array([0.009, 0.004]), SHAPES)


@pytest.mark.parametrize("distance", [0.02, math.nan, math.inf])
def test_a_weight_that_moves_in_another_way_is_refused_by_its_shape(distance):
    with pytest.raises(NotRepeatable, match=r"changes a weight of shape \[3\] otherwise than the update"):
        check_update(np.array([1.0, 0.5]), np.array([0.0, distance]), SHAPES)


def test_a_weight_that_hardly_moves_may_differ_by_rounding():
    check_update(np.array([1.0, 0.0]), np.array([0.0, 9e-6]), SHAPES)
    with pytest.raises(NotRepeatable):
        check_update(np.array([1.0, 0.0]), np.array([0.0, 2e-5]), SHAPES)


def test_changes_that_are_not_finite_are_not_compared():
    check_update(np.array([math.nan, math.inf]), np.array([math.nan, math.inf]), SHAPES)
