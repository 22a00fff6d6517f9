"""SIGTERM on the card: a checkpoint is saved, and resuming gives the weights of a run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.doctor.gpu import brains

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench

SIGTERM_CODE = 143
#: Tolerance, as a multiple of the difference between two runs that were never stopped.
AS_FAR = 5.0


def check(bench: Bench) -> None:
    """Check on the first card, and on the second if there is one."""
    whole = bench.folder / "whole"
    bench.needed(_train(bench, whole, bench.device))
    code, far = _stopped(bench, "first", bench.device, whole)
    bench.found("stops", f"exit code {code}", code == SIGTERM_CODE)
    most = _most(bench, whole) if far else 0.0
    bench.found("exact", _words(far), far <= most, apart=far, most=most)
    bench.stand_in("the CPU again in place of cuda:1")
    if bench.cards > 1:
        code, far = _stopped(bench, "second", bench.size("cuda:1", "cpu"), whole)
        bench.found("second", f"exit code {code}, {_words(far)}", code == SIGTERM_CODE and far <= most)


def _most(bench: Bench, whole: Path) -> float:
    """The tolerance for weights on a device with nondeterministic sums, measured from two unstopped runs."""
    again = bench.folder / "again"
    bench.needed(_train(bench, again, bench.device))
    usual = bench.call(apart, again, whole)
    bench.note(f"two runs that were never stopped: {_words(usual)}")
    return AS_FAR * usual


def _train(bench: Bench, folder: Path, device: str) -> list[str]:
    return bench.run("flagship", folder, epochs=2, device=device, brain=f"!name:{brains.__name__}.Watched")


def _stopped(bench: Bench, name: str, device: str, whole: Path) -> tuple[int, float]:
    """Stop and resume a run; returns its exit code, and how far its weights are from the unstopped run's."""
    folder = bench.folder / name
    code = bench.program(_train(bench, folder, device), **{brains.STOP_AT: "3"}).code
    bench.needed(_train(bench, folder, device))
    return code, bench.call(apart, folder, whole)


def apart(one: Path, other: Path) -> float:
    """Compute the largest difference between weights of two runs; 0 means equal to the bit."""
    import torch

    first, second = (torch.load(newest(folder) / "model.ckpt", map_location="cpu", weights_only=True)
                     for folder in (one, other))
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


def newest(run: Path) -> Path:
    """Find the checkpoint at the end of the run."""
    return max((run / "save").glob("CKPT+*"), key=lambda path: path.stat().st_mtime_ns)


def _words(apart: float) -> str:
    return f"a weight differs by {apart:.1e}" if apart else "equal"
