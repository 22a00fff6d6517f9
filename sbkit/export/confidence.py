"""Calibrates the word confidences of a new recogniser, on utterances of dev and on recordings without speech."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbkit.data.corpus import Corpus
from sbkit.data.nonspeech import NonSpeech
from sbkit.export.clips import Clip, clips_of
from sbkit.score.calibration import Calibration, reliability
from sbkit.score.edits import DELETION, EQUAL, align
from sbkit.score.results import Table
from sbkit.system.console import counted

#: The title of the section in a bundle's README.
CONFIDENCE = "How far to trust a word's confidence"
#: Utterances of dev to transcribe. The test set and the behaviour trial stay unseen, since their figures are published.
_UTTERANCES = 100
#: One recording without speech is added for this many utterances.
_UTTERANCES_PER_SILENCE = 5
#: Fewer words than this don't show a curve, so confidences stay as they are.
_MIN_WORDS = 200
#: Seconds after which no further batch is transcribed.
_MAX_SECONDS = 30.0
#: Largest number of recordings in a batch.
_BATCH = 12

#: Maps waveforms [S] to a ``sbkit.infer.transcript.Transcript`` of each, which this package can't import.
Transcribe = Callable[[Sequence[np.ndarray]], list[Any]]


@dataclass(frozen=True)
class ConfidenceCurve:
    """The share of right words by their confidence: the points of the curve for config.json, and how well it fits."""

    points: list[list[float]]
    table: Table


@dataclass(frozen=True)
class NotCalibrated:
    """Why there is no curve."""

    reason: str


def calibrate_confidences(sample_rate: int, transcribe: Transcribe, corpus: Corpus | None
                          ) -> ConfidenceCurve | NotCalibrated:
    """Fit the share of right words to their confidence; nothing is downloaded for it."""
    if corpus is None or not corpus.manifest_path("dev").is_file():
        return NotCalibrated("the corpus, of which dev is needed, is not on this machine")
    dev = corpus.manifest("dev")
    if dev.has_urls:
        return NotCalibrated("the recordings of dev are not on this machine")

    started = time.monotonic()
    clips = clips_of(dev, sample_rate, _UTTERANCES)
    for number, clip in enumerate(clips[::_UTTERANCES_PER_SILENCE]):
        rng = np.random.default_rng(number)
        silence = NonSpeech().signal(len(clip.signal), sample_rate, rng)
        clips.append(Clip(silence, "", "silence"))

    # Clips are sorted by length. Each batch takes every n-th, so also the first ones have all lengths, and silence.
    transcripts: list[tuple[Clip, Any]] = []
    batches = math.ceil(len(clips) / _BATCH)
    for number in range(batches):
        if time.monotonic() >= started + _MAX_SECONDS:
            break
        batch = clips[number::batches]
        transcripts += zip(batch, transcribe([clip.signal for clip in batch]), strict=True)

    confidences: list[float] = []
    right: list[bool] = []
    hallucinated: list[float] = []  # confidences of the words that were written for silence
    for clip, transcript in transcripts:
        text = clip.text or ""
        reference = text.split() if transcript.spaced else list(text.replace(" ", ""))
        word_confidences = [word.confidence for word in transcript.words]
        confidences += word_confidences
        if not reference:
            hallucinated += word_confidences
        [steps] = align([reference], [[word.text for word in transcript.words]])
        right += [step == EQUAL for step in steps if step != DELETION]
    if len(right) < _MIN_WORDS:
        return NotCalibrated(f"the model wrote {counted(len(right), 'word')} for dev, and {_MIN_WORDS} are needed")

    columns = np.array(confidences), np.array(right, float), np.ones(len(right))
    curve = Calibration.fit(*columns)
    bins, error = reliability(*columns)
    lowest_share = 1 / (len(right) + 2)  # no word is certainly right, or certainly wrong
    points = [
        [confidence, min(max(accuracy, lowest_share), 1 - lowest_share)]
        for confidence, accuracy in zip(curve.confidences, curve.accuracies, strict=True)
    ]

    rows = [[f"{100 * expected:.1f}", f"{100 * accuracy:.1f}", words] for words, expected, accuracy in bins]
    of_silence = "No word was written for silence"
    if hallucinated:
        calibrated = np.interp(hallucinated, *np.transpose(points))
        of_silence = (f"{100 * calibrated.mean():.1f} % on average for the {len(hallucinated)} words that were written "
                      "for silence")
    return ConfidenceCurve(points, Table(
        CONFIDENCE, ["confidence %", "right %", "words"], rows,
        f"Calibrated on {len(transcripts)} recordings of dev and of silence, and tried on the half that it was not "
        f"fitted on: both differ by {100 * error:.1f} points (expected calibration error). {of_silence}."))
