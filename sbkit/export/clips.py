"""Clips to compare an export on: test utterances from the shortest to the longest, and one longer than any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sbkit.data.audio import AudioError, read_utterance
from sbkit.data.manifest import Manifest
from sbkit.system.console import counted

if TYPE_CHECKING:
    from sbkit.data.corpus import Corpus

#: Length of the long clip, as a multiple of the longest training utterance.
LONGER = 1.25
_SYNTHETIC_SECONDS = (0.05, 0.3, 1.0, 2.2, 4.7, 9.5)


@dataclass(eq=False)
class Clip:
    """A signal [S], its transcript if known, and its name."""

    signal: np.ndarray
    text: str | None
    name: str


@dataclass
class ComparisonClips:
    """The clips of a comparison."""

    alone: list[Clip]
    origin: str
    """Where most of them come from."""
    longest: float
    """The length of the longest training utterance, in seconds or symbols."""
    hint: str | None = None
    """How to make the comparison more meaningful."""
    others: str = ""
    """What the rest of them are."""

    def __str__(self) -> str:
        """Say how many there are and what they are."""
        parts = [part for part in (self.origin, self.others) if part]
        return f"{counted(len(self.alone), 'clip')} ({', and '.join(parts)})"

    @property
    def uneven(self) -> list[Clip]:
        """A batch of clips whose lengths differ as much as possible."""
        order = sorted(self.alone, key=lambda clip: len(clip.signal))
        return [order[i] for i in dict.fromkeys((0, len(order) // 3, 2 * len(order) // 3, len(order) - 1))]


def choose_clips(corpus: Corpus | None, sample_rate: int, count: int, max_seconds: float | None = None,
                 column: str | None = None, pause_seconds: float = 0.0) -> ComparisonClips:
    """Choose ``count`` utterances of the run's test split, or noise of several lengths if its audio is missing.

    max_seconds : the longest audio that the model takes at once, if limited: no clip is longer
    column : the column with their texts, if these aren't transcripts
    pause_seconds : silence between the parts of the long clip
    """
    clips: list[Clip] = []
    if corpus and Path(corpus.manifest_path("test")).is_file():
        manifest = corpus.manifest("test")
        if max_seconds is not None:
            manifest = manifest.select(np.flatnonzero(manifest.durations <= max_seconds))
        clips = clips_of(manifest, sample_rate, count, column or "text")
    origin = f"{len(clips)} utterances of the test split"
    hint = None
    if not clips:
        clips = [_noise(seconds, sample_rate) for seconds in _SYNTHETIC_SECONDS]
        origin = "noise, because there is no test audio"
        hint = ("a comparison on noise means little: give sbkit import a --data_folder; a run's corpus has to be where "
                "it was")
    longest = _longest_in_training(corpus) or max(len(clip.signal) for clip in clips) / sample_rate

    beginning = Clip(clips[0].signal[: sample_rate // 20].copy(), None, "the first 50 ms of a clip")
    # One clip is longer than any utterance in training. It has no text, because error rates are of utterances.
    long_clip = _join(clips, longest * LONGER * sample_rate, round(pause_seconds * sample_rate))
    if max_seconds is not None:
        long_clip.signal = long_clip.signal[:int(max_seconds * sample_rate)]
    others = "the first 50 ms of the shortest and one longer than any in training"
    if max_seconds is not None:
        others = "the first 50 ms of the shortest and the longest that the model takes"
    return ComparisonClips([beginning, *clips, long_clip], origin, longest, hint, others)


def comparison_clips(clips: list[Clip], sample_rate: int, origin: str) -> ComparisonClips:
    """Add the beginning of a clip, and one that is longer than all, to clips of a test set.

    origin : where they come from
    """
    longest = max(len(clip.signal) for clip in clips) / sample_rate
    beginning = Clip(clips[0].signal[: sample_rate // 20].copy(), None, "the first 50 ms of a clip")
    long_clip = _join(clips, longest * LONGER * sample_rate, 0)
    return ComparisonClips([beginning, *clips, long_clip], origin, longest,
                           others="the first 50 ms of one and several joined, longer than any")


def _longest_in_training(corpus: Corpus | None) -> float:
    """Return the seconds of the longest training utterance; 0 if they are unknown."""
    if corpus is None:
        return 0.0
    path = Path(corpus.manifest_path("train"))
    if not path.is_file():
        return 0.0
    durations = Manifest.open_prepared(path).durations
    return float(durations.max()) if len(durations) else 0.0


def _noise(seconds: float, sample_rate: int) -> Clip:
    """Make noise with changing loudness and pitch, so that frames differ."""
    rng = np.random.default_rng(round(seconds * 1000))
    size = round(seconds * sample_rate)
    time = np.arange(size) / sample_rate
    loudness = 0.05 * (1.1 + np.sin(2 * np.pi * 3 * time))
    tone = np.sin(2 * np.pi * (200 + 800 * np.abs(np.sin(time))) * time)
    noise = (loudness * (rng.standard_normal(size) * 0.3 + tone)).astype(np.float32)
    return Clip(noise, None, f"{seconds:g} s of noise")


def _join(clips: list[Clip], samples: float, pause_samples: int) -> Clip:
    """Join clips, the last ones first, until they have more than ``samples``."""
    pause = np.zeros(pause_samples, np.float32)
    parts: list[np.ndarray] = []
    joined = 0
    while sum(map(len, parts)) <= samples:
        if parts:
            parts.append(pause)
        parts.append(clips[-1 - joined % len(clips)].signal)
        joined += 1
    return Clip(np.concatenate(parts), None, f"{joined} clips joined")


def clips_of(manifest: Manifest, sample_rate: int, count: int, column: str = "text") -> list[Clip]:
    """Read ``count`` utterances from the shortest to the longest, without those that can't be read."""
    clips: list[Clip] = []
    texts = manifest.column(column)
    order = np.argsort(manifest.durations, kind="stable")
    positions = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    for i in order[positions].tolist():
        row = manifest.row(i)
        try:
            signal = read_utterance(row.wav, row.start, row.duration, sample_rate=sample_rate, remote=manifest.remote)
        except AudioError:  # moved or damaged since training; the other clips are enough
            continue
        clips.append(Clip(signal, texts[i], row.id))
    return clips
