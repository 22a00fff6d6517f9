"""Synthesised noises, so that speech can be made noisy without any recordings of noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sbkit.data.augment import RandomStage, add_noise, check_range
from sbkit.data.noise_parts import (
    Band,
    at_power_1,
    coloured,
    convolved,
    equalised,
    glide,
    normal,
    played,
    random_equaliser,
    resonance,
    ringing,
    root_mean_square,
    slow_curve,
    steady,
    swelling,
    tone,
    wave,
)
from sbkit.errors import SbkitError
from sbkit.system.schema import texts

_Rng = np.random.Generator


def _hits(size: int, at: np.ndarray, hit: np.ndarray, loudness: np.ndarray) -> np.ndarray:
    """The same short sound at several places, each with its loudness."""
    train = np.zeros(size, np.float32)
    train[at] = loudness
    return convolved(train, hit)[:size]


def _hiss(rng: _Rng, size: int, rate: int) -> np.ndarray:
    slope = rng.uniform(0.0, 1.0)
    return coloured(rng, size, lambda hertz: hertz ** -slope, rate)


def _hum(rng: _Rng, size: int, rate: int) -> np.ndarray:
    phase = glide(rng.uniform(40, 200) * (1 + 0.02 * slow_curve(rng, size, rate, 3)), rate)
    harmonics = wave(rng.random(11) / np.arange(1, 12), rng.uniform(0, 6, 11))
    return played(harmonics, phase) + 0.1 * coloured(rng, size, lambda hertz: hertz ** -0.5 * 20, rate)


def _engine(rng: _Rng, size: int, rate: int) -> np.ndarray:
    phase = glide(rng.uniform(60, 400) * 2 ** (2 * slow_curve(rng, size, rate, rng.uniform(0.5, 4))), rate)
    harmonics = wave(rng.random(8) / np.arange(1, 9) ** 0.5, rng.uniform(0, 6, 8))
    return played(harmonics, phase) + 0.1 * normal(rng, size)


def _wind(rng: _Rng, size: int, rate: int) -> np.ndarray:
    return coloured(rng, size, lambda hertz: hertz ** -1.2, rate) * (0.1 + slow_curve(rng, size, rate, 2, power=2))


def _clatter(rng: _Rng, size: int, rate: int) -> np.ndarray:
    count = max(3, int(size / rate * rng.uniform(4, 15)))
    hit = ringing(rng, rate, rng.uniform(800, 4000), rng.uniform(0.005, 0.03))
    sound = _hits(size, rng.integers(size, size=count), hit, rng.uniform(0.2, 1, count))
    return sound + 0.01 * normal(rng, size)


def _melody(rng: _Rng, size: int, rate: int) -> np.ndarray:
    sound = np.zeros(size, np.float32)
    harmonics = wave([1.0, 0.4])
    for _ in range(rng.integers(1, 4)):
        notes = rng.integers(0, 24, max(2, int(size / rate * rng.uniform(2, 6))))
        hertz = 220 * 2 ** (notes / 12)
        sound += played(harmonics, glide(hertz[np.arange(size) * len(notes) // size], rate))
    return sound


def _murmur(rng: _Rng, size: int, rate: int) -> np.ndarray:
    bands = []
    for middle in rng.uniform(200, 3000, 8).tolist():
        # Bands of as many octaves from the same white noise: a higher one has more of it.
        bands.append(Band(middle, width=0.4, swells=8, power=2, loudness=middle ** 0.5))
    return swelling(rng, size, rate, bands)


def _rain(rng: _Rng, size: int, rate: int) -> np.ndarray:
    at = np.flatnonzero(rng.random(size, dtype=np.float32) < 0.02)
    drops = normal(rng, len(at)) * rng.exponential(1, len(at))
    hit = ringing(rng, rate, rng.uniform(2000, 5000), 0.002)
    return _hits(size, at, hit, drops) + 0.3 * coloured(rng, size, resonance(3000, 1.5), rate)


def _printer(rng: _Rng, size: int, rate: int) -> np.ndarray:
    period = int(rate / rng.uniform(8, 25))
    at = np.arange(rng.integers(period), size, period)
    strokes = _hits(size, at, ringing(rng, rate, rng.uniform(300, 1500), 0.01), rng.uniform(0.6, 1, len(at)))
    return strokes * (slow_curve(rng, size, rate, 1) > 0.3) + 0.05 * normal(rng, size)


def _siren(rng: _Rng, size: int, rate: int) -> np.ndarray:
    swing = tone(steady(rng.uniform(0.3, 2), size, rate), start=rng.uniform(0, 6))
    phase = glide(rng.uniform(500, 900) * 2 ** (0.4 * swing), rate)
    return played(wave([1.0, 0.5, 0.3]), phase) + 0.05 * normal(rng, size)


def _vacuum(rng: _Rng, size: int, rate: int) -> np.ndarray:
    resonances = [resonance(middle, 0.7) for middle in rng.uniform(300, 5000, 3).tolist()]
    sound = coloured(rng, size, lambda hertz: np.sqrt(sum(shape(hertz) ** 2 for shape in resonances)), rate)
    loudness = 0.1 * root_mean_square(sound)
    for order, hertz in enumerate(rng.uniform(230, 290, 3).tolist(), 1):
        sound += loudness * tone(steady(order * hertz, size, rate))
    return sound


def _street(rng: _Rng, size: int, rate: int) -> np.ndarray:
    rumble = coloured(rng, size, lambda hertz: np.minimum(1, 150 / hertz), rate)
    passing = coloured(rng, size, resonance(900, 1.0), rate) * slow_curve(rng, size, rate, 0.7, power=2)
    return rumble + 2 * passing


#: Noises by name.
KINDS: dict[str, Callable[[_Rng, int, int], np.ndarray]] = {
    "hiss": _hiss, "hum": _hum, "engine": _engine, "wind": _wind, "clatter": _clatter, "melody": _melody,
    "murmur": _murmur, "rain": _rain, "printer": _printer, "siren": _siren, "vacuum": _vacuum, "street": _street,
}


class DemoNoise(RandomStage):
    """Add synthesised noise at a random signal-to-noise ratio: a different one for each utterance and pass, half of the
    time two at once.

    kinds: names from ``KINDS`` to choose from.
    snr_low, snr_high: range of the ratio, in decibels.
    """

    def __init__(self, kinds: Sequence[str], snr_low: float = 0.0, snr_high: float = 20.0, prob: float = 1.0,
                 sample_rate: int | None = None):
        self.kinds = texts("DemoNoise: kinds", kinds)
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise SbkitError("bad-value", f"DemoNoise: unknown noise {unknown[0]!r}",
                             hint=f"kinds are {', '.join(KINDS)}", key="DemoNoise.kinds", value=unknown[0])
        check_range("DemoNoise", snr_low=snr_low, snr_high=snr_high)
        super().__init__(prob, sample_rate)
        self.snr_low = snr_low
        self.snr_high = snr_high

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        ratio = rng.uniform(self.snr_low, self.snr_high)
        noise = self._random_noise(rng, len(signal))
        if rng.random() < 0.5:
            noise += rng.random() * self._random_noise(rng, len(signal))
        return add_noise(signal, noise, ratio)

    def _random_noise(self, rng: np.random.Generator, size: int) -> np.ndarray:
        make = KINDS[self.kinds[rng.integers(len(self.kinds))]]
        return at_power_1(equalised(make(rng, size, self.rate), random_equaliser(rng), self.rate))
