"""Formats the results of a comparison as a table in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tools.learning.results import SYSTEMS, Length, Results

NAMES = {"sbkit": "sbkit", "stock": "SpeechBrain", "nemo": "NeMo"}
BUSY = 0.05  # share of the cores that others used, above which a run is marked as beside other work
HEAD = ("corpus", "run of", "system", "epochs", "audio, h", "training, min", "wait, min", "dev WER, each seed", "mean",
        "to sbkit", "test WER")


def table(results: Results, corpora: Sequence[str], lengths: Sequence[Length]) -> str:
    """Format a row for each corpus, length and system that has results, followed by notes on how they were made."""
    rows = [row for corpus in corpora for length in lengths for row in _rows(results, corpus, length)]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *_notes(results.of())]) + "\n"


def _rows(results: Results, corpus: str, length: Length) -> Iterator[list[str]]:
    found = {}
    for system in SYSTEMS:
        epochs = results.fitted(corpus, system, length)
        found[system] = [] if epochs is None else results.of(corpus, system, epochs)
    for system, runs in found.items():
        if not runs:
            continue
        runs = sorted(runs, key=lambda run: run["seed"])
        wer = _mean(runs, "dev_wer")
        ours = _mean(found["sbkit"], "dev_wer") if found["sbkit"] else 0.0
        ratio = f"{wer / ours:.1f}x" if ours and system != "sbkit" else ""
        yield [corpus, str(length), NAMES[system], str(runs[0]["epochs"]), f"{runs[0]['audio_hours']:.2f}",
               _minutes(runs, "train_seconds"), _minutes(runs, "wall_seconds"),
               ", ".join(f"{run['dev_wer']:.1f}" for run in runs), f"{wer:.1f} %", ratio,
               f"{_mean(runs, 'test_wer'):.1f} %"]


def _minutes(runs: Iterable[dict[str, Any]], key: str) -> str:
    """The median, which a run beside other work leaves as it is."""
    return f"{statistics.median(run[key] for run in runs) / 60:.1f}"


def _mean(runs: Iterable[dict[str, Any]], key: str) -> float:
    return statistics.mean(run[key] for run in runs)


def _notes(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not runs:
        return
    options = runs[0]["options"]
    yield (f"{options['precision']} on {options['device']}, {options['threads']} threads each"
           f"{', ' + ' '.join(options['keys']) if options['keys'] else ''}; one run at a time.")
    for system in SYSTEMS:
        of = [run for run in runs if run["system"] == system]
        if of:
            versions = ", ".join(f"{name} {version}" for name, version in of[-1]["versions"].items() if version)
            commits = " ".join(sorted({run["commit"] for run in of}))
            yield f"{NAMES[system]}: {of[-1]['parameters'] / 1e6:.2f} M parameters; {versions}; commit {commits}."
    busy = [run for run in runs if (run["others_share"] or 0) > BUSY]
    if busy:
        most = max(run["others_share"] for run in busy)
        yield (f"Beside other work, so their times are unreliable: {len(busy)} of {len(runs)} runs (others took up to "
               f"{100 * most:.0f} % of the cores).")
