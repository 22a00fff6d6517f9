"""SIGTERM on the card: a checkpoint, and the weights that a run has which was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.doctor.gpu import brains

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench

SIGTERM_CODE = 143


def check(bench: Bench) -> None:
    """On the first card, and on the second where there is one."""
    whole = bench.folder / "whole"
    bench.needed(_train(bench, whole, bench.device))
    code, apart = _stopped(bench, "first", bench.device, whole)
    bench.found("stops", f"exit code {code}", code == SIGTERM_CODE)
    bench.found("exact", _words(apart), not apart)
    if apart:
        again = bench.folder / "again"
        bench.needed(_train(bench, again, bench.device))
        bench.note(f"two runs that were never stopped: {_words(bench.call(differing, again, whole))}")
    bench.stand_in("the CPU again in the place of cuda:1")
    if bench.cards > 1:
        code, apart = _stopped(bench, "second", bench.size("cuda:1", "cpu"), whole)
        bench.found("second", f"exit code {code}, {_words(apart)}", code == SIGTERM_CODE and not apart)


def _train(bench: Bench, folder: Path, device: str) -> list[str]:
    return bench.run("flagship", folder, epochs=2, device=device, brain=f"!name:{brains.__name__}.Watched")


def _stopped(bench: Bench, name: str, device: str, whole: Path) -> tuple[int, list[str]]:
    """The code of a run that is stopped, and the weights in which it differs from the whole one, once resumed."""
    folder = bench.folder / name
    code = bench.program(_train(bench, folder, device), **{brains.STOP_AT: "3"}).code
    bench.needed(_train(bench, folder, device))
    return code, bench.call(differing, folder, whole)


def differing(one: Path, other: Path) -> list[str]:
    """Names of weights that differ in any bit."""
    import torch

    first, second = (torch.load(newest(folder) / "model.ckpt", map_location="cpu", weights_only=True)
                     for folder in (one, other))
    return [name for name in first if not torch.equal(first[name], second[name])]


def newest(run: Path) -> Path:
    """The checkpoint at the end of the run."""
    return max((run / "save").glob("CKPT+*"), key=lambda path: path.stat().st_mtime_ns)


def _words(apart: list[str]) -> str:
    return f"{len(apart)} weights differ, the first {apart[0]}" if apart else "equal"
