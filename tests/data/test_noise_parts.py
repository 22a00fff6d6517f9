"""Synthesised noise: spectra, levels and swells are those of the plain way, with one long transform for each noise."""

import itertools
import sys

import numpy as np
import pytest
import slow_sounds

from sbkit.data.demo_noise import KINDS
from sbkit.data.noise_parts import (
    Band,
    at_power_1,
    coloured,
    complex_normal,
    convolved,
    equalised,
    fast_length,
    glide,
    normal,
    played,
    random_equaliser,
    slow_curve,
    steady,
    swelling,
    tone,
    wave,
)
from sbkit.data.nonspeech import SILENCES

RATE = 16_000
#: Limits of the bands in which sounds are compared, in Hz, and of their swells, in Hz too.
OCTAVES = np.array([0, 60, 125, 250, 500, 1000, 2000, 4000, 8001])
PACES = np.array([0.5, 2, 4, 8, 16, 32])
#: What is as far below the rest as this counts as nothing, in decibels: nobody hears how far.
FLOOR = -45


def spectrogram(sound, size, hop):
    """Power [T, F] of a sound [S], and the frequencies [F] in Hz."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, size)[::hop] * np.hanning(size)
    return np.abs(np.fft.rfft(frames)) ** 2, np.fft.rfftfreq(size, 1 / RATE)


def sums_between(power, places, limits):
    """The sums of power [..., F] between limits [L]: [..., L - 1]."""
    edges = np.searchsorted(places, limits)
    return np.stack([power[..., a:b].sum(-1) for a, b in itertools.pairwise(edges)], -1)


def octave_levels(sound):
    """The share of each octave in the power of a sound, in decibels."""
    power, hertz = spectrogram(sound, 2048, 1024)
    power = sums_between(power.mean(0), hertz, OCTAVES)
    return np.maximum(10 * np.log10(power / power.sum() + 1e-12), FLOOR)


def swell_levels(sound):
    """How much the loudness of octaves above 125 Hz changes how fast, in decibels, averaged over the octaves."""
    power, hertz = spectrogram(sound, 400, 160)
    loudness_TB = np.sqrt(sums_between(power, hertz, OCTAVES[2:]))
    loudness_TB /= loudness_TB.mean(0) + 1e-12
    changes = np.abs(np.fft.rfft((loudness_TB - 1) * np.hanning(len(loudness_TB))[:, None], axis=0)) ** 2
    paces = sums_between(changes.mean(1), np.fft.rfftfreq(len(loudness_TB), 160 / RATE), PACES)
    return 10 * np.log10(paces / len(loudness_TB) + 1e-3)


def peaks_and_pauses(sound):
    """The highest sample, and the level that 30 ms pieces exceed in nine of ten and in one of ten, in decibels."""
    whole = np.std(sound)
    pieces = np.std(sound[:len(sound) // 480 * 480].reshape(-1, 480), axis=1)
    levels = [np.abs(sound).max(), np.percentile(pieces, 10), np.percentile(pieces, 90)]
    return np.maximum(20 * np.log10(np.array(levels) / whole + 1e-12), FLOOR)


def described(sound):
    sound = np.asarray(sound, np.float64)
    return np.concatenate([octave_levels(sound), swell_levels(sound), peaks_and_pauses(sound)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SILENCES)
def test_each_kind_has_the_spectra_swells_and_levels_of_the_plain_way(kind):
    times = 60
    size = 2 * RATE
    now = np.array([described(SILENCES[kind](np.random.default_rng(i), size, RATE)) for i in range(times)])
    plain = np.array([described(slow_sounds.SOUNDS[kind](np.random.default_rng(1000 + i), size, RATE))
                      for i in range(times)])
    chance = np.sqrt((now.var(0) + plain.var(0)) / times)
    np.testing.assert_array_less(np.abs(now.mean(0) - plain.mean(0)), 1.5 + 3 * chance)
    # They differ from one to the next as much.
    spread, plain_spread = (np.mean(np.abs(rows - np.median(rows, 0)), 0) for rows in (now, plain))
    np.testing.assert_array_less(spread, 1.6 * plain_spread + 2)
    np.testing.assert_array_less(plain_spread, 1.6 * spread + 2)


@pytest.mark.slow
@pytest.mark.parametrize("swells, decibels", [(0.5, 2.5), (4, 2.5), (20, 4)])
def test_bands_that_swell_sound_as_if_each_was_made_alone(swells, decibels, monkeypatch):
    # Fast swells are made in frames of 32 ms, which don't tell a low band from what is 30 Hz beside it.
    monkeypatch.setattr(sys.modules[__name__], "FLOOR", -20)
    bands = [Band(middle, width, swells, power, loudness) for middle, width, power, loudness in (
        (90, 0.3, 1, 0.5), (400, 0.2, 3, 1), (1500, 0.8, 0.5, 0.3), (5000, 0.4, 2, 0.8))]

    def plain(rng, size):
        sound = np.zeros(size)
        for band in bands:
            noise = slow_sounds.coloured(rng, size, slow_sounds.resonance(band.middle, band.width), RATE)
            swell = slow_sounds.slow_curve(rng, size, RATE, band.swells) ** band.power
            sound += band.loudness * noise / np.std(noise) * swell
        return sound

    times = 60
    size = 3 * RATE
    now = [swelling(np.random.default_rng(i), size, RATE, bands) for i in range(times)]
    alone = [plain(np.random.default_rng(1000 + i), size) for i in range(times)]
    assert np.mean(np.var(now, 1)) == pytest.approx(np.mean(np.var(alone, 1)), rel=0.15)
    difference = np.mean([described(sound) for sound in now], 0) - np.mean([described(sound) for sound in alone], 0)
    assert np.abs(difference).max() < decibels, difference


def test_kinds_and_their_names_are_those_of_the_plain_way():
    assert list(SILENCES) == list(slow_sounds.SOUNDS) and list(KINDS) == list(slow_sounds.KINDS)


def test_numbers_are_normal_and_independent():
    numbers = complex_normal(np.random.default_rng(0), 400_000)
    for part in (numbers.real, numbers.imag):
        assert np.mean(part) == pytest.approx(0, abs=0.01) and np.var(part) == pytest.approx(1, abs=0.01)
        assert np.mean(part ** 4) == pytest.approx(3, abs=0.05)
        assert np.mean(np.abs(part) > 2) == pytest.approx(0.0455, abs=0.002)
    assert np.corrcoef(numbers.real, numbers.imag)[0, 1] == pytest.approx(0, abs=0.01)
    assert np.corrcoef(numbers.real[1:], numbers.real[:-1])[0, 1] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 1000, 59_999, 65_537, 123_457])
def test_a_fast_length_is_a_little_longer_and_has_small_factors(size):
    length = fast_length(size)
    assert size <= length <= 1.1 * size + 2 and length % 2 == 0
    for factor in (2, 3, 5):
        while length % factor == 0:
            length //= factor
    assert length == 1


@pytest.mark.parametrize("size, count", [(1, 1), (1, 512), (4096, 2), (10_000, 512), (20_000, 3000)])
def test_a_convolution_in_frames_is_a_convolution(size, count):
    signal = normal(np.random.default_rng(0), size)
    response = normal(np.random.default_rng(1), count)
    np.testing.assert_allclose(convolved(signal, response), np.convolve(signal, response), atol=2e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [8000, 16_000, 48_000])
def test_an_equaliser_has_its_gains_at_each_rate(seed, rate):
    equaliser = random_equaliser(np.random.default_rng(seed))
    time = np.arange(rate) / rate
    for hertz in (100, 300, 1000, 3500):
        sine = np.sin(2 * np.pi * hertz * time).astype(np.float32)
        found = np.std(equalised(sine, equaliser, rate)[rate // 4:-rate // 4]) / np.std(sine)
        assert 20 * np.log10(found / equaliser(np.float32(hertz))) == pytest.approx(0, abs=1.5)


def test_an_equaliser_is_the_one_of_the_plain_way():
    noise = coloured(np.random.default_rng(0), 3 * RATE, lambda hertz: hertz ** -1.5, RATE)
    for seed in range(5):
        now = at_power_1(equalised(noise, random_equaliser(np.random.default_rng(seed)), RATE))
        plain = slow_sounds.equalised(np.random.default_rng(seed), noise.astype(np.float64), RATE)
        np.testing.assert_allclose(octave_levels(now), octave_levels(plain), atol=1)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 20_000])
@pytest.mark.parametrize("hertz", [0.2, 3, 30])
def test_a_slow_curve_is_the_one_of_the_plain_way(size, hertz):
    now = slow_curve(np.random.default_rng(5), size, RATE, hertz, power=2)
    plain = slow_sounds.slow_curve(np.random.default_rng(5), size, RATE, hertz) ** 2
    assert now.shape == (size,) and now.min() >= 0 and now.max() <= 1
    np.testing.assert_allclose(now, plain, atol=0.05)


def test_a_wave_has_its_harmonics_after_many_turns_too():
    size = 60 * RATE
    weights = [1, 0.5, 0, 0.25]
    starts = [0, 1, 2, 3]
    found = played(wave(weights, starts), steady(440, size, RATE))[-RATE:]
    phase = 2 * np.pi * 440 * np.arange(size - RATE, size) / RATE
    expected = sum(weight * np.sin(n * phase + start)
                   for n, (weight, start) in enumerate(zip(weights, starts, strict=True), 1))
    np.testing.assert_allclose(found, expected, atol=3e-3)
    np.testing.assert_allclose(tone(glide(np.full(size, 440.0), RATE))[-RATE - 1:-1], np.sin(phase), atol=3e-3)
