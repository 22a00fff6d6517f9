"""The sounds of silence and noise in the plain way: a long transform in float64 for each noise, twenty times slower.

The reference for those of ``sbkit.data``, which must have the same levels, spectra and swells.
"""

import numpy as np


def coloured(rng, size, shape, rate):
    """Noise whose spectrum is a function of the frequency in Hz."""
    frequencies = np.fft.rfftfreq(size, 1 / rate)
    spectrum = rng.standard_normal((2, len(frequencies))) * shape(np.maximum(frequencies, 20.0))
    return np.fft.irfft(spectrum[0] + 1j * spectrum[1], size)


def slow_curve(rng, size, rate, hertz):
    """A random curve between 0 and 1 that changes about ``hertz`` times a second."""
    points = max(2, int(size / rate * hertz) + 2)
    return np.interp(np.linspace(0, points - 1, size), np.arange(points), rng.random(points))


def resonance(middle, width):
    """A resonance at ``middle`` Hz, ``width`` octaves wide."""
    return lambda hertz: np.exp(-0.5 * (np.log2(hertz / middle) / width) ** 2)


def _phase(hertz, rate):
    return 2 * np.pi * np.cumsum(hertz) / rate


def _hits(rng, size, at, hit, loudness):
    """The same short sound at several places, each with its loudness."""
    train = np.zeros(size)
    train[at] = loudness
    length = 1 << (size + len(hit) - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(train, length) * np.fft.rfft(hit, length), length)[:size]


def ringing(rng, rate, hertz, seconds):
    """The sound of something that is hit: a decaying tone with noise."""
    time = np.arange(int(5 * seconds * rate)) / rate
    tone = np.sin(2 * np.pi * hertz * time) + 0.5 * rng.standard_normal(len(time))
    return tone * np.exp(-time / seconds)


def _hiss(rng, size, rate):
    slope = rng.uniform(0.0, 1.0)
    return coloured(rng, size, lambda hertz: hertz ** -slope, rate)


def _hum(rng, size, rate):
    phase = _phase(rng.uniform(40, 200) * (1 + 0.02 * slow_curve(rng, size, rate, 3)), rate)
    harmonics = sum(rng.random() / n * np.sin(n * phase + rng.uniform(0, 6)) for n in range(1, 12))
    return harmonics + 0.1 * coloured(rng, size, lambda hertz: hertz ** -0.5 * 20, rate)


def _engine(rng, size, rate):
    phase = _phase(rng.uniform(60, 400) * 2 ** (2 * slow_curve(rng, size, rate, rng.uniform(0.5, 4))), rate)
    harmonics = sum(rng.random() / n ** 0.5 * np.sin(n * phase + rng.uniform(0, 6)) for n in range(1, 9))
    return harmonics + 0.1 * rng.standard_normal(size)


def _wind(rng, size, rate):
    return coloured(rng, size, lambda hertz: hertz ** -1.2, rate) * (0.1 + slow_curve(rng, size, rate, 2) ** 2)


def _clatter(rng, size, rate):
    count = max(3, int(size / rate * rng.uniform(4, 15)))
    hit = ringing(rng, rate, rng.uniform(800, 4000), rng.uniform(0.005, 0.03))
    sound = _hits(rng, size, rng.integers(size, size=count), hit, rng.uniform(0.2, 1, count))
    return sound + 0.01 * rng.standard_normal(size)


def _melody(rng, size, rate):
    sound = np.zeros(size)
    for _ in range(rng.integers(1, 4)):
        notes = rng.integers(0, 24, max(2, int(size / rate * rng.uniform(2, 6))))
        hertz = 220 * 2 ** (notes[np.arange(size) * len(notes) // size] / 12)
        sound += np.sin(_phase(hertz, rate)) + 0.4 * np.sin(2 * _phase(hertz, rate))
    return sound


def _murmur(rng, size, rate):
    sound = np.zeros(size)
    for _ in range(8):
        band = coloured(rng, size, resonance(rng.uniform(200, 3000), 0.4), rate)
        sound += band * slow_curve(rng, size, rate, 8) ** 2
    return sound


def _rain(rng, size, rate):
    drops = rng.standard_normal(size) * (rng.random(size) < 0.02) * rng.exponential(1, size)
    hit = ringing(rng, rate, rng.uniform(2000, 5000), 0.002)
    return _hits(rng, size, np.arange(size), hit, drops) + 0.3 * coloured(rng, size, resonance(3000, 1.5), rate)


def _printer(rng, size, rate):
    period = int(rate / rng.uniform(8, 25))
    at = np.arange(rng.integers(period), size, period)
    strokes = _hits(rng, size, at, ringing(rng, rate, rng.uniform(300, 1500), 0.01), rng.uniform(0.6, 1, len(at)))
    return strokes * (slow_curve(rng, size, rate, 1) > 0.3) + 0.05 * rng.standard_normal(size)


def _siren(rng, size, rate):
    swing = np.sin(2 * np.pi * rng.uniform(0.3, 2) * np.arange(size) / rate + rng.uniform(0, 6))
    phase = _phase(rng.uniform(500, 900) * 2 ** (0.4 * swing), rate)
    return np.sin(phase) + 0.5 * np.sin(2 * phase) + 0.3 * np.sin(3 * phase) + 0.05 * rng.standard_normal(size)


def _vacuum(rng, size, rate):
    air = sum(coloured(rng, size, resonance(rng.uniform(300, 5000), 0.7), rate) for _ in range(3))
    whine = sum(np.sin(n * _phase(np.full(size, 230.0 + 60 * rng.random()), rate)) for n in (1, 2, 3))
    return air + 0.1 * np.std(air) * whine


def _street(rng, size, rate):
    rumble = coloured(rng, size, lambda hertz: np.minimum(1, (150 / hertz)) , rate)
    passing = coloured(rng, size, resonance(900, 1.0), rate) * slow_curve(rng, size, rate, 0.7) ** 2
    return rumble + 2 * passing


#: Noises by name.
KINDS = {
    "hiss": _hiss, "hum": _hum, "engine": _engine, "wind": _wind, "clatter": _clatter, "melody": _melody,
    "murmur": _murmur, "rain": _rain, "printer": _printer, "siren": _siren, "vacuum": _vacuum, "street": _street,
}


def breaths(rng, size, rate):
    """Bursts of noise that swell and fade, as breath, a cough or a page has them, on faint noise."""
    sound = 0.003 * rng.standard_normal(size)
    for _ in range(max(1, int(size / rate * rng.uniform(0.3, 2)))):
        length = min(size, int(rate * rng.uniform(0.05, 1.2)))
        middle = rng.uniform(300, 4000)
        width = rng.uniform(0.4, 1.5)
        burst = coloured(rng, length, resonance(middle, width), rate)
        at = int(rng.integers(size - length + 1))
        swell = np.sin(np.pi * np.linspace(0, 1, length) ** rng.uniform(0.3, 2))
        sound[at:at + length] += rng.uniform(0.2, 1) * burst * swell / (np.std(burst) + 1e-12)
    return sound


def clicks(rng, size, rate):
    """Single samples and short taps, on silence or faint noise."""
    sound = rng.choice([0.0, 1e-4, 0.01]) * rng.standard_normal(size)
    tap = ringing(rng, rate, rng.uniform(100, 3000), rng.uniform(0.0005, 0.02))
    for at in rng.integers(size, size=max(1, int(size / rate * rng.uniform(0.2, 8)))):
        length = min(len(tap), size - at) if rng.random() < 0.7 else 1
        sound[at:at + length] += rng.uniform(-1, 1) * tap[:length]
    return sound


def tones(rng, size, rate):
    """One to three steady tones, on all the time or beeping, as a line, a device or a test signal has them."""
    time = np.arange(size) / rate
    beeps = 1.0 if rng.random() < 0.4 else (time * rng.uniform(0.3, 6) + rng.random()) % 1 < rng.uniform(0.1, 0.9)
    hertz = np.exp(rng.uniform(np.log(50), np.log(0.45 * rate), rng.integers(1, 4)))
    return np.sum([np.sin(2 * np.pi * each * time + rng.uniform(0, 6)) for each in hertz], 0) * beeps \
        + rng.choice([0.0, 0.001]) * rng.standard_normal(size)


def music(rng, size, rate):
    """Chords, a bass, a melody and a drum on one beat: notes of a scale with harmonics that fade."""
    beat = max(1, int(rate * rng.uniform(0.15, 0.6)))
    scale = rng.uniform(50, 70) + np.array([0, 2, 4, 5, 7, 9, 11] if rng.random() < 0.5 else [0, 2, 3, 5, 7, 8, 10])
    fades = rng.uniform(0.1, 1.5)
    rise = rng.uniform(0.002, 0.1)
    harmonics = rng.random() ** np.arange(rng.integers(1, 10))
    sound = np.zeros(size + 1)
    melody = rng.random() < 0.7
    drum = ringing(rng, rate, rng.uniform(60, 6000), rng.uniform(0.01, 0.1)) if rng.random() < 0.5 else np.zeros(1)
    for number, at in enumerate(range(0, size, beat)):
        places = [int(rng.integers(14))] * melody
        if number % 4 == 0:
            root = int(rng.integers(7))
            places += [root - 7, root, root + 2, root + 4]
        length = min(size - at, int(rate * 4 * fades) + 1)
        time = np.arange(length) / rate
        envelope = np.minimum(time / rise, 1) * np.exp(-time / fades)
        for place in places:
            hertz = 440 * 2 ** ((scale[place % 7] + 12 * (place // 7) - 69) / 12)
            for n, weight in enumerate(harmonics, 1):
                if n * hertz < 0.5 * rate:
                    sound[at:at + length] += weight * envelope * np.sin(2 * np.pi * n * hertz * time)
        hit = min(size - at, len(drum))
        sound[at:at + hit] += rng.uniform(0, 2) * drum[:hit]
    return sound[:size]


def coloured_noise(rng, size, rate):
    """Steady noise between white and deeper than brown, as of rooms, fans and amplifiers."""
    slope = rng.uniform(-0.2, 1.5)
    return coloured(rng, size, lambda hertz: hertz ** -slope, rate)


def textures(rng, size, rate):
    """Bands of noise, each of which swells and fades at its own pace: streets, rain, steps, rooms with people.

    What sounds are made of that have no pitch and no words is little more than how fast each band changes.
    """
    sound = np.zeros(size)
    pace = rng.uniform(-0.7, 1.3)
    for _ in range(rng.integers(3, 13)):
        middle = np.exp(rng.uniform(np.log(80), np.log(0.48 * rate)))
        band = coloured(rng, size, resonance(middle, rng.uniform(0.1, 1.2)), rate)
        swell = slow_curve(rng, size, rate, 10 ** (pace + rng.uniform(-0.3, 0.3))) ** rng.uniform(0.3, 5)
        sound += 10 ** rng.uniform(-1.2, 0) * band * swell / (np.std(band) + 1e-12)
    return sound


_OCTAVES = np.arange(6.0, 15.0)
_DECIBELS = 12.0


def equalised(rng, noise, rate):
    """Weight the bands of a noise at random, as rooms and microphones do, and make its power 1."""
    octaves = np.log2(np.maximum(np.fft.rfftfreq(len(noise), 1 / rate), 20.0))
    decibels = np.interp(octaves, _OCTAVES, rng.uniform(-_DECIBELS, _DECIBELS, len(_OCTAVES)))
    weighted = np.fft.irfft(np.fft.rfft(noise) * 10 ** (decibels / 20), len(noise))
    return weighted / (np.sqrt(np.mean(weighted ** 2)) + 1e-9)

#: All sounds by name.
SOUNDS = {"noise": coloured_noise, "textures": textures, "breaths": breaths, "clicks": clicks, "tones": tones,
          "music": music, **KINDS}
