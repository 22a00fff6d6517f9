"""Two ranks: one of them fails, their weights are equal, and communication overlaps with the backward."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import brains
from .bench import Program, ProgramFailed
from .runs import epochs

if TYPE_CHECKING:
    from .bench import Bench

END_SECONDS, PATIENCE = 10.0, 40.0
LOSS_APART = 0.01
MIN_OVERLAP = 0.5
#: Dropped weights and masks differ per rank; without them a run is the same on any number of devices.
EXACT: dict[str, Any] = {"dropout": 0.0, "spec_augment": "null", "precision": "fp32"}


def check(bench: Bench) -> None:
    """Check a trace of the large model, an epoch on one and on two cards, and a failure; a dry run over gloo."""
    _overlap(bench)
    one, two = _epochs(bench)
    difference = abs(two - one) / max(one, 1e-9)  # a fake GPU loses nothing
    bench.found("same", f"{one:.5g} and {two:.5g}, {100 * difference:.2f} % apart", difference < LOSS_APART,
                one=one, two=two)
    _fails(bench)


def _flagship(bench: Bench, folder: Path) -> list[str]:
    return bench.run("flagship", folder, epochs=1, hours=0.25, device=bench.size("cuda", "cpu"), **EXACT,
                     brain=f"!name:{brains.__name__}.Watched")


def _ranks(bench: Bench, words: list[str], folder: Path, patience: float = 1e9, **environment: str) -> list[Program]:
    """Run one command as both ranks; each uses the card of its number."""
    notes = folder.parent / f"{folder.name}-notes"
    notes.mkdir()
    loopback = bench.size({}, {"GLOO_SOCKET_IFNAME": "lo"})
    return bench.programs([words] * 2, ranks=True, patience=patience,
                          **{brains.NOTES: str(notes)}, **loopback, **environment)


def _fails(bench: Bench) -> None:
    folder = bench.folder / "fails"
    done = _ranks(bench, _flagship(bench, folder), folder, patience=PATIENCE + 60, **{brains.FAIL_AT: "2"})
    mark = folder.parent / "fails-notes" / "failed"
    if not mark.exists():
        bench.found("fails", f"rank 1 never reached its failure: {done[1].last_line()}", False)
        return
    late = max(each.at for each in done) - float(mark.read_text())
    reported = any("rank 1 was asked to fail here" in each.output for each in done)
    good = late <= END_SECONDS and reported and all(each.code for each in done)
    bench.found("fails", f"all ended after {late:.1f} s, codes {done[0].code} and {done[1].code}"
                + ("" if reported else ", without the error's message"), good, seconds=late)


def _epochs(bench: Bench) -> tuple[float, float]:
    """Compute the training losses on one card and on two."""
    bench.needed(bench.run("flagship", bench.folder / "one", epochs=1, hours=0.25, **EXACT))
    two = bench.folder / "two"
    _succeeded(_ranks(bench, _flagship(bench, two), two))
    digests = {path.read_text() for path in (bench.folder / "two-notes").glob("weights-*")}
    bench.found("equal", "equal" if len(digests) == 1 else "they differ", len(digests) == 1)
    return epochs(bench.folder / "one")[-1]["train_loss"], epochs(two)[-1]["train_loss"]


def _succeeded(done: Sequence[Program]) -> None:
    for rank, each in enumerate(done):
        if each.code:
            raise ProgramFailed(f"rank {rank} ended with code {each.code}: {each.last_line()}")


def _overlap(bench: Bench) -> None:
    folder = bench.folder / "traced"
    words = bench.run("large", folder, "--profile_training", "--profile_warmup", "2", "--profile_steps", "2", epochs=1,
                      device=bench.size("cuda", "cpu"))
    _succeeded(_ranks(bench, words, folder))
    traces = sorted((folder / "profiler_logs").glob("*.json"))
    comm, beside = overlap(json.loads(traces[0].read_text(encoding="utf-8"))["traceEvents"])
    share = beside / comm if comm else 0.0
    bench.measured("overlap", f"{100 * share:.0f} % of {comm / 1e3:.1f} ms", share >= MIN_OVERLAP,
                   communication_ms=comm / 1e3, beside_ms=beside / 1e3)


Span = tuple[float, float]


def overlap(events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Compute microseconds of communication in a trace, and how many of them other kernels overlap."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    kind = "kernel" if any(event.get("cat") == "kernel" for event in timed) else "cpu_op"
    comm, other = [], []
    for event in timed:
        if event.get("cat") in (kind, "user_annotation") and _communicates(event["name"]):
            comm.append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat") == kind:
            other.append((event["ts"], event["ts"] + event["dur"]))
    comm, other = union(comm), union(other)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in comm for b in other if b[0] < a[1] and a[0] < b[1])
    return sum(end - start for start, end in comm), both


def _communicates(name: str) -> bool:
    return "ncclDevKernel" in name or "ncclKernel" in name or name.startswith("gloo:")


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap.

    >>> union([(4, 5), (0, 2), (1, 3)])
    [(0, 3), (4, 5)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
