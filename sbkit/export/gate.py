"""Decides which formats may be published: a bundle that differs from the checkpoint is not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.measures import TOLERANCE
from sbkit.export.parity import Comparison, ParityResult
from sbkit.export.parity_report import table

#: Allowed increase of the WER by 8-bit weights: in points, or relative to the WER if that is more.
INT8_POINTS = 1.0
INT8_SHARE = 0.1
#: The largest difference of an output that rounding can cause.
_ROUNDING = 0.1
#: Clips with other words that a message names.
_MAX_NAMED = 3


@dataclass(frozen=True)
class Failure:
    """Why a format may not be published."""

    format: str
    reason: str
    clips: str = ""
    """Which clips show it. Only the terminal says so: a bundle may be published where its test set may not."""
    graph: str = ""
    """The further graph, and the mode of running it, that fails; empty for the model's own graph."""

    @property
    def public_reason(self) -> str:
        """Say why, for a bundle's own files."""
        return f"{self.graph}, {self.format}: {self.reason}" if self.graph else self.reason

    def __str__(self) -> str:
        place = f"{self.graph}, {self.format}" if self.graph else self.format
        clips = f" ({self.clips})" if self.clips else ""
        return f"{place}: {self.reason}{clips}"


def failures(comparison: Comparison, tolerance: float = TOLERANCE, batching: bool = True) -> list[Failure]:
    """Judge all formats of the model and of its further graphs.

    batching : whether the model runs in batches; its further graphs always do
    """
    found = []
    for companion in comparison.companion_modes:
        found += [replace(failure, graph=companion.title) for failure in failures(companion.comparison, tolerance)]
    for result in comparison.results:
        found += _failures_of(result, comparison, tolerance, batching)
    return found


def _failures_of(result: ParityResult, comparison: Comparison, tolerance: float, batching: bool) -> list[Failure]:
    if result.format == layout.INT8:  # 8-bit weights change outputs, so only the words are judged
        judged = [_int8_failure(result, comparison)]
    else:
        judged = [_output_failure(result, comparison, tolerance, batching), _word_failure(result, comparison)]
    return [failure for failure in judged if failure is not None]


def _int8_failure(result: ParityResult, comparison: Comparison) -> Failure | None:
    """Judge words by transcripts if there are some, otherwise by the reference's words."""
    base_wer = comparison.of_reference.wer
    wer = result.wer
    if base_wer is None or wer is None:
        base_wer = 0.0
        wer = result.wer_of_checkpoint
    if wer - base_wer <= max(INT8_POINTS, INT8_SHARE * base_wer):  # false for NaN
        return None
    rate = "WER" if comparison.words is None else comparison.words.rate
    return Failure(result.format, f"{rate} {wer:.2f} % where {comparison.reference.title} has {base_wer:.2f} %")


def _output_failure(result: ParityResult, comparison: Comparison, tolerance: float, batching: bool) -> Failure | None:
    worst = result.worst if batching else result.difference
    if worst is None:  # a program that outputs only words
        return None
    measure = comparison.measure
    allowed = measure.allowed(tolerance)
    if worst.size <= allowed:  # false for NaN
        return None
    return Failure(result.format, f"{measure.what} differ by {measure.shown(worst.size)}, but only "
                                  f"{measure.shown(allowed)} is allowed", worst.where)


def _word_failure(result: ParityResult, comparison: Comparison) -> Failure | None:
    if result.words_changed <= result.max_changed:
        return None
    names = ", ".join(result.changed[:_MAX_NAMED])
    if result.words_changed > _MAX_NAMED:
        names += ", ..."
    return Failure(result.format,
                   f"{result.words_changed} of {len(comparison.texts)} clips have different words", names)


def refuse_if_any(found: list[Failure], comparison: Comparison) -> None:
    """Print the table and raise ``SbkitError`` with the failures, if there are any."""
    if not found:
        return
    print(f"compared on {comparison.clips}:\n{table(comparison)}", flush=True)
    reasons = "".join(f"\n  {failure}" for failure in found)
    raise SbkitError("parity-failed",
                     f"the bundle does not match {comparison.reference.title}, so nothing was published:{reasons}",
                     hint=advice(comparison))


def advice(comparison: Comparison) -> str | None:
    """Suggest better clips than noise, or a tolerance if the words are the same and outputs differ a little."""
    if comparison.clips.hint:
        return comparison.clips.hint
    results = [result for result in comparison.results if result.format != layout.INT8]
    largest = max((result.worst.size for result in results if result.worst is not None), default=0.0)
    same_words = comparison.words is not None and not any(result.changed for result in results)
    if same_words and TOLERANCE < largest <= _ROUNDING:
        return f"all words are the same, so --tolerance {2 * largest:.2g} may be good enough"
    return None
