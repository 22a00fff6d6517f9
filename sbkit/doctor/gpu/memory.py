"""Compares the memory bill of ``sbkit check`` with the measured peak of a few steps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench

NEAR = 0.15
GIB = 2**30


def check(bench: Bench) -> None:
    """Check both recipes."""
    bench.stand_in("a CPU's memory isn't measured")
    for name in ("flagship", "large"):
        bill = _bill(bench.needed(["check", *bench.words(name), "--measure", "--json"]).output)
        planned, peak = bill["weights_bytes"] + bill["batch_bytes"], bill["measured_bytes"]
        said = f"{planned / GIB:.2f} GiB by the bill"
        if peak is None:
            bench.measured(name, said, False)
            continue
        apart = planned / peak - 1
        bench.measured(name, f"{said}, {peak / GIB:.2f} GiB measured: {100 * apart:+.0f} %", abs(apart) <= NEAR,
                       weights_bytes=bill["weights_bytes"], batch_bytes=bill["batch_bytes"], measured_bytes=peak)


def _bill(output: str) -> dict[str, Any]:
    """Parse the values of the bill from the command's output."""
    lines = output.splitlines()
    report = json.loads("\n".join(lines[lines.index("{"):len(lines) - lines[::-1].index("}")]))
    return next(section["values"] for section in report["sections"].values() if "weights_bytes" in section["values"])
