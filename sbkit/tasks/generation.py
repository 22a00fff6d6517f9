"""What tasks that generate audio share: the check of their parts, and a test's measures, sample clips and results."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import soundfile
import torch

from sbkit.data.manifest import Manifest, Utterance
from sbkit.recipe.build import Built
from sbkit.recipe.load import Transcribe
from sbkit.recipe.source import Findings
from sbkit.score.rates import ErrorRates
from sbkit.score.results import Player, Results, SoundSample
from sbkit.score.significance import interval, interval_in_text

logger = logging.getLogger(__name__)

#: Clips to listen to in a report: this many at random, and this many of the worst.
SAMPLES = 10
#: Where the clips to listen to are written, below the results.
SOUNDS = "sounds"
#: What to install for each measure.
_FROM = {"pystoi": "'sbkit[speech]'", "pesq": "pesq"}
Row = Any  # of a test: a task's own NamedTuple, with id, reference, and sound (int16, of clips that are kept)


class Fit(NamedTuple):
    """A size of a part, and what it has to be."""

    key: str
    argument: str
    found: int
    expected: int
    why: str


def all_fit(numbers: Sequence[Fit], built: Built, findings: Findings) -> bool:
    """Report the sizes that don't match those of other parts; returns whether all match."""
    wrong = [fit for fit in numbers if fit.found != fit.expected]
    for fit in wrong:
        node = built.nodes[fit.key]
        findings.error("shape-mismatch", node.place_of(fit.argument), node.key_of(fit.argument),
                       f"it is {fit.found}, but {fit.why.format(fit.expected)}",
                       "refer to one key of the recipe in both places")
    return not wrong


def stoi(reference: np.ndarray, output: np.ndarray, sample_rate: int) -> float | None:
    """Compute the short-time objective intelligibility, at most 1; None for a clip that has too little speech, and
    where pystoi is not installed."""
    measure = measure_of("pystoi", "stoi")
    if measure is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(measure(reference, output, sample_rate))
        except RuntimeWarning:  # less than 0.4 s that isn't silent
            return None


@functools.cache
def measure_of(module: str, name: str) -> Callable[..., Any] | None:
    """Import a function from an optional module; if it isn't installed, log that once and return None."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        logger.info("%s is not measured: %s isn't installed (pip install %s)", name.upper(), module, _FROM[module])
        return None


def means(rows: Sequence[Row], **measures: str) -> dict[str, float]:
    """Average attributes of rows over the rows in which they are not None.

    measures : attributes by the names of what they measure
    """
    averages = {}
    for name, attribute in measures.items():
        values = [value for row in rows if (value := getattr(row, attribute)) is not None]
        if values:
            averages[name] = float(np.mean(values))
    return averages


def unpadded(signals: torch.Tensor, lengths: torch.Tensor) -> list[np.ndarray]:
    """Return the waveforms [S] of a batch [B, S], without their padding."""
    return [signal[:length] for signal, length in zip(signals.cpu().numpy(), lengths.tolist(), strict=True)]


class ClipSampler:
    """Chooses the clips of a test to keep on this rank: random ones, and the worst if their quality is given."""

    def __init__(self) -> None:
        self._first_places: list[str] = []  # in the random order, of the clips so far
        self._worst_qualities: list[float] = []

    def keep(self, name: str, sound: np.ndarray, quality: float = math.inf) -> np.ndarray | None:
        """Return a clip in 16 bits if it is one to keep, by what has come so far; later ones may be better choices.

        quality : lower is worse; infinite if it is unknown
        """
        self._first_places = sorted([*self._first_places, random_order(name)])[:SAMPLES]
        self._worst_qualities = sorted([*self._worst_qualities, quality])[:SAMPLES]
        is_drawn = random_order(name) in self._first_places
        is_among_worst = quality < math.inf and quality <= self._worst_qualities[-1]
        if not is_drawn and not is_among_worst:
            return None
        return (sound.clip(-1, 1) * 32767).round().astype(np.int16)


def drop_other_sounds(rows: Sequence[Row], quality: Callable[[Row], float] = lambda row: math.inf) -> list[Row]:
    """Drop the sounds of rows of all ranks, except for ``SAMPLES`` random ones and the ``SAMPLES`` worst."""
    last_place = max(sorted(random_order(row.id) for row in rows)[:SAMPLES], default="")
    best_of_worst = max(sorted(map(quality, rows))[:SAMPLES], default=math.inf)

    def is_kept(row: Row) -> bool:
        is_among_worst = quality(row) < math.inf and quality(row) <= best_of_worst
        return random_order(row.id) <= last_place or is_among_worst

    return [row if is_kept(row) else row._replace(sound=None) for row in rows]


def random_order(name: str) -> str:
    """Return an utterance's place in a random order, the same in each run and on any number of ranks."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


class SpeechTest:
    """Times the speech that tests generate, has a recogniser transcribe it, and keeps a few clips of it."""

    def __init__(self, transcribe: Transcribe | None = None) -> None:
        self.transcribe = transcribe
        """Transcribes waveforms [S] at the recipe's sample rate; None: there is no recogniser."""
        self.batch_seconds = 0.0
        """How long it took to generate the last batch's speech."""
        self.clips = ClipSampler()

    def begin_stage(self) -> None:
        """Forget the clips of the validation or test before."""
        self.clips = ClipSampler()

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Measure the time of a batch in this context, including the device's."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.batch_seconds = time.perf_counter() - began

    def complete(self, rows: Sequence[Row], recordings: Sequence[np.ndarray],
                  outputs: Sequence[np.ndarray]) -> list[Row]:
        """Add to the rows of a test batch the time for each output, transcripts, and the sounds of clips to keep."""
        count = len(rows)
        transcripts: Sequence[str | None] = [None] * 2 * count
        if self.transcribe is not None:
            transcripts = self.transcribe([*recordings, *outputs])

        samples = sum(map(len, outputs))
        completed = []
        for row, output, of_recording, of_output in zip(rows, outputs, transcripts[:count], transcripts[count:],
                                                        strict=True):
            completed.append(row._replace(
                seconds=self.batch_seconds * len(output) / samples, recording_transcript=of_recording,
                output_transcript=of_output, sound=self.clips.keep(row.id, output)))
        return completed


@dataclass
class SoundResults(Results):
    """Results of a test whose rows have sound, and error rates of those that have a text."""

    sample_rate: int = field(kw_only=True)
    before: ErrorRates | None = None
    """Of the recordings; None without a recogniser."""
    after: ErrorRates | None = None
    """Of the output."""
    rows: Sequence[Row] = ()
    #: What generated the sound, as the report calls it.
    maker: ClassVar[str]

    def add_word_rates(self) -> None:
        """Compute the error rates, if there are transcripts."""
        self.before, self.after = (word_rates(self.rows, f"{name}_transcript") for name in ("recording", "output"))
        if self.before is not None and self.after is not None:
            self.stats |= {"WER": self.after.rate, "WER_of_recordings": self.before.rate}

    def remark(self, row: Row) -> str:
        """Return what was measured of a clip."""
        return str(row.id)

    def sounds(self, row: Row) -> Mapping[str, np.ndarray]:
        """Return the sounds of a clip by their labels; if there is only one, the report adds the recording."""
        return {self.maker: row.sound}

    def intervals(self) -> dict[str, Any]:
        """Return the intervals of both error rates, if they were measured."""
        if self.before is None or self.after is None:
            return {}
        return {"WER_interval": interval(self.after), "WER_of_recordings_interval": interval(self.before)}

    def figures(self, name: str) -> Mapping[str, float]:
        figures = super().figures(name)
        if name != "WER":
            return figures
        return {f"of the {self.maker}'s output": value for value in figures.values()}

    def files(self, of: str = "") -> list[str]:
        return [*super().files(of), f"{of}_{SOUNDS}" if of else SOUNDS]

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Write the numbers, and the sounds of a few utterances."""
        with_sound = {row.id: row for row in self.rows if row.sound is not None}
        drawn = sorted(sorted(with_sound, key=random_order)[:SAMPLES])
        worst = [] if self.estimate is None else [self.estimate.ids[i] for i in self.estimate.worst()[:SAMPLES]]
        if not with_sound.keys() >= set(worst):  # this task keeps only random clips
            worst = []

        subfolder = Path(f"{of}_{SOUNDS}" if of else SOUNDS)
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        place = {name: i for i, name in enumerate(manifest.ids)}
        players = {}
        for number, name in enumerate(dict.fromkeys([*drawn, *worst]), 1):
            recording = manifest.row(place[name])
            players[name] = self._write_clip(folder, subfolder / f"{number:02}", with_sound[name], recording)
        self.players = [players[name] for name in drawn]
        self.players += [replace(players[name], among_worst=True) for name in worst]
        super().write(folder, manifest, of)

    def _write_clip(self, folder: Path, stem: Path, row: Row, recording: Utterance) -> Player:
        """Write the sounds of a clip, below ``folder`` in files that begin with ``stem``; returns its player."""
        sounds = self.sounds(row)
        several = len(sounds) > 1
        samples = []
        if not several:
            samples.append(SoundSample("recording", recording.wav, recording.start, recording.duration))
        for label, sound in sounds.items():
            path = stem.with_name(f"{stem.name}-{label}.flac" if several else f"{stem.name}.flac")
            soundfile.write(folder / path, sound, self.sample_rate)
            samples.append(SoundSample(label, str(path), 0.0, len(sound) / self.sample_rate))
        return Player(row.reference or row.id, self.remark(row), samples)

    def error_rate_rows(self) -> list[list[str]]:
        """Return rows of a table with the error rates that were measured."""
        measured = [("WER", f"of the {self.maker}'s output", self.after),
                    ("WER of the recordings", "by the same recogniser", self.before)]
        return [[name, f"{rates.rate:.2f} %", f"{what}; 95 % interval {interval_in_text(rates)}"]
                for name, what, rates in measured if rates is not None]


def word_rates(rows: Sequence[Row], name: str) -> ErrorRates | None:
    """Compute error rates of one of the rows' transcripts, over those with a text; None if there are none."""
    scored = [(row.id, row.reference, getattr(row, name)) for row in rows
              if row.reference.split() and getattr(row, name) is not None]
    if not scored:
        return None
    rates = ErrorRates("word")
    rates.add(*zip(*scored, strict=True))
    return rates
