"""Measures how a format's outputs differ from the reference's: by how much, where, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbkit.export.clips import Clip
from sbkit.export.runners import Output

#: The largest difference of an output, for formats that compute in fp32.
TOLERANCE = 1e-3
#: Two labels score alike if their log-probabilities differ by no more than this: rounding decides between them.
_TIE = 1e-4


@dataclass(frozen=True)
class Difference:
    """The largest difference of outputs from the reference's, and the clip, output and frame that has it."""

    size: float
    where: str


class OutputMeasure:
    """Measures outputs by the largest absolute difference of a number.

    A task whose outputs are compared otherwise derives its own.

    what : what the outputs are, for messages
    names : the outputs' names if there are several; each clip then has a tuple of arrays
    """

    def __init__(self, what: str = "outputs", names: Sequence[str] = ()):
        self.what = what
        self.names = names

    def largest(self, expected: Sequence[Output], outputs: Sequence[Output]) -> float:
        """Return the largest difference in all clips; infinity for other shapes or numbers that aren't finite."""
        largest = 0.0
        for expected_output, output in zip(expected, outputs, strict=True):
            for expected_array, array in zip(arrays_of(expected_output), arrays_of(output), strict=True):
                if expected_array.shape != array.shape:
                    return float("inf")
                if not (np.isfinite(expected_array).all() and np.isfinite(array).all()):
                    return float("inf")
                if expected_array.size:
                    largest = max(largest, float(np.abs(expected_array - array).max()))
        return largest

    def allowed(self, tolerance: float) -> float:
        """Return the largest difference that passes, if the user asked for ``tolerance``."""
        return tolerance

    def shown(self, difference: float) -> str:
        """Format a difference, for tables and messages."""
        return f"{difference:.2g}"

    def is_undecided(self, expected: Output) -> bool:
        """Whether the two best labels of some frame of [T, V] score alike within the tolerance of outputs.

        A program that outputs only words may have decided otherwise there.
        """
        two_best = np.partition(expected, -2)[:, -2:]
        return bool((two_best[:, 1] - two_best[:, 0] <= TOLERANCE).any())

    def is_tied(self, expected: Output, output: Output) -> bool:
        """Whether the best labels [T] differ, and only in frames where the reference scores both alike.

        If the labels are the same, other words have another cause, so that is no tie.
        """
        scores = arrays_of(expected)[0]
        exported_scores = arrays_of(output)[0]
        if scores.shape != exported_scores.shape:
            return False
        labels = scores.argmax(-1)
        exported_labels = exported_scores.argmax(-1)
        if (labels == exported_labels).all():
            return False

        score_of_best = np.take_along_axis(scores, labels[..., None], -1)
        score_of_exported = np.take_along_axis(scores, exported_labels[..., None], -1)
        return bool((score_of_best - score_of_exported <= _TIE).all())


class ThresholdMeasure(OutputMeasure):
    """Measures the scores [N] of a model that gives a recording several labels: those that reach their thresholds.

    thresholds : the score from which each label is a result
    """

    def __init__(self, thresholds: Sequence[float], names: Sequence[str] = ()):
        super().__init__(names=names)
        self._thresholds = np.asarray(thresholds)

    def is_tied(self, expected: Output, output: Output) -> bool:
        """Whether labels differ only where the reference's score is almost the threshold."""
        scores = arrays_of(expected)[0]
        exported_scores = arrays_of(output)[0]
        if scores.shape != exported_scores.shape:
            return False
        changed = (scores >= self._thresholds) != (exported_scores >= self._thresholds)
        return bool((np.abs(scores - self._thresholds)[changed] <= _TIE).all())


def arrays_of(output: Output) -> tuple[np.ndarray, ...]:
    """Return the arrays of a clip's output, which is one or a tuple of several."""
    return output if isinstance(output, tuple) else (output,)


def locate(clips: Sequence[Clip], expected: Sequence[Output], outputs: Sequence[Output], names: Sequence[str],
           reference_title: str) -> str:
    """Say in which clip, output and frame outputs differ most, or the first place that can't be compared.

    names : of the outputs, if there are several
    reference_title : what messages call the reference
    """
    largest = 0.0
    where = ""
    for clip, expected_output, output in zip(clips, expected, outputs, strict=True):
        pairs = zip(arrays_of(expected_output), arrays_of(output), strict=True)
        for number, (expected_array, array) in enumerate(pairs):
            place = f"{clip.name}, {names[number]}" if names else clip.name
            obstacle = _obstacle(expected_array, array, reference_title)
            if obstacle is not None:
                return f"{place}: {obstacle}"

            differences = np.abs(np.subtract(expected_array, array, dtype=np.float64))
            if not differences.size or differences.max() <= largest:
                continue
            largest = float(differences.max())
            index = np.unravel_index(differences.argmax(), differences.shape)
            frame = f", frame {index[0]} of {len(expected_array)}" if index else ""
            where = f"{place}{frame}: {array[index]:.4g} where {reference_title} has {expected_array[index]:.4g}"
    return where


def _obstacle(expected: np.ndarray, array: np.ndarray, reference_title: str) -> str | None:
    """Say why two arrays can't be compared: by their shapes, or by numbers that aren't finite."""
    if expected.shape != array.shape:
        return f"{list(array.shape)} where {reference_title} has {list(expected.shape)}"
    for owner, values in (("", np.atleast_1d(array)), (f"{reference_title}'s is ", np.atleast_1d(expected))):
        not_finite = np.argwhere(~np.isfinite(values))
        if len(not_finite):
            first = tuple(not_finite[0])
            kind = "not a number (NaN)" if np.isnan(values[first]) else "infinite"
            return f"{owner}{kind} from frame {first[0]} of {len(values)} on"
    return None
