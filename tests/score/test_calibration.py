"""Expected word accuracy grows with confidence, is what utterances have, and shows where it is not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.score.calibration import MIN_UTTERANCES, Calibration, reliability, word_accuracy

ROWS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 30)), min_size=1, max_size=60)


def columns(rows):
    return (np.array(column, float) for column in zip(*rows, strict=True))


@given(ROWS)
def test_the_curve_never_falls_and_stays_within_what_was_found(rows):
    confidence, accuracy, words = columns(rows)
    curve = Calibration.fit(confidence, accuracy, words)
    assert (np.diff(curve(np.linspace(0, 1, 200))) >= -1e-12).all()
    expected = curve(np.linspace(confidence.min(), 1, 200))
    assert accuracy.min() - 1e-9 <= expected.min() and expected.max() <= accuracy.max() + 1e-9


@pytest.mark.parametrize("confidence", [0.1, 0.3, 0.7, 1 / 3])
def test_one_confidence_has_one_accuracy(confidence):
    accuracy = np.array([0.0, 0.1, 0.2, 0.0, 0.3, 0.9, 1.0])
    found = Calibration.fit(np.full(7, confidence), accuracy, np.array([3, 7, 11, 1, 2, 5, 13.0]))
    assert len(found.confidences) == 1


@given(ROWS)
def test_the_mean_over_words_at_the_knots_is_the_mean_that_was_found(rows):
    """As of every least-squares fit: blocks weigh what their words weigh."""
    confidence, accuracy, words = columns(rows)
    found = Calibration.fit(confidence, accuracy, words)
    if len(found.confidences) == 1:
        assert found.accuracies[0] == pytest.approx(np.average(accuracy, weights=words))
        assert found.confidences[0] == pytest.approx(np.average(confidence, weights=words))


def test_nothing_is_expected_of_a_confidence_below_all_that_were_scored():
    """A recogniser that is unsure of everything, as of another language, is not as good as at its worst on the list."""
    found = Calibration.fit(np.linspace(0.7, 1, 50), np.linspace(0.6, 1, 50), np.ones(50))
    assert found(np.array([0.0, 0.55, 0.699])).tolist() == [0, 0, 0]
    assert found(np.array([0.7, 1.0])) == pytest.approx([0.6, 1])


def test_it_is_the_monotone_fit_that_no_other_beats():
    confidence = np.linspace(0.1, 1, 20)
    accuracy = np.repeat([0.2, 0.1, 0.5, 0.4, 0.9], 4)
    fitted = Calibration.fit(confidence, accuracy, np.ones(20))
    assert fitted.accuracies == pytest.approx([0.15, 0.45, 0.9]), "neighbours out of order share their mean"


def test_a_wrong_an_additional_and_a_missing_word_count_as_one_each():
    accuracy, words = word_accuracy([["a", "b"], ["a"], ["a", "b"], ["a"]], [["a", "x"], ["a", "b"], ["a"], ["b", "c"]])
    assert accuracy.tolist() == [0.5, 0.5, 0.5, 0.0] and words.tolist() == [2, 2, 2, 2]


def test_what_is_well_calibrated_has_a_small_error_and_chance_shows():
    generator = np.random.default_rng(5)
    confidence, words = generator.uniform(0, 1, 2000), np.full(2000, 10.0)
    accuracy = generator.binomial(10, confidence**2) / 10
    bins, error = reliability(confidence, accuracy, words)
    assert error < 0.03 and [utterances for utterances, _, _ in bins] == [400] * 5
    assert bins[0][2] < 0.1 and bins[-1][2] > 0.75
    assert all(abs(expected - found) < 0.05 for _, expected, found in bins)


def test_halves_of_which_one_says_nothing_of_the_other_have_a_large_error():
    """Accuracies of few words scatter, so that a curve of them is not met by others."""
    generator = np.random.default_rng(5)
    _, error = reliability(generator.uniform(0, 1, 40), generator.integers(0, 2, 40), np.ones(40))
    assert error > 0.05


def test_too_few_utterances_are_refused():
    values = np.linspace(0, 1, MIN_UTTERANCES)
    with refused("too-few-utterances"):
        reliability(values[1:], values[1:], np.ones(39))
    assert reliability(values, values, np.ones(40))[1] < 0.05
