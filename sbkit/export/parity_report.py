"""Shows a comparison: its table, what parity.json has of it, and which clips have other words."""

from __future__ import annotations

from typing import Any

from sbkit.export.measures import Difference
from sbkit.export.parity import Comparison, ParityResult
from sbkit.recipe.report import listed
from sbkit.system import disk
from sbkit.system.console import table as aligned

#: Clips with other words that a line names.
_MAX_NAMED = 5


def facts(comparison: Comparison) -> dict[str, Any]:
    """Return the contents of parity.json."""
    lengths = sorted(len(clip.signal) / comparison.sample_rate for clip in comparison.clips.alone)
    clips = {
        "origin": comparison.clips.origin,
        "count": len(lengths),
        "seconds": round(sum(lengths), 2),
        "shortest": round(lengths[0], 3),
        "longest": round(lengths[-1], 2),
        "longest_in_training": round(comparison.clips.longest, 2),
    }
    graphs = {graph: {mode: formats(companion) for mode, companion in modes.items()}
              for graph, modes in comparison.companions.items()}
    return {"clips": clips, "formats": formats(comparison), **graphs}


def formats(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Return the figures of the reference and of each format, without names of clips: a bundle may be published where
    its test set may not."""
    return {result.format: _figures(result) for result in _rows_of(comparison)}


def _figures(result: ParityResult) -> dict[str, Any]:
    return {
        "bytes": result.bytes,
        "difference": _size(result.difference),
        "batch_difference": _size(result.batch_difference),
        "words_changed": result.words_changed,
        "wer": result.wer,
        "wer_of_checkpoint": result.wer_of_checkpoint,
        "rtf": result.rtf,
        "words_joined": result.words_joined,
    }


def _size(difference: Difference | None) -> float | None:
    return None if difference is None else difference.size


def _rows_of(comparison: Comparison) -> list[ParityResult]:
    """The reference's result, and those of all formats."""
    return [comparison.of_reference, *comparison.results]


def changed_clips(comparison: Comparison) -> str:
    """Write a line for each format whose words differ, with the names of these clips: for the terminal alone."""
    return "".join(f"{name}: other words in {listed(result.changed, _MAX_NAMED)}\n"
                   for name, result in _named_results(comparison) if result.changed)


def joined_words(comparison: Comparison) -> str:
    """Name the programs whose words were joined; empty if there are none."""
    programs = [f"{name} in {result.words_joined} of {len(comparison.texts)} clips"
                for name, result in _named_results(comparison) if result.words_joined]
    if not programs:
        return ""
    return ("joined: for a program that decodes by itself no pause ends a word, so it writes two as one if the "
            f"model doesn't mark the second's start: {', '.join(programs)}\n")


def _named_results(comparison: Comparison) -> list[tuple[str, ParityResult]]:
    """Return all formats' results with the names of the formats, graphs and modes."""
    named = [(result.format, result) for result in comparison.results]
    for companion in comparison.companion_modes:
        named += [(f"{companion.title}, {result.format}", result) for result in companion.comparison.results]
    return named


def table(comparison: Comparison) -> str:
    """Write a row for the reference and each format, of the model and of its further graphs."""
    rows = _rows(comparison)
    for companion in comparison.companion_modes:
        rows += _rows(companion.comparison, f"{companion.title}, ")

    columns = ["format", "size", "max difference"]
    if comparison.words is not None:
        columns += ["clips changed", f"{comparison.words.rate} %"]
    else:
        rows = [[*row[:3], row[-1]] for row in rows]
    return aligned([*columns, "real-time factor"], rows)


def _rows(comparison: Comparison, before: str = "") -> list[list[object]]:
    rows: list[list[object]] = []
    batchable = comparison.is_batchable()
    for result in _rows_of(comparison):
        worst = result.worst if batchable else result.difference
        if result is comparison.of_reference:  # which has none from itself
            worst = None
        changed = f"{result.words_changed} ({result.words_joined} joined)"
        rows.append([
            before + result.format,
            None if result.bytes is None else disk.size(result.bytes),
            None if worst is None else comparison.measure.shown(worst.size),
            changed if result.words_joined else result.words_changed,
            result.wer,
            f"{result.rtf:.4f}",
        ])
    return rows
