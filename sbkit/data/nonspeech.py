"""Audio in which nobody speaks, drawn from a seed, so that a recogniser learns to write nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from sbkit.data.augment import AudioFiles, recorded_noise
from sbkit.data.demo_noise import KINDS
from sbkit.data.manifest import Manifest
from sbkit.data.noise_parts import (
    Band,
    Shape,
    at_power_1,
    coloured,
    complex_normal,
    equalised,
    fast_length,
    flat,
    normal,
    played,
    random_equaliser,
    resonance,
    ringing,
    root_mean_square,
    signal_of,
    slow_curve,
    steady,
    swelling,
    tone,
    wave,
)
from sbkit.errors import SbkitError
from sbkit.system.schema import NOT_NEGATIVE, require

#: The path of a row that is made, before the numbers of the row whose length it has and of those heard in it.
SCHEME = "nonspeech:"
#: Of the rows that are made, this share is silence alone, and this one has two utterances; in others there is one.
_ALONE = 0.5
_TWO = 0.15
#: Of a row, the share that utterances in it have at most.
_SPOKEN = 0.8
#: Levels of silence alone, and how far below an utterance it is around and under one, in decibels. Without noisy speech
#: a model learns that noise alone says that nobody speaks.
_LEVELS = (-95.0, -12.0)
_BELOW = (0.0, 50.0)
#: The same of the corpus' own rows: speech that is louder, so that a model needn't guess words in what is mostly noise.
UNDER = (10.0, 65.0)
_PAUSE_SECONDS = 0.25
#: The share of sounds that swell and fade, and how often a second, as a power of ten: from wind to syllables. A model
#: that only hears steady noise takes one that swells for somebody who speaks.
_SWELLING = 0.4
_SWELLS = (-0.7, 1.0)


def breaths(rng: np.random.Generator, size: int, rate: int) -> np.ndarray:
    """Bursts of noise that swell and fade, as breath, a cough or a page has them, on faint noise."""
    sound = 0.003 * normal(rng, size)
    for _ in range(max(1, int(size / rate * rng.uniform(0.3, 2)))):
        length = min(size, int(rate * rng.uniform(0.05, 1.2)))
        middle = rng.uniform(300, 4000)
        width = rng.uniform(0.4, 1.5)
        burst = coloured(rng, length, resonance(middle, width), rate)
        at = int(rng.integers(size - length + 1))
        swell = np.sin(np.pi * np.linspace(0, 1, length, dtype=np.float32) ** rng.uniform(0.3, 2))
        loudness = rng.uniform(0.2, 1) / (root_mean_square(burst) + 1e-12)
        sound[at:at + length] += loudness * burst * swell
    return sound


def clicks(rng: np.random.Generator, size: int, rate: int) -> np.ndarray:
    """Single samples and short taps, on silence or faint noise."""
    sound = float(rng.choice([0.0, 1e-4, 0.01])) * normal(rng, size)
    tap = ringing(rng, rate, rng.uniform(100, 3000), rng.uniform(0.0005, 0.02))
    for at in rng.integers(size, size=max(1, int(size / rate * rng.uniform(0.2, 8)))):
        length = min(len(tap), size - at) if rng.random() < 0.7 else 1
        sound[at:at + length] += rng.uniform(-1, 1) * tap[:length]
    return sound


def tones(rng: np.random.Generator, size: int, rate: int) -> np.ndarray:
    """One to three steady tones, on all the time or beeping, as a line, a device or a test signal has them."""
    gate: np.ndarray | float = 1.0
    if rng.random() >= 0.4:
        beeps = steady(rng.uniform(0.3, 6), size, rate) + np.uint32(rng.integers(2 ** 32))
        gate = beeps < rng.uniform(0.1, 0.9) * 2 ** 32
    sound = np.zeros(size, np.float32)
    for octaves in rng.uniform(np.log2(50), np.log2(0.45 * rate), rng.integers(1, 4)).tolist():
        sound += tone(steady(2 ** octaves, size, rate), start=rng.uniform(0, 6))
    sound *= gate
    return sound + float(rng.choice([0.0, 0.001])) * normal(rng, size)


def music(rng: np.random.Generator, size: int, rate: int) -> np.ndarray:
    """Chords, a bass, a melody and a drum on one beat: notes of a scale with harmonics that fade."""
    beat = max(1, int(rate * rng.uniform(0.15, 0.6)))
    scale = rng.uniform(50, 70) + np.array([0, 2, 4, 5, 7, 9, 11] if rng.random() < 0.5 else [0, 2, 3, 5, 7, 8, 10])
    fades = rng.uniform(0.1, 1.5)
    rise = rng.uniform(0.002, 0.1)
    weights = rng.random() ** np.arange(rng.integers(1, 10))
    waves = dict[int, np.ndarray]()  # by how many harmonics a note has that can be heard at this rate
    melody = rng.random() < 0.7
    drum = ringing(rng, rate, rng.uniform(60, 6000), rng.uniform(0.01, 0.1)) if rng.random() < 0.5 else np.zeros(1)

    sound = np.zeros(size, np.float32)
    time = np.arange(min(size, int(rate * 4 * fades) + 1)) / rate
    envelope = (np.minimum(time / rise, 1) * np.exp(-time / fades)).astype(np.float32)
    for number, at in enumerate(range(0, size, beat)):
        places = [int(rng.integers(14))] * melody
        if number % 4 == 0:
            root = int(rng.integers(7))
            places += [root - 7, root, root + 2, root + 4]
        length = min(size - at, len(time))
        for place in places:
            hertz = float(440 * 2 ** ((scale[place % 7] + 12 * (place // 7) - 69) / 12))
            audible = min(len(weights), int(np.ceil(0.5 * rate / hertz)) - 1)
            if audible not in waves:
                waves[audible] = wave(weights[:audible])
            sound[at:at + length] += envelope[:length] * played(waves[audible], steady(hertz, length, rate))
        hit = min(size - at, len(drum))
        sound[at:at + hit] += rng.uniform(0, 2) * drum[:hit]
    return sound


def coloured_noise(rng: np.random.Generator, size: int, rate: int, equaliser: Shape = flat) -> np.ndarray:
    """Steady noise between white and deeper than brown, as of rooms, fans and amplifiers."""
    slope = rng.uniform(-0.2, 1.5)
    return coloured(rng, size, lambda hertz: hertz ** -slope * equaliser(hertz), rate)


def textures(rng: np.random.Generator, size: int, rate: int, equaliser: Shape = flat) -> np.ndarray:
    """Bands of noise, each of which swells and fades at its own pace: streets, rain, steps, rooms with people.

    What sounds are made of that have no pitch and no words is little more than how fast each band changes.
    """
    pace = rng.uniform(-0.7, 1.3)
    bands = [Band(middle=2 ** rng.uniform(np.log2(80), np.log2(0.48 * rate)),
                  width=rng.uniform(0.1, 1.2),
                  swells=10 ** (pace + rng.uniform(-0.3, 0.3)),
                  power=rng.uniform(0.3, 5),
                  loudness=10 ** rng.uniform(-1.2, 0)) for _ in range(rng.integers(3, 13))]
    return swelling(rng, size, rate, bands, equaliser)


#: Silence that is synthesised, by name: what models are known to write words for, coloured noise, and all others.
HARD = {"breaths": breaths, "clicks": clicks, "tones": tones, "music": music}
SILENCES: dict[str, Callable[..., np.ndarray]] = {
    "noise": coloured_noise, "textures": textures, **HARD, **KINDS}


class NonSpeech:
    """Rows without words in training: silence of all kinds with an empty text, alone, around and between utterances.

    nonspeech: !new:sbkit.data.nonspeech.NonSpeech
        share: 0.1

    They are added to the rows of the corpus, with its durations, and drawn by the plan as all others. What is heard in
    a row depends on the seed, the row and the number of the pass alone, so a run is the same on any number of devices,
    and after any interruption: digital zero, noise of all colours, hum, clicks, breath, tones, music, streets and more,
    at -95 to -12 dB, and the pauses of the corpus' own recordings. Rows of the corpus whose text is empty are kept as
    well.

    share : of the audio of training, from 0 to 0.9
    folder : has recordings in which nobody speaks, at any depth; then half of the silence is from there
    under : the share of the corpus' own rows under which it is heard too, 10 to 65 dB below. With features that keep
        the level, a model of clean recordings otherwise takes the faintest noise as a sign that nobody speaks
    """

    def __init__(self, share: float = 0.1, folder: str | None = None, under: float = 0.0):
        require("nonspeech: share", share, NOT_NEGATIVE)
        require("nonspeech: under", under, NOT_NEGATIVE)
        if share > 0.9:
            raise SbkitError("bad-value", f"nonspeech: share is {share:g}, which leaves too little speech to learn "
                             "from", hint="it must be a share of the training audio, at most 0.9; 0.1 is usual",
                             key="nonspeech.share", value=share)
        if under > 1:
            raise SbkitError("bad-value", f"nonspeech: under is {under:g}",
                             hint="it must be a share of the corpus's rows, from 0 to 1", key="nonspeech.under",
                             value=under)
        self.share = float(share)
        self.under = float(under)
        self.files = None if folder is None else AudioFiles(folder, "nonspeech")

    # ------------------------------------------------------------ which rows

    def added_to(self, train: Manifest, seed: int) -> Manifest:
        """Add the rows to a training set; in a mixture each part gets its share, and texts of its own."""
        if self.files is not None:
            self.files.check()
        rng = np.random.Generator(np.random.PCG64([seed % 2**64, 0x51]))
        spoken = np.flatnonzero(train.durations > 0)
        parts = np.zeros(len(train), np.int64)
        if train.shares:
            parts = train.column("corpus").numbered()[1].astype(np.int64)
        made: list[_Made] = []
        for part in np.unique(parts):
            rows = spoken[parts[spoken] == part]
            rows = rows[np.argsort(train.durations[rows], kind="stable")]
            made += _rows_to_make(rows, train.durations[rows].astype(np.float64), self.share, rng)
        texts = [[train.texts[row] for row in row_made.heard] for row_made in made]
        # Scripts without spaces have none between two utterances either.
        space = " " if pc.any(pc.match_substring(train.texts.arrow, " ")).as_py() else ""
        template = train.select(np.array([row_made.like for row_made in made], np.int64))
        prefix = [f"{part}:" for part in template.column("corpus")] if train.shares else [""] * len(made)
        return train.joined(template.replace(
            ids=[f"{part}nonspeech-{i}" for i, part in enumerate(prefix)],
            wavs=[row_made.wav for row_made in made],
            starts=None,
            texts=[space.join(filter(None, several)) for several in texts]))

    @staticmethod
    def rows_of(wav: str) -> list[int]:
        """Of a row that is made, the row whose length it has, and those that are heard in it; none of a recording."""
        return list(map(int, wav.removeprefix(SCHEME).split(","))) if wav.startswith(SCHEME) else []

    # ------------------------------------------------------------ what is heard

    def signal(self, size: int, rate: int, rng: np.random.Generator, spoken: Sequence[np.ndarray] = (),
               recording: Callable[[], np.ndarray] | None = None, below: tuple[float, float] = _BELOW) -> np.ndarray:
        """Make silence [size] float32, with the utterances ``spoken`` [S] in it, in this order.

        recording : reads a recording [S] of the corpus, whose quietest part may sound on
        below : from how many to how many decibels it is below the utterances
        """
        loudness = 10 ** (rng.uniform(*_LEVELS) / 20)
        source = rng.random()
        is_room = False  # which has a loudness of its own
        if self.files is not None and source < 0.5:
            signal = self.files.draw(rng, lambda path: recorded_noise(path, size, rate, rng)).astype(np.float32)
        elif source > 0.9:
            signal = np.zeros(size, np.float32)
        elif source > 0.8 and recording is not None:
            signal = room_of(recording(), size, rate, rng)
            is_room = True
        else:
            signal = _synthesised(size, rate, rng)

        if spoken:
            loudness = root_mean_square(np.concatenate(spoken)) * 10 ** (-rng.uniform(*below) / 20)
        if is_room and not spoken:
            signal *= 10 ** rng.uniform(-0.3, 0.3)
        else:
            signal *= loudness / (root_mean_square(signal) or 1.0)

        gaps = rng.dirichlet(np.ones(len(spoken) + 1)) * max(0, size - sum(map(len, spoken)))
        is_gated = rng.random() < 0.3  # nothing is heard under an utterance, as after a noise gate
        at = 0.0
        for gap, utterance in zip(gaps, spoken, strict=False):
            place = signal[int(at + gap):][: len(utterance)]
            place *= not is_gated
            place += utterance[: len(place)]
            at += gap + len(utterance)

        if rng.random() < 0.3:  # as a file or a microphone of 16 bits has it
            signal = np.round(signal * np.float32(2 ** 15)) / np.float32(2 ** 15)
        return signal


class _Made(NamedTuple):
    """A row that is made: the row of the corpus whose length it has, and those that are heard in it."""

    like: int
    heard: list[int]

    @property
    def wav(self) -> str:
        """The path of the row, which ``NonSpeech.rows_of`` reads."""
        return SCHEME + ",".join(map(str, [self.like, *self.heard]))


def _rows_to_make(rows: np.ndarray, seconds: np.ndarray, share: float, rng: np.random.Generator) -> list[_Made]:
    """Choose the rows that are made for one part of a training set: lengths of its rows, and what is heard in them.

    With A seconds of the corpus and S that are made, ``share`` is S / (A + S), so S is share / (1 - share) * A. That is
    more than A if share is above a half: then rows are gone through several times, each time in another order.

    rows : ``[n]``, the part's rows, the shortest first
    seconds : ``[n]``, their durations
    """
    ratio = share / (1 - share)
    rounds = int(ratio) + 1
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(rounds)])
    fitting = int(np.searchsorted(np.cumsum(seconds[order]), ratio * seconds.sum()))
    least = 1 if share > 0 else 0  # however few seconds the part has
    order = order[: max(least, fitting)]

    made = []
    kinds, first_choices, second_choices = rng.random((3, len(order)))
    for place, kind, *choices in zip(order.tolist(), kinds, first_choices, second_choices, strict=True):
        count = _utterances_in(kind) if len(order) > 1 else 0  # a single row is silence alone
        # All utterances together have at most ``_SPOKEN`` of the row. The rows that are short enough for that are the
        # first ones: of rows of 1, 2 and 10 s, in the last one, if it has two utterances of 4 s at most, 0 and 1.
        candidates = int(np.searchsorted(seconds, _SPOKEN / count * seconds[place], "right")) if count else 0
        heard = [rows[int(choice * candidates)] for choice in choices[:count]] if candidates else []
        made.append(_Made(like=rows[place], heard=heard))
    return made


def _utterances_in(kind: float) -> int:
    """Return how many utterances a row has, for a random number from 0 to 1."""
    if kind < _ALONE:
        return 0
    return 2 if kind > 1 - _TWO else 1


def room_of(recording: np.ndarray, size: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Make noise [size] with the spectrum and the level of a recording's quietest part: what is heard in its pauses."""
    part = max(1, min(len(recording), int(_PAUSE_SECONDS * rate)))
    power = np.cumsum(np.concatenate([[0.0], recording.astype(np.float64) ** 2]))
    start = int(np.argmin(power[part:] - power[:-part])) if len(recording) > part else 0
    pause = recording[start:start + part].astype(np.float64)
    spectrum = np.abs(np.fft.rfft(pause)) / part ** 0.5  # flat for white noise

    length = fast_length(size)
    noise = complex_normal(rng, length // 2 + 1)
    places = np.linspace(0, len(spectrum) - 1, len(noise))
    noise *= np.interp(places, np.arange(len(spectrum)), spectrum * (length / 2) ** 0.5).astype(np.float32)
    return signal_of(noise, length)[:size]


def _synthesised(size: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Make a mixture [size] of one or two sounds of ``SILENCES``."""
    signal = np.zeros(size, np.float32)
    for weight in (1.0, rng.random())[: rng.integers(1, 3)]:
        # A fifth is coloured noise, which all microphones have, a third textures, a quarter what is hard.
        groups = (["noise"], ["textures"], list(HARD), list(KINDS))
        names = groups[np.searchsorted([0.2, 0.53, 0.8], rng.random())]
        make = SILENCES[names[rng.integers(len(names))]]
        equaliser = random_equaliser(rng)
        if make in (coloured_noise, textures):  # which are made from their spectrum
            sound = make(rng, size, rate, equaliser)
        else:
            sound = equalised(make(rng, size, rate), equaliser, rate)
        if rng.random() < _SWELLING:
            sound *= slow_curve(rng, size, rate, 10 ** rng.uniform(*_SWELLS), power=rng.uniform(0.5, 4))
        signal += weight * at_power_1(sound)
    return signal
