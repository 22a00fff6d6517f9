"""What a recogniser does beyond its test set: a battery of recordings made from a seed, and a table of what it wrote.

The sounds are others than those that training synthesises (``sbkit.data.nonspeech``): none of its code is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sbkit.data.audio import resample
from sbkit.data.augment import ApplyCodec, add_noise
from sbkit.score.rates import ErrorRates
from sbkit.score.results import Table
from sbkit.score.significance import MIN_UTTERANCES, interval_in_text
from sbkit.system.console import counted

#: Of non-speech, root mean square in decibels below full scale.
LEVELS = (-20, -45, -80)
#: Seconds of each recording of non-speech, in full and in short.
SECONDS = 10.0
SHORT_SECONDS = 3.0
#: Recordings of each kind of non-speech at each level.
TIMES = 3
_SNRS = (20, 10, 5, 0, -5)
_SPEEDS = (0.8, 0.9, 1.1, 1.2)
_WORST = 10  # recordings of the user's noises that are named
_UNKNOWN = "–"  # an interval in a table, explained once below it
_PAUSE = 3.0  # seconds of a quiet room before and after an utterance


class BatteryClip(NamedTuple):
    """A recording: what is tried with it, at which level if nobody speaks in it, and the words in it."""

    name: str
    level: int | None
    signal: np.ndarray
    """``[S]`` float32."""
    reference: str = ""


#: The kinds of sounds in which nobody speaks.
SILENCES = ("white noise", "brown noise", "hum", "clicks", "breath", "music", "machine", "crowd")
ZEROS = "digital zero"
#: The name of the figure of all silence, which ``--max`` limits.
SILENCE = "behaviour.silence"


def _sound(kind: str, rng: np.random.Generator, time: np.ndarray) -> np.ndarray:
    """Make a sound of one of ``SILENCES`` at these times [S] in seconds, at any loudness."""
    size = len(time)
    if kind == "brown noise":
        walk = np.cumsum(rng.standard_normal(size))
        return walk - np.interp(time, time[:: size // 50], walk[:: size // 50])  # nothing below some hertz
    if kind == "hum":
        return np.sum([np.sin(2 * np.pi * 50 * n * time + rng.uniform(0, 6)) / n for n in range(1, 16)], 0)
    if kind == "clicks":
        return rng.standard_normal(size) * (rng.random(size) < 3 / (size / time[-1]))
    if kind == "breath":
        soft = np.convolve(rng.standard_normal(size), np.hanning(9), "same")
        return soft * np.maximum(0, np.sin(2 * np.pi * 0.3 * time + rng.uniform(0, 6))) ** 2
    if kind == "music":
        sound = np.zeros(size)
        since = time[: int(size / time[-1])]
        for at in np.arange(0, time[-1], 0.25):  # broken chords of plucked strings, each for at most a second
            hertz = 110 * 2 ** ((12 * rng.integers(3) + rng.choice([0, 4, 7, 9])) / 12)
            place = sound[int(np.searchsorted(time, at)):][: len(since)]
            place += sum(np.exp(-(3 + n) * since) * np.sin(2 * np.pi * n * hertz * since) / n
                         for n in range(1, 7))[: len(place)]
        return sound
    if kind == "machine":
        turns = 0.6 + 0.4 * np.sin(2 * np.pi * rng.uniform(8, 20) * time)
        return turns * np.convolve(rng.standard_normal(size), np.hanning(25), "same") \
            + np.sin(2 * np.pi * rng.uniform(100, 300) * time)
    if kind == "crowd":
        sound = np.zeros(size)
        for pitch in rng.uniform(0.1, 1.0, 6):  # bands of noise that swell as syllables do
            loud = np.interp(5 * time, np.arange(int(5 * time[-1]) + 2), rng.random(int(5 * time[-1]) + 2) ** 2)
            sound += loud * np.convolve(rng.standard_normal(size), np.cos(np.arange(120) * pitch) * np.hanning(120),
                                        "same")
        return sound
    return rng.standard_normal(size)


def silences(rate: int, seconds: float = SECONDS, times: int = TIMES, seed: int = 0) -> list[BatteryClip]:
    """Make recordings in which nobody speaks: of each kind at each level in turn."""
    time = np.arange(1, round(seconds * rate) + 1) / rate
    clips = []
    for turn in range(times):
        clips.append(BatteryClip(ZEROS, None, np.zeros(len(time), np.float32)))
        sounds = {kind: _sound(kind, np.random.default_rng([seed, turn, number]), time)
                  for number, kind in enumerate(SILENCES)}
        for level, (kind, sound) in itertools.product(LEVELS, sounds.items()):
            gain = 10 ** (level / 20) / (np.sqrt(np.mean(sound ** 2)) + 1e-12)
            clips.append(BatteryClip(kind, level, np.clip(gain * sound, -1, 1).astype(np.float32)))
    return clips


def speeches(clips: Sequence[tuple[np.ndarray, str]], rate: int, seed: int = 0) -> list[BatteryClip]:
    """Make what may happen to utterances: waveforms [S] float32, and their texts."""
    battery = []
    telephone = ApplyCodec(["ulaw"], prob=1.0, sample_rate=rate)
    for number, (signal, text) in enumerate(clips):
        rng = np.random.default_rng([seed, number])
        next_signal, next_text = clips[(number + 1) % len(clips)]
        room = 1e-4 * rng.standard_normal(round(_PAUSE * rate)).astype(np.float32)
        cut = len(signal) // 10
        noise = rng.standard_normal(len(signal)).astype(np.float32)
        changed = {
            "as recorded": signal,
            "in a quiet room": np.concatenate([room, signal, room]),
            "half as loud": signal / 2,
            "twice as loud": np.clip(2 * signal, -1, 1),
            "telephone": telephone(signal, rng),
            "cut at the start": signal[cut:],
            "cut at the end": signal[:len(signal) - cut],
            **{f"noise {ratio} dB": add_noise(signal, noise, ratio) for ratio in _SNRS},
            **{f"speed {speed:g}": resample(signal, round(rate * speed), rate) for speed in _SPEEDS},
        }
        battery += [BatteryClip(name, None, sound.astype(np.float32), text) for name, sound in changed.items()]
        battery.append(BatteryClip("joined", None, np.concatenate([signal, next_signal]), f"{text} {next_text}"))
    return battery


@dataclass
class Behaviour:
    """What a recogniser wrote for the trials, as tables and as figures that can be limited."""

    tables: list[Table]
    figures: dict[str, float]

    @classmethod
    def of(cls, trials: Sequence[BatteryClip], texts: Sequence[str], rate: int, how: str = "") -> Behaviour:
        """Count the words that were written for trials, waveforms at this rate; the last ones may be missing.

        how : the search, for a remark
        """
        silent: dict[str, dict[int | None, _WordCount]] = {}  # of each kind at each level
        spoken: dict[str, ErrorRates] = {}
        for number, (trial, written) in enumerate(zip(trials, texts, strict=False)):
            if trial.reference:
                spoken.setdefault(trial.name, ErrorRates("word")).add([str(number)], [trial.reference], [written])
            else:
                count = silent.setdefault(trial.name, {}).setdefault(trial.level, _WordCount())
                count.words += len(written.split())
                count.minutes += len(trial.signal) / rate / 60
        non_speech, figures = _non_speech_table(silent, how)
        tables = [non_speech]
        if spoken:
            speech, speech_figures = _speech_table(spoken, how)
            tables.append(speech)
            figures |= speech_figures
        return cls(tables, figures)


@dataclass
class _WordCount:
    """Words that were written for recordings of non-speech."""

    words: float = 0.0
    minutes: float = 0.0

    @classmethod
    def total(cls, counts: Iterable[_WordCount]) -> _WordCount:
        words, minutes = np.sum([(count.words, count.minutes) for count in counts], 0)
        return cls(float(words), float(minutes))

    @property
    def rate(self) -> float:
        return self.words / self.minutes


def _non_speech_table(counts: Mapping[str, Mapping[int | None, _WordCount]], how: str
                      ) -> tuple[Table, dict[str, float]]:
    """The table of the words that were written for each kind of non-speech at each level, and its figures."""
    total = _WordCount.total(count for levels in counts.values() for count in levels.values())
    figures = {SILENCE: total.rate}
    rows = []
    for kind, levels in counts.items():
        of_kind = _WordCount.total(levels.values())
        figures[f"behaviour.{kind.replace(' ', '_')}"] = of_kind.rate
        cells = [f"{levels[level].rate:.1f}" if level in levels else "" for level in LEVELS]
        rows.append([kind, *cells, f"{of_kind.rate:.1f}", _range(of_kind)])
    rows.append(["all", *("" for _ in LEVELS), f"{total.rate:.1f}", _range(total)])
    columns = ["sound", *(f"at {level} dB" for level in LEVELS), "mean", "95 % interval"]
    remark = f"{total.minutes:.1f} minutes of sounds that training never draws, made from a seed{how}. 0 is right."
    return Table("Hallucinated words per minute on non-speech", columns, rows, remark), figures


def _speech_table(rates_by_change: Mapping[str, ErrorRates], how: str) -> tuple[Table, dict[str, float]]:
    """The table of the error rates of changed utterances, and its figures."""
    figures = {}
    rows = []
    has_unknown = False
    for name, rates in rates_by_change.items():
        figures[f"behaviour.{name.replace(' ', '_')}"] = rates.rate
        interval = _UNKNOWN
        if len(rates) >= MIN_UTTERANCES:
            interval = interval_in_text(rates)
        else:
            has_unknown = True
        rows.append([name, f"{rates.rate:.2f}", interval])

    count = len(next(iter(rates_by_change.values())))
    remark = f"{counted(count, 'utterance')} of the test set{how}."
    if has_unknown:
        remark += f" {_UNKNOWN}: unknown, because there are fewer than {MIN_UTTERANCES} utterances."
    return Table("The same utterances, changed", ["speech", "WER %", "95 % interval"], rows, remark), figures


def words_in_noises(paths: Sequence[str], seconds: Sequence[float], texts: Sequence[str]) -> Table | None:
    """List the recordings of the user's noises with the most hallucinated words per minute; None without any."""
    counts = [60 * len(text.split()) / length for text, length in zip(texts, seconds, strict=True)]
    worst = [place for place in np.argsort(counts, kind="stable")[::-1].tolist() if counts[place]]
    if not worst:
        return None
    return Table("Noises of nonspeech: folder for which the model writes words",
                 ["recording", "words per minute", "text"],
                 [[paths[place], f"{counts[place]:.1f}", texts[place]] for place in worst[:_WORST]],
                 f"{len(worst)} of {len(paths)} that were tried, the worst first. Remove those with speech: with them, "
                 "a model learns to write nothing for speech.")


def _range(count: _WordCount) -> str:
    """The 95 % interval of a Poisson rate (Wilson and Hilferty)."""
    words = count.words
    low = words * (1 - 1 / (9 * words) - 1.96 / (3 * math.sqrt(words))) ** 3 if words else 0.0
    high = (words + 1) * (1 - 1 / (9 * words + 9) + 1.96 / (3 * math.sqrt(words + 1))) ** 3
    return f"{low / count.minutes:.1f} to {high / count.minutes:.1f}"
