"""How time and memory of a step, and the time of planning, grow with the sizes of batch, model and corpus.

    python -m tools.bench.growth [--device cpu] [--json FILE] [--only length,vocabulary] [--key value ...]

One size grows at a time; the rest is hparams/ctc.yaml. Each point is measured in a separate process: the median time of
several steps on noise, and the peak of memory beyond that before the first step (on a GPU, the allocator's peak). The
exponent is the slope between the last two points on logarithmic axes: 1 is proportional growth. Only attention, which
grows with the square of an utterance's length, may have more.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.harness import RECIPE

#: What grows: its values, and the utterances, the seconds of each and the recipe's keys for one of them.
SWEEPS: dict[str, tuple[list[Any], Callable[[Any], tuple[int, float, dict[str, Any]]]]] = {
    "batch seconds": ([15, 30, 60, 120, 240], lambda v: (int(v / 5), 5.0, {})),
    "utterance length": ([3.75, 7.5, 15, 30, 60], lambda v: (int(120 / v), v, {"corpus.max_duration": 60})),
    "d_model": ([72, 144, 288, 576], lambda v: (12, 5.0, {"d_model": v, "d_ffn": 4 * v})),
    "encoder layers": ([3, 6, 12, 24], lambda v: (12, 5.0, {"num_encoder_layers": v})),
    "vocabulary": ([32, 500, 1000, 5000], lambda v: (12, 5.0, {"token_type": "unigram", "output_neurons": v})),
}
PLAN = [20_000, 200_000, 2_000_000]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", metavar="A,B", help="only these of: " + ", ".join([*SWEEPS, "plan"]))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.point:
        print(json.dumps(point(json.loads(args.point), args.device, rest)))
        return
    wanted = args.only.split(",") if args.only else [*SWEEPS, "plan"]
    found = {name: sweep(name, args.device, rest) for name in SWEEPS if any(word in name for word in wanted)}
    if "plan" in wanted:
        found["utterances planned"] = [ask({"plan": size}, args.device, rest) | {"value": size} for size in PLAN]
    print(show(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def sweep(name: str, device: str, rest: list[str]) -> list[dict[str, Any]]:
    """Measure each value of a sweep."""
    values, sizes = SWEEPS[name]
    rows = []
    for value in values:
        utterances, seconds, keys = sizes(value)
        what = {"utterances": utterances, "seconds": seconds, "keys": keys}
        rows.append(ask(what, device, rest) | {"value": value})
        print(f"{name} {value}: {rows[-1]['seconds']:.3f} s, {rows[-1]['mib']:.0f} MiB", file=sys.stderr)
    return rows


def ask(what: dict[str, Any], device: str, rest: list[str]) -> dict[str, Any]:
    """Measure a point in a separate process."""
    command = [sys.executable, "-m", "tools.bench.growth", "--point", json.dumps(what), "--device", device, *rest]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} failed; its output is above")
    return json.loads(done.stdout.splitlines()[-1])


def point(what: dict[str, Any], device: str, rest: list[str]) -> dict[str, Any]:
    """Measure median seconds and peak MiB of a step, or of planning an epoch."""
    if "plan" in what:
        return plan(what["plan"])
    import torch

    from sbkit.recipe import arguments
    from sbkit.train.memory import step_timing, trials

    keys = [word for key, value in what["keys"].items() for word in (f"--{key}", str(value))]
    request = arguments.parse([str(RECIPE), "--device", device, *keys, *rest])
    with trials.open_trial(request, torch.device(device)) as trial:
        batch = trial.batch(what["utterances"], what["seconds"])
        before = peak_mib()
        measured = step_timing.time_steps(trial.brain.try_batch, batch, torch.device(device))
    mib = measured.peak_bytes / 2**20 if measured.peak_bytes else peak_mib() - before
    return {"seconds": measured.step_seconds, "mib": mib}


def plan(size: int) -> dict[str, Any]:
    """Measure the planning of an epoch for a corpus of this size."""
    import numpy as np

    from sbkit.data.plan import Batching, Plan

    durations = np.random.default_rng(0).gamma(4.0, 1.3, size).clip(0.5, 20).astype(np.float32)
    before, started = peak_mib(), time.perf_counter()
    Plan(durations, Batching(max_batch_seconds=500, step_seconds=4000)).epoch(1)
    return {"seconds": time.perf_counter() - started, "mib": peak_mib() - before}


def peak_mib(device: str = "cpu") -> float:
    """Return the peak of this process's memory, on a GPU of the device's."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux KiB


def slope(rows: list[dict[str, Any]], key: str) -> float:
    """Compute the slope between the last two points on logarithmic axes."""
    (x, a), (y, b) = ((row["value"], max(row[key], 1e-9)) for row in rows[-2:])
    return math.log(b / a) / math.log(y / x)


def show(found: dict[str, list[dict[str, Any]]]) -> str:
    from sbkit.system.console import table

    rows = []
    for name, points in found.items():
        for each in points:
            last = each is points[-1]
            rows.append([name if each is points[0] else "", f"{each['value']:,}", f"{1000 * each['seconds']:.0f}",
                         f"{each['mib']:.0f}", f"{slope(points, 'seconds'):.2f}" if last else "",
                         f"{slope(points, 'mib'):.2f}" if last else ""])
    return table(["what grows", "to", "ms", "MiB", "exponent of time", "of memory"], rows)


if __name__ == "__main__":
    main()
