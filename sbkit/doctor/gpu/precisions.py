"""The flagship in each precision, compiled, and with CUDA graphs: short runs that must learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sbkit.doctor.gpu.bench import ProgramFailed
from sbkit.doctor.gpu.training import epochs, learns

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench

MOST_SKIPPED = 3
#: How far the last epoch's loss of a compiled run may be from that of the uncompiled run.
APART = 0.1


def check(bench: Bench) -> None:
    """Check each way in turn; a failure does not stop the others."""
    bench.stand_in("torch.compile runs what it is given as it is: a compiler on a CPU takes minutes")
    found = {}
    ways = {
        "bf16": ["--precision", "bf16"],
        "fp16": ["--precision", bench.size("fp16", "bf16"), *_long(bench)],
        "compile": ["--precision", "bf16", "--compile"],
        "graphs": ["--precision", "bf16", "--compile", "--compile_mode", "reduce-overhead"],
    }
    bench.stand_in("bf16 in place of fp16, which a CPU can't train in")
    for name, words in ways.items():
        folder = bench.folder / name
        try:
            bench.needed(bench.run("flagship", folder, *words, epochs=bench.size(4, 2)))
        except ProgramFailed as failed:
            bench.found(name, str(failed), False)
            continue
        found[name] = epochs(folder)
        _judge(bench, name, found)


def _long(bench: Bench) -> list[str]:
    seconds = str(bench.size(2000, 8))
    return ["--max_batch_seconds", seconds, "--step_seconds", seconds, "--number_of_epochs", str(bench.size(10, 2))]


def _judge(bench: Bench, name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    lines = found[name]
    good, words = learns(lines)
    speed = {"audio_s_per_s": lines[-1]["audio_s_per_s"]}
    if name == "fp16":
        skipped = [line["skipped_steps"] for line in lines]
        falls = None not in (lines[0]["train_loss"], lines[-1]["train_loss"]) and \
            lines[-1]["train_loss"] < lines[0]["train_loss"]
        bench.found(name, words, falls and skipped[0] <= MOST_SKIPPED and not any(skipped[1:]), **speed)
    elif name == "bf16":
        bench.found(name, words, good, **speed)
    else:
        late = sum(line.get("graphs_compiled", 0) for line in lines[1:])
        apart = abs(lines[-1]["train_loss"] / found["bf16"][-1]["train_loss"] - 1) if "bf16" in found else None
        seen = f"{late} graphs after the first epoch; {words}" + (
            f"; {100 * apart:.1f} % from bf16 without" if apart is not None else "")
        bench.found(name, seen, good and not late and apart is not None and apart < APART, **speed)
