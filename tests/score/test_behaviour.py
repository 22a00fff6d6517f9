"""The battery of a recogniser's behaviour: seeded, at its levels, and what is counted of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sounds import speechlike

from sbkit.score.behaviour import (
    LEVELS,
    SILENCES,
    ZEROS,
    BatteryClip,
    Behaviour,
    silences,
    speeches,
    words_in_noises,
)

RATE = 16_000


def test_the_battery_is_the_same_each_time_with_each_kind_at_each_level_in_turn():
    trials, again = (silences(RATE, seconds=2.0, times=2) for _ in range(2))
    assert all(np.array_equal(one.signal, two.signal) for one, two in zip(trials, again, strict=True))
    assert [(each.name, each.level) for each in trials[:26]] == [
        (ZEROS, None), *((kind, level) for level in LEVELS for kind in SILENCES), (ZEROS, None)]
    for each in trials:
        decibels = 20 * np.log10(np.sqrt(np.mean(each.signal.astype(float) ** 2)) + 1e-9)
        expected = -180 if each.level is None else each.level
        assert decibels == pytest.approx(expected, abs=0.1) or (each.name == "clicks" and decibels < expected)
        assert each.signal.dtype == np.float32 and len(each.signal) == 2 * RATE and np.abs(each.signal).max() <= 1


def test_utterances_are_changed_as_said_and_keep_their_texts():
    clips = [(speechlike(2.0, RATE, i).astype(np.float32), f"text {i}") for i in range(3)]
    trials = speeches(clips, RATE)
    assert all(np.array_equal(one.signal, two.signal) for one, two in zip(trials, speeches(clips, RATE), strict=True))
    by = {each.name: each for each in trials[: len(trials) // 3]}
    signal = clips[0][0]
    assert np.array_equal(by["as recorded"].signal, signal) and by["joined"].reference == "text 0 text 1"
    assert len(by["in a quiet room"].signal) == 8 * RATE
    assert len(by["cut at the end"].signal) == pytest.approx(1.8 * RATE)
    assert len(by["speed 0.8"].signal) == pytest.approx(2.5 * RATE, abs=2)
    noise = by["noise -5 dB"].signal - signal
    assert 10 * np.log10(np.sum(signal ** 2) / np.sum(noise ** 2)) == pytest.approx(-5, abs=0.01)


@given(st.lists(st.tuples(st.sampled_from(["hum", "music"]), st.sampled_from(LEVELS), st.integers(0, 5)), min_size=1,
                max_size=20))
def test_words_a_minute_are_counted_by_kind(rows):
    trials = [BatteryClip(kind, level, np.zeros(RATE * 6, np.float32)) for kind, level, _ in rows]
    found = Behaviour.of([*trials, *trials], [" ".join("w" * words) for *_, words in rows], RATE)
    assert found.figures["behaviour.silence"] == pytest.approx(10 * np.mean([words for *_, words in rows]))
    for kind in {kind for kind, *_ in rows}:
        own = [words for name, _, words in rows if name == kind]
        assert found.figures[f"behaviour.{kind}"] == pytest.approx(10 * np.mean(own))
    last = found.tables[0].rows[-1]
    low, high = map(float, last[-1].split(" to "))
    assert low <= round(found.figures["behaviour.silence"], 1) <= high and high > 0


def test_wrong_words_are_rated_by_what_was_changed():
    trials = [BatteryClip("telephone", None, np.zeros(1), "a b"), BatteryClip("speed 0.8", None, np.zeros(1), "a b"),
              BatteryClip("hum", -20, np.zeros(RATE))]
    found = Behaviour.of(trials, ["a b", "a c", ""], RATE, how=", with hot words")
    assert found.figures == {"behaviour.silence": 0, "behaviour.hum": 0, "behaviour.telephone": 0,
                             "behaviour.speed_0.8": 50}
    assert [row[:2] for row in found.tables[1].rows] == [["telephone", "0.00"], ["speed 0.8", "50.00"]]
    assert "with hot words" in found.tables[0].remark


@pytest.mark.parametrize(("utterances", "explained"), [(3, True), (10, False)])
def test_a_table_explains_its_unknown_intervals_once(utterances, explained):
    trials = [BatteryClip(name, None, np.zeros(1), "a b") for name in ("telephone", "joined")] * utterances
    trials.append(BatteryClip("hum", -20, np.zeros(RATE)))
    table = Behaviour.of(trials, ["a b"] * 2 * utterances + [""], RATE).tables[1]
    assert [row[2] for row in table.rows] == ["–" if explained else "0.00 to 0.00"] * 2
    assert ("–: unknown, because there are fewer than 10 utterances." in table.remark) is explained


def test_noises_with_words_in_them_are_named_the_worst_first():
    found = words_in_noises(["a.wav", "b.wav", "c.wav"], [10.0, 5.0, 10.0], ["one", "", "three of them"])
    assert found.rows == [["c.wav", "18.0", "three of them"], ["a.wav", "6.0", "one"]]
    assert found.remark.startswith("2 of 3")
    assert words_in_noises(["a.wav"], [10.0], [""]) is None
