"""Synthesised noises, so that speech can be made noisy without any recordings of noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sbkit.data.augment import RandomStage, add_noise, check_range
from sbkit.errors import SbkitError
from sbkit.system.schema import texts

_Rng = np.random.Generator


def coloured(rng: _Rng, size: int, shape: Callable[[np.ndarray], np.ndarray], rate: int) -> np.ndarray:
    """Noise whose spectrum is a function of the frequency in Hz."""
    frequencies = np.fft.rfftfreq(size, 1 / rate)
    spectrum = rng.standard_normal((2, len(frequencies))) * shape(np.maximum(frequencies, 20.0))
    return np.fft.irfft(spectrum[0] + 1j * spectrum[1], size)


def slow_curve(rng: _Rng, size: int, rate: int, hertz: float) -> np.ndarray:
    """A random curve between 0 and 1 that changes about ``hertz`` times a second."""
    points = max(2, int(size / rate * hertz) + 2)
    return np.interp(np.linspace(0, points - 1, size), np.arange(points), rng.random(points))


def resonance(middle: float, width: float) -> Callable[[np.ndarray], np.ndarray]:
    """A resonance at ``middle`` Hz, ``width`` octaves wide."""
    return lambda hertz: np.exp(-0.5 * (np.log2(hertz / middle) / width) ** 2)


def _phase(hertz: np.ndarray, rate: int) -> np.ndarray:
    return 2 * np.pi * np.cumsum(hertz) / rate


def _hits(rng: _Rng, size: int, at: np.ndarray, hit: np.ndarray, loudness: np.ndarray) -> np.ndarray:
    """The same short sound at several places, each with its loudness."""
    train = np.zeros(size)
    train[at] = loudness
    length = 1 << (size + len(hit) - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(train, length) * np.fft.rfft(hit, length), length)[:size]


def ringing(rng: _Rng, rate: int, hertz: float, seconds: float) -> np.ndarray:
    """The sound of something that is hit: a decaying tone with noise."""
    time = np.arange(int(5 * seconds * rate)) / rate
    tone = np.sin(2 * np.pi * hertz * time) + 0.5 * rng.standard_normal(len(time))
    return tone * np.exp(-time / seconds)


def _hiss(rng: _Rng, size: int, rate: int) -> np.ndarray:
    slope = rng.uniform(0.0, 1.0)
    return coloured(rng, size, lambda hertz: hertz ** -slope, rate)


def _hum(rng: _Rng, size: int, rate: int) -> np.ndarray:
    phase = _phase(rng.uniform(40, 200) * (1 + 0.02 * slow_curve(rng, size, rate, 3)), rate)
    harmonics = sum(rng.random() / n * np.sin(n * phase + rng.uniform(0, 6)) for n in range(1, 12))
    return harmonics + 0.1 * coloured(rng, size, lambda hertz: hertz ** -0.5 * 20, rate)


def _engine(rng: _Rng, size: int, rate: int) -> np.ndarray:
    phase = _phase(rng.uniform(60, 400) * 2 ** (2 * slow_curve(rng, size, rate, rng.uniform(0.5, 4))), rate)
    harmonics = sum(rng.random() / n ** 0.5 * np.sin(n * phase + rng.uniform(0, 6)) for n in range(1, 9))
    return harmonics + 0.1 * rng.standard_normal(size)


def _wind(rng: _Rng, size: int, rate: int) -> np.ndarray:
    return coloured(rng, size, lambda hertz: hertz ** -1.2, rate) * (0.1 + slow_curve(rng, size, rate, 2) ** 2)


def _clatter(rng: _Rng, size: int, rate: int) -> np.ndarray:
    count = max(3, int(size / rate * rng.uniform(4, 15)))
    hit = ringing(rng, rate, rng.uniform(800, 4000), rng.uniform(0.005, 0.03))
    sound = _hits(rng, size, rng.integers(size, size=count), hit, rng.uniform(0.2, 1, count))
    return sound + 0.01 * rng.standard_normal(size)


def _melody(rng: _Rng, size: int, rate: int) -> np.ndarray:
    sound = np.zeros(size)
    for _ in range(rng.integers(1, 4)):
        notes = rng.integers(0, 24, max(2, int(size / rate * rng.uniform(2, 6))))
        hertz = 220 * 2 ** (notes[np.arange(size) * len(notes) // size] / 12)
        sound += np.sin(_phase(hertz, rate)) + 0.4 * np.sin(2 * _phase(hertz, rate))
    return sound


def _murmur(rng: _Rng, size: int, rate: int) -> np.ndarray:
    sound = np.zeros(size)
    for _ in range(8):
        band = coloured(rng, size, resonance(rng.uniform(200, 3000), 0.4), rate)
        sound += band * slow_curve(rng, size, rate, 8) ** 2
    return sound


def _rain(rng: _Rng, size: int, rate: int) -> np.ndarray:
    drops = rng.standard_normal(size) * (rng.random(size) < 0.02) * rng.exponential(1, size)
    hit = ringing(rng, rate, rng.uniform(2000, 5000), 0.002)
    return _hits(rng, size, np.arange(size), hit, drops) + 0.3 * coloured(rng, size, resonance(3000, 1.5), rate)


def _printer(rng: _Rng, size: int, rate: int) -> np.ndarray:
    period = int(rate / rng.uniform(8, 25))
    at = np.arange(rng.integers(period), size, period)
    strokes = _hits(rng, size, at, ringing(rng, rate, rng.uniform(300, 1500), 0.01), rng.uniform(0.6, 1, len(at)))
    return strokes * (slow_curve(rng, size, rate, 1) > 0.3) + 0.05 * rng.standard_normal(size)


def _siren(rng: _Rng, size: int, rate: int) -> np.ndarray:
    swing = np.sin(2 * np.pi * rng.uniform(0.3, 2) * np.arange(size) / rate + rng.uniform(0, 6))
    phase = _phase(rng.uniform(500, 900) * 2 ** (0.4 * swing), rate)
    return np.sin(phase) + 0.5 * np.sin(2 * phase) + 0.3 * np.sin(3 * phase) + 0.05 * rng.standard_normal(size)


def _vacuum(rng: _Rng, size: int, rate: int) -> np.ndarray:
    air = sum(coloured(rng, size, resonance(rng.uniform(300, 5000), 0.7), rate) for _ in range(3))
    whine = sum(np.sin(n * _phase(np.full(size, 230.0 + 60 * rng.random()), rate)) for n in (1, 2, 3))
    return air + 0.1 * np.std(air) * whine


def _street(rng: _Rng, size: int, rate: int) -> np.ndarray:
    rumble = coloured(rng, size, lambda hertz: np.minimum(1, (150 / hertz)) , rate)
    passing = coloured(rng, size, resonance(900, 1.0), rate) * slow_curve(rng, size, rate, 0.7) ** 2
    return rumble + 2 * passing


#: Noises by name.
KINDS: dict[str, Callable[[_Rng, int, int], np.ndarray]] = {
    "hiss": _hiss, "hum": _hum, "engine": _engine, "wind": _wind, "clatter": _clatter, "melody": _melody,
    "murmur": _murmur, "rain": _rain, "printer": _printer, "siren": _siren, "vacuum": _vacuum, "street": _street,
}
#: Octaves at which a random equaliser has its points, and its largest gain in decibels.
_OCTAVES = np.arange(6.0, 15.0)
_DECIBELS = 12.0


def equalised(rng: _Rng, noise: np.ndarray, rate: int) -> np.ndarray:
    """Weight the bands of a noise at random, as rooms and microphones do, and make its power 1."""
    octaves = np.log2(np.maximum(np.fft.rfftfreq(len(noise), 1 / rate), 20.0))
    decibels = np.interp(octaves, _OCTAVES, rng.uniform(-_DECIBELS, _DECIBELS, len(_OCTAVES)))
    weighted = np.fft.irfft(np.fft.rfft(noise) * 10 ** (decibels / 20), len(noise))
    return weighted / (np.sqrt(np.mean(weighted ** 2)) + 1e-9)


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
            raise SbkitError(f"DemoNoise: unknown noise {unknown[0]!r}", hint=f"kinds are {', '.join(KINDS)}")
        check_range("DemoNoise", snr_low=snr_low, snr_high=snr_high)
        super().__init__(prob, sample_rate)
        self.snr_low = snr_low
        self.snr_high = snr_high

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        ratio = rng.uniform(self.snr_low, self.snr_high)
        noise = self._random_noise(rng, len(signal))
        if rng.random() < 0.5:
            noise += rng.random() * self._random_noise(rng, len(signal))
        return add_noise(signal, noise.astype(np.float32), ratio)

    def _random_noise(self, rng: np.random.Generator, size: int) -> np.ndarray:
        make = KINDS[self.kinds[rng.integers(len(self.kinds))]]
        return equalised(rng, make(rng, size, self.rate), self.rate)
