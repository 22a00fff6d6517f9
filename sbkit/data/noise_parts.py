"""What synthesised sounds are made of: noise of any spectrum, bands that swell, equalisers, slow curves and tones.

All is float32 and needs few transforms, of lengths that are fast: data workers share the cores with training on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Rng = np.random.Generator
#: How loud a sound is, or how much louder it becomes, at frequencies [F] in Hz.
Shape = Callable[[np.ndarray], np.ndarray | float]

#: Odd factors of a length whose transform is fast: products of 3 and 5.
_ODD_FACTORS = (1, 3, 5, 9, 15, 25, 27, 45, 75, 81, 125, 135)
#: Samples of the frames of a convolution, at least: shorter ones overlap more, longer ones aren't faster.
_SHORTEST_FRAME = 4096
#: Half of a frame with a spectrum of its own: a quarter of the time in which a band swells or fades, within these
#: seconds. Features with windows of 25 ms tell nothing shorter apart.
_HALF_FRAME = 0.25
_HALF_FRAME_SECONDS = (0.016, 0.128)
#: Samples from one point of a slow curve to the next; between them it is straight.
_CURVE_STEP = 32
#: A turn of a phase, whose whole turns uint32 forgets by itself.
_TURN = 1 << 32
#: Samples of a wave, from which the nearest is taken: the error of a tenth harmonic is 70 dB below it.
_PERIOD = 1 << 16
#: Octaves at which a random equaliser has its points, and its largest gain in decibels.
_OCTAVES = np.arange(6.0, 15.0)
_DECIBELS = 12.0
#: Half of an equaliser's response: the octave from 64 Hz on, its lowest, has four of its frequencies.
_HALF_RESPONSE_SECONDS = 0.032


# ---------------------------------------------------------------- noise


def normal(rng: Rng, size: int) -> np.ndarray:
    """White noise [size] of variance 1."""
    return complex_normal(rng, (size + 1) // 2).view(np.float32)[:size]


def complex_normal(rng: Rng, size: int) -> np.ndarray:
    """Complex normal numbers [size] whose real and imaginary parts have variance 1.

    After Box and Muller, from uniform numbers of 16 bits: a third of the time of ``rng.standard_normal``, and no number
    is above 4.9.
    """
    uniform = rng.bit_generator.random_raw(-(-size // 2)).view(np.uint16)
    radius = uniform[:size].astype(np.float32)
    radius += 0.5
    radius *= 2.0 ** -16
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    angle = uniform[size:2 * size].astype(np.float32)
    angle *= 2 * np.pi / 2 ** 16

    numbers = np.empty(size, np.complex64)
    np.multiply(radius, np.cos(angle), out=numbers.real)
    np.multiply(radius, np.sin(angle, out=angle), out=numbers.imag)
    return numbers


def coloured(rng: Rng, size: int, shape: Shape, rate: int) -> np.ndarray:
    """Noise [size] with the spectrum of a shape."""
    length = fast_length(size)
    hertz = np.fft.rfftfreq(length, 1 / rate).astype(np.float32)
    spectrum = complex_normal(rng, len(hertz))
    spectrum *= shape(np.maximum(hertz, 20))
    return signal_of(spectrum, length)[:size]


def flat(hertz: np.ndarray) -> np.ndarray | float:
    """The shape of what is as loud at all frequencies [F]."""
    return 1.0


def resonance(middle: float, width: float) -> Shape:
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


def swelling(rng: Rng, size: int, rate: int, bands: Sequence[Band], equaliser: Shape = flat) -> np.ndarray:
    """Noise [size] in bands, each of which swells at its own pace.

    A sum of independent normal noises is normal noise, whose power is the sum of theirs. So one noise is made with the
    power that all bands have together at each time, in frames that overlap by half, instead of a noise for each band.
    """
    seconds = np.clip(_HALF_FRAME / max(band.swells for band in bands), *_HALF_FRAME_SECONDS)
    half = fast_length(round(seconds * rate))
    count = -(-size // half) + 1  # frames around the samples 0, half, 2 half and so on
    hertz = np.maximum(np.arange(half + 1, dtype=np.float32) * (rate / 2 / half), 20)
    spectra = np.empty((len(bands), half + 1), np.float32)
    swells = np.empty((len(bands), count), np.float32)
    for band, spectrum, swell in zip(bands, spectra, swells, strict=True):
        spectrum[:] = resonance(band.middle, band.width)(hertz) ** 2
        spectrum *= (band.loudness * half) ** 2 / (float(np.sum(spectrum)) + 1e-12)
        swell[:] = slow_points(rng, size, rate, band.swells, half) ** (2 * band.power)
    spectra *= np.square(equaliser(hertz))
    # Not by BLAS, which starts threads of its own for it.
    power_TF = np.einsum("bt,bf->tf", swells, spectra)

    noise_TF = complex_normal(rng, power_TF.size).reshape(power_TF.shape)
    noise_TF *= np.sqrt(power_TF, out=power_TF)
    frames = signal_of(noise_TF, 2 * half)
    frames *= _window(half)
    joined = frames[:-1, half:] + frames[1:, :half]
    return joined.reshape(-1)[:size]


# ---------------------------------------------------------------- what changes a sound


def convolved(signal: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Filter a signal [S] by an impulse response [K], in frames that are fast to transform: [S + K - 1]."""
    before = len(response) - 1
    size = len(signal) + before
    frame = max(_SHORTEST_FRAME, 4 << before.bit_length())
    hop = frame - before
    padded = np.zeros(before + -(-size // hop) * hop, np.float32)
    padded[before:before + len(signal)] = signal

    spectrum = np.fft.rfft(sliding_window_view(padded, frame)[::hop])
    spectrum *= np.fft.rfft(response, frame)
    return signal_of(spectrum, frame)[:, before:].reshape(-1)[:size]


def random_equaliser(rng: Rng) -> Shape:
    """Gains of bands at random, as rooms and microphones have them."""
    decibels = rng.uniform(-_DECIBELS, _DECIBELS, len(_OCTAVES))

    def gains(hertz: np.ndarray) -> np.ndarray:
        octaves = np.log2(np.maximum(hertz, 20))
        return 10 ** (np.interp(octaves, _OCTAVES, decibels).astype(np.float32) / 20)

    return gains


def equalised(sound: np.ndarray, equaliser: Shape, rate: int) -> np.ndarray:
    """Multiply the spectrum of a sound [S] by the gains of an equaliser."""
    half = fast_length(round(_HALF_RESPONSE_SECONDS * rate))
    gains = equaliser(np.arange(half + 1, dtype=np.float32) * (rate / 2 / half))
    response = np.roll(np.fft.irfft(gains), half) * _window(half) ** 2
    return convolved(sound, response.astype(np.float32))[half:half + len(sound)]


def at_power_1(sound: np.ndarray) -> np.ndarray:
    """Make the mean power of a sound [S] 1, unless it is silent."""
    return sound / (root_mean_square(sound) + 1e-9)


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


def steady(hertz: float, size: int, rate: int) -> np.ndarray:
    """The phase [size] of a tone in turns of 2 ** 32, beyond which uint32 begins again at 0."""
    return np.arange(size, dtype=np.uint32) * np.uint32(round(hertz / rate * _TURN))


def glide(hertz: np.ndarray, rate: int) -> np.ndarray:
    """The phase [S] of a tone whose frequency [S] changes."""
    return np.cumsum((hertz * (_TURN / rate)).astype(np.uint32), dtype=np.uint32)


def tone(phase: np.ndarray, start: float = 0.0) -> np.ndarray:
    """A sine [S] of loudness 1 with this phase [S], counted from one in radians."""
    radians = phase.astype(np.float32)
    radians *= 2 * np.pi / _TURN
    radians += start
    return np.sin(radians, out=radians)


def wave(weights: np.ndarray | Sequence[float], starts: np.ndarray | float = 0.0) -> np.ndarray:
    """One period of a tone and its harmonics, with these weights, from these phases in radians."""
    spectrum = np.zeros(_PERIOD // 2 + 1, np.complex64)
    spectrum[1:1 + len(weights)] = np.multiply(weights, np.exp(1j * np.subtract(starts, np.pi / 2)) * (_PERIOD / 2))
    return signal_of(spectrum, _PERIOD)


def played(period: np.ndarray, phase: np.ndarray) -> np.ndarray:
    """The sound [S] of a wave with this phase [S]."""
    return period[phase // np.uint32(_TURN // len(period))]


def ringing(rng: Rng, rate: int, hertz: float, seconds: float) -> np.ndarray:
    """The sound of something that is hit: a decaying tone with noise."""
    size = int(5 * seconds * rate)
    sound = tone(steady(hertz, size, rate))
    sound += 0.5 * normal(rng, size)
    sound *= np.exp(np.arange(size, dtype=np.float32) / (-seconds * rate))
    return sound


# ---------------------------------------------------------------- numbers


@functools.lru_cache(1024)
def fast_length(size: int) -> int:
    """The smallest even length from ``size`` on that is a product of small factors."""
    return min(odd << max(1, (-(-size // odd) - 1).bit_length()) for odd in _ODD_FACTORS)


def signal_of(spectrum: np.ndarray, length: int) -> np.ndarray:
    """The signal [..., length] of a spectrum, in float32; numpy 1 transforms in float64 alone."""
    return np.fft.irfft(spectrum, length).astype(np.float32, copy=False)


def root_mean_square(signal: np.ndarray) -> float:
    """The root of a signal's mean power."""
    return float(np.mean(np.square(signal))) ** 0.5


@functools.cache
def _window(half: int) -> np.ndarray:
    """The window [2 half] of a frame, before and after its transform: the squares of two that overlap sum to 1."""
    return np.sin(np.pi / (2 * half) * (np.arange(2 * half) + 0.5)).astype(np.float32)
