"""Synthesised noises: the same for the same draw, of any length, and as loud as was asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import speechlike

from sbkit.data.augment import Augment
from sbkit.data.demo_noise import KINDS, DemoNoise


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(size=st.integers(1, 20_000), seed=st.integers(0, 2**31), rate=st.sampled_from([8000, 16_000, 48_000]))
def test_each_noise_has_any_length_and_is_finite(kind, size, seed, rate):
    found = KINDS[kind](np.random.default_rng(seed), size, rate)
    assert found.shape == (size,) and np.isfinite(found).all()
    again = KINDS[kind](np.random.default_rng(seed), size, rate)
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_added_at_the_ratio(kind):
    speech = speechlike(2.0, 16_000, 0).astype(np.float32)
    noisy = DemoNoise([kind], snr_low=5, snr_high=5, sample_rate=16_000)(speech, np.random.default_rng(1))
    ratio = 10 * np.log10(np.sum(speech ** 2) / np.sum((noisy - speech) ** 2))
    assert noisy.dtype == np.float32 and ratio == pytest.approx(5, abs=0.01)


def test_another_utterance_has_another_noise_and_the_same_has_the_same():
    speech, noise = speechlike(1.0, 16_000, 0).astype(np.float32), DemoNoise(list(KINDS))
    noise = Augment([noise])
    first, again, other = (noise(speech, Augment.rng(0, 0, name)) for name in ("a", "a", "b"))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_silence_stays_silent_and_some_utterances_stay_as_they_are():
    silence = np.zeros(1000, np.float32)
    assert not DemoNoise(["hiss"])(silence, np.random.default_rng(0)).any()
    speech = speechlike(0.5, 16_000, 0).astype(np.float32)
    np.testing.assert_array_equal(DemoNoise(["hiss"], prob=0.0)(speech, np.random.default_rng(0)), speech)


def test_unknown_noises_and_turned_limits_are_refused():
    with refused("bad-value"):
        DemoNoise(["hum", "his"])
    with refused("bad-value"):
        DemoNoise(["hum"], snr_low=3, snr_high=2)
