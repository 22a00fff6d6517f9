"""What synthesised sounds are made of: noise of any spectrum, bands that swell, equalisers, slow curves and tones.

All is float32 and needs few transforms, of lengths that are fast: data workers share the cores with training on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Rng = np.random.Generator

#: Odd factors of a length whose transform is fast: products of 3 and 5.
_ODD_FACTORS = (1, 3, 5, 9, 15, 25, 27, 45, 75, 81, 125)
#: Half of a frame in which a spectrum is changed, in seconds. Features whose windows have 25 ms resolve no more, in time
#: or in frequency.
_HALF_FRAME_SECONDS = 0.016
#: Samples from one point of a slow curve to the next; between them it is straight.
_CURVE_STEP = 32
#: Octaves at which a random equaliser has its points, and its largest gain in decibels.
_OCTAVES = np.arange(6.0, 15.0)
_DECIBELS = 12.0


# ---------------------------------------------------------------- noise


def normal(rng: Rng, size: int) -> np.ndarray:
    """White noise [size] of variance 1."""
    return complex_normal(rng, (size + 1) // 2).view(np.float32)[:size]


def complex_normal(rng: Rng, size: int) -> np.ndarray:
    """Complex normal numbers [size] whose real and imaginary parts have variance 1.

    After Box and Muller, whose few functions of whole arrays take half of the time of ``rng.standard_normal``.
    """
    radius = np.log1p(-rng.random(size, dtype=np.float32))
    radius *= -2
    np.sqrt(radius, out=radius)
    angle = rng.random(size, dtype=np.float32)
    angle *= 2 * np.pi
    numbers = np.empty(size, np.complex64)
    np.multiply(radius, np.cos(angle), out=numbers.real)
    np.multiply(radius, np.sin(angle), out=numbers.imag)
    return numbers


def coloured(rng: Rng, size: int, shape: Callable[[np.ndarray], np.ndarray], rate: int) -> np.ndarray:
    """Noise [size] whose spectrum is a function of the frequency in Hz."""
    length = fast_length(size)
    hertz = np.fft.rfftfreq(length, 1 / rate).astype(np.float32)
    spectrum = complex_normal(rng, len(hertz))
    spectrum *= shape(np.maximum(hertz, 20))
    return signal_of(spectrum, length)[:size]


def resonance(middle: float, width: float) -> Callable[[np.ndarray], np.ndarray]:
    """A resonance at ``middle`` Hz, ``width`` octaves wide."""
    return lambda hertz: np.exp(-0.5 * (np.log2(hertz / middle) / width) ** 2)


class Band(NamedTuple):
    """A band of noise that swells and fades."""

    middle: float
    """In Hz."""
    width: float
    """In octaves."""
    swells: float
    """How often a second."""
    power: float
    """Of the curve between 0 and 1 by which it swells: a high one leaves short peaks."""
    loudness: float
    """Its root mean square while the curve is 1."""


def swelling(rng: Rng, size: int, rate: int, bands: Sequence[Band]) -> np.ndarray:
    """Noise [size] in bands, each of which swells at its own pace.

    A sum of independent normal noises is normal noise, whose power is the sum of theirs. So one white noise is filtered
    by what all bands have together at each time, instead of a noise for each band.
    """
    half = _half_frame(rate)
    hertz = np.maximum(np.arange(half + 1, dtype=np.float32) * (rate / 2 / half), 20)
    power: np.ndarray | float = 0.0
    for band in bands:
        spectrum = resonance(band.middle, band.width)(hertz) ** 2
        spectrum *= band.loudness ** 2 * half / (float(np.sum(spectrum)) + 1e-12)
        swell = slow_points(rng, size, rate, band.swells, half) ** (2 * band.power)
        power = power + swell[:, None] * spectrum
    return filtered(normal(rng, size), np.sqrt(power))


# ---------------------------------------------------------------- what changes a sound


def filtered(signal: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Multiply the spectrum of a signal [S] in frames that overlap by half.

    gains : [F], or [T, F] with those of the frames around sample 0, F - 1, 2 (F - 1) and so on; frames have 2 (F - 1)
        samples
    """
    half = gains.shape[-1] - 1
    count = -(-len(signal) // half) + 1
    padded = np.zeros((count + 1) * half, np.float32)
    padded[half:half + len(signal)] = signal

    window = _window(half)
    spectrum = np.fft.rfft(np.lib.stride_tricks.sliding_window_view(padded, 2 * half)[::half] * window)
    spectrum *= gains
    frames = signal_of(spectrum, 2 * half)
    frames *= window
    joined = frames[:-1, half:] + frames[1:, :half]
    return joined.reshape(-1)[:len(signal)]


def equalised(rng: Rng, noise: np.ndarray, rate: int) -> np.ndarray:
    """Weight the bands of a noise [S] at random, as rooms and microphones do, and make its power 1."""
    half = _half_frame(rate)
    octaves = np.log2(np.maximum(np.arange(half + 1) * (rate / 2 / half), 20.0))
    decibels = np.interp(octaves, _OCTAVES, rng.uniform(-_DECIBELS, _DECIBELS, len(_OCTAVES)))
    weighted = filtered(noise, (10 ** (decibels / 20)).astype(np.float32))
    weighted /= root_mean_square(weighted) + 1e-9
    return weighted


def slow_curve(rng: Rng, size: int, rate: int, hertz: float, power: float = 1.0) -> np.ndarray:
    """A random curve [size] between 0 and 1 that changes about ``hertz`` times a second, to a power."""
    points = slow_points(rng, size, rate, hertz, _CURVE_STEP) ** power
    ramp = np.arange(_CURVE_STEP, dtype=np.float32) / _CURVE_STEP
    curve = points[:-1, None] + np.diff(points)[:, None] * ramp
    return curve.reshape(-1)[:size]


def slow_points(rng: Rng, size: int, rate: int, hertz: float, step: int) -> np.ndarray:
    """Such a curve at the samples 0, ``step``, twice that and so on, the last one at or after its end."""
    drawn = rng.random(max(2, int(size / rate * hertz) + 2))
    places = np.arange(-(-size // step) + 1) * (step * (len(drawn) - 1) / max(size - 1, 1))
    return np.interp(places, np.arange(len(drawn)), drawn).astype(np.float32)


# ---------------------------------------------------------------- tones


def phase_of(cycles: np.ndarray) -> np.ndarray:
    """The phase [S] in radians, from 0 to 2 pi, of cycles that were counted in float64, which is overwritten."""
    cycles -= np.floor(cycles)
    phase = cycles.astype(np.float32)
    phase *= 2 * np.pi
    return phase


def glide(hertz: np.ndarray, rate: int) -> np.ndarray:
    """The phase [S] of a tone whose frequency [S] changes."""
    cycles = np.cumsum(hertz, dtype=np.float64)
    cycles /= rate
    return phase_of(cycles)


def harmonics(phase: np.ndarray, weights: Sequence[float] | np.ndarray, starts: Sequence[float] | np.ndarray = (),
              ) -> np.ndarray:
    """The sum [S] of a tone and its harmonics, of these weights, from the tone's phase [S].

    starts : the phases of each at phase 0, if they aren't all 0
    """
    sound = np.zeros(len(phase), np.float32)
    wave = np.empty_like(sound)
    for number, weight in enumerate(map(float, weights)):
        np.multiply(phase, number + 1, out=wave)
        if len(starts):
            wave += float(starts[number])
        np.sin(wave, out=wave)
        wave *= weight
        sound += wave
    return sound


def ringing(rng: Rng, rate: int, hertz: float, seconds: float) -> np.ndarray:
    """The sound of something that is hit: a decaying tone with noise."""
    time = np.arange(int(5 * seconds * rate)) / rate
    tone = harmonics(phase_of(hertz * time), [1.0])
    tone += 0.5 * normal(rng, len(time))
    tone *= np.exp((time / -seconds).astype(np.float32))
    return tone


# ---------------------------------------------------------------- numbers


def fast_length(size: int) -> int:
    """The smallest even length from ``size`` on that is a product of small factors."""
    return min(odd << max(1, (-(-size // odd) - 1).bit_length()) for odd in _ODD_FACTORS)


def signal_of(spectrum: np.ndarray, length: int) -> np.ndarray:
    """The signal [..., length] of a spectrum, in float32; numpy 1 transforms in float64 alone."""
    return np.fft.irfft(spectrum, length).astype(np.float32, copy=False)


def root_mean_square(signal: np.ndarray) -> float:
    """The root of a signal's mean power."""
    return float(np.mean(np.square(signal))) ** 0.5


def _half_frame(rate: int) -> int:
    return fast_length(round(_HALF_FRAME_SECONDS * rate))


@functools.cache
def _window(half: int) -> np.ndarray:
    """The window [2 half] of a frame, before and after its transform: the squares of two that overlap sum to 1."""
    return np.sin(np.pi / (2 * half) * (np.arange(2 * half) + 0.5)).astype(np.float32)
