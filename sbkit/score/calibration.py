"""Calibration: the word accuracy to expect at a confidence, by isotonic regression on scored utterances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbkit.errors import SbkitError
from sbkit.score.edits import Tokens, count

#: Fewer utterances, in two halves, don't show how accuracy grows with confidence.
MIN_UTTERANCES = 40
_BINS = 5


def word_accuracy(references: Sequence[Tokens], hypotheses: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray]:
    """Compute each utterance's share of right words, 0 to 1, and of how many words: those of the longer text."""
    words = np.array([max(len(ref), len(hyp), 1) for ref, hyp in zip(references, hypotheses, strict=True)], float)
    return 1 - count(references, hypotheses).edits / words, words


@dataclass(frozen=True)
class Calibration:
    """Maps confidences to the word accuracy to expect, which grows with them.

    confidences, accuracies : the curve's knots, with straight lines between them
    lowest : the lowest confidence that was scored; below it nothing is known, so 0 is expected
    """

    confidences: list[float]
    accuracies: list[float]
    lowest: float

    @classmethod
    def fit(cls, confidence: np.ndarray, accuracy: np.ndarray, words: np.ndarray) -> Calibration:
        """Fit the monotone curve with the least squared error over N utterances; one of many words counts more."""
        blocks: list[tuple[float, float, float]] = []  # neighbours out of order are merged: words, confidence, accuracy
        for i in np.argsort(confidence, kind="stable"):
            block = float(words[i]), float(confidence[i]), float(accuracy[i])
            # Equal confidences are one block too, though a mean of equal values may be off by its last bit.
            while blocks and (blocks[-1][2] >= block[2] or blocks[-1][1] >= block[1] - 1e-9):
                one = blocks.pop()
                total = one[0] + block[0]
                block = (total, (one[0] * one[1] + block[0] * block[1]) / total,
                         (one[0] * one[2] + block[0] * block[2]) / total)
            blocks.append(block)
        _, confidences, accuracies = zip(*blocks, strict=True)
        return cls(list(confidences), list(accuracies), float(confidence.min()))

    def __call__(self, confidence: np.ndarray) -> np.ndarray:
        return np.where(confidence < self.lowest, 0.0, np.interp(confidence, self.confidences, self.accuracies))


def reliability(confidence: np.ndarray, accuracy: np.ndarray, words: np.ndarray,
                ) -> tuple[list[tuple[int, float, float]], float]:
    """Fit on each random half of N utterances, apply it to the other, and compare in bins of equal size.

    Returns the utterances of each bin with their expected accuracy and the one found, and the expected calibration
    error: the mean difference of both.
    """
    if len(confidence) < MIN_UTTERANCES:
        raise SbkitError("too-few-utterances", f"only {len(confidence)} utterances have words, too few to measure how "
                         "reliable the confidences are", hint=f"evaluate on {MIN_UTTERANCES} utterances or more")
    halves = np.array_split(np.random.default_rng(0).permutation(len(confidence)), 2)
    expected = np.zeros(len(confidence))
    for fitted, other in (halves, halves[::-1]):
        expected[other] = Calibration.fit(confidence[fitted], accuracy[fitted], words[fitted])(confidence[other])
    parts = np.array_split(np.argsort(expected, kind="stable"), _BINS)
    averages = [np.average([expected[part], accuracy[part]], axis=1, weights=words[part]) for part in parts]
    bins = [(len(part), float(one), float(other)) for part, (one, other) in zip(parts, averages, strict=True)]
    error = np.average(np.abs(np.diff(averages))[:, 0], weights=[words[part].sum() for part in parts])
    return bins, float(error)
