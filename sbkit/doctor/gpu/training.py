"""Runs of ``sbkit train`` on the corpus of tones, and what their ``metrics.jsonl`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.doctor.gpu.catalogue import MOST_DATA_WAIT
from sbkit.doctor.gpu.corpus import long_corpus
from sbkit.runs.layout import METRICS, TESTED

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench


def flagship(bench: Bench) -> None:
    """Check the flagship recipe, unmodified."""
    _judge(bench, epochs(run_of(bench)))


def large(bench: Bench) -> None:
    """Check joint training with the attention decoder; one epoch takes a minute on a small card."""
    folder = bench.folder / "run"
    bench.needed(bench.run("large", folder, epochs=bench.size(3, 2), data_folder=long_corpus(bench)))
    _judge(bench, epochs(folder))


def run_of(bench: Bench) -> Path:
    """Return the flagship's run, which the first check trains and others reuse."""
    folder = bench.home / "run"
    with bench.alone("run"):
        if not (folder / TESTED).exists():
            bench.needed(bench.run("flagship", folder, epochs=2, data_folder=long_corpus(bench)))
    return folder


def epochs(folder: Path) -> list[dict[str, Any]]:
    """Read what the run recorded at the end of each epoch's training."""
    lines = map(json.loads, (folder / METRICS).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == "epoch" and "train_loss" in line]


def learns(found: list[dict[str, Any]]) -> tuple[bool, str]:
    """Tell whether the loss fell and no step was skipped, and describe it."""
    first, last = found[0]["train_loss"], found[-1]["train_loss"]
    skipped = sum(line["skipped_steps"] for line in found)
    if None in (first, last):
        return False, f"loss is not finite, {skipped} steps skipped"
    return last < first and not skipped, f"{first:.3g} to {last:.3g} in {len(found)} epochs, {skipped} steps skipped"


def _judge(bench: Bench, found: list[dict[str, Any]]) -> None:
    last = found[-1]
    waits = last.get("host_waits_per_step")
    bench.stand_in("waits for a device are only counted on a card")
    bench.measured("waits", "not counted" if waits is None else f"{waits:g} per step", waits == 0)
    share = last["time_shares"]["data"]
    figures = {name: last[name] for name in ("audio_s_per_s", "padding_share", "mfu") if last.get(name) is not None}
    bench.measured("data", f"{100 * share:.1f} %", share < MOST_DATA_WAIT, **last["time_shares"], **figures)
    good, words = learns(found)
    bench.found("learns", words, good)
