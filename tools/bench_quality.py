#!/usr/bin/env python3
"""Word error rate after the same minutes: sbkit and stock SpeechBrain, the same model and corpus, several seeds.

    python tools/bench_quality.py [--minutes 6] [--seeds 1,2,3] [--data FOLDER] [--json FILE] [--key value ...]

Both sides are those of bench_train.py. Their learning rate warms up and falls to nothing with
the clock, so that each makes the most of its minutes. Reading audio, batching and loading are in them; starting,
preparing and scoring are not. sbkit trains as its YAML says, SpecAugment and intermediate CTC included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_train


class Clock:
    """A ``sbkit.train.schedule.Schedule`` by the share of the time that is over."""

    def __init__(self, peak: float, seconds: float, warmup: float = 0.1):
        self.peak, self.seconds, self.warmup, self.total_steps = peak, seconds, warmup, 1
        self.began = None

    def done(self) -> float:
        self.began = self.began or time.perf_counter()
        return (time.perf_counter() - self.began) / self.seconds

    def apply(self, optimizer, step: int) -> None:
        done = self.done()
        rate = self.peak * max(0.0, min(done / self.warmup, (1 - done) / (1 - self.warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="bf16", help="of both; bf16 is stock's faster one where the CPU has it")
    parser.add_argument("--data", help="a corpus (default: the demo corpus)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.side:
        print(json.dumps(work(args, rest)), flush=True)
        return
    found: dict[str, list[dict]] = {"stock": [], "sbkit": []}
    with tempfile.TemporaryDirectory() as folder:
        more = ["--data_folder", args.data] if args.data else []
        more += ["--output_folder", str(Path(folder) / "run")]
        overrides = bench_train.prepare([*rest, *more])
        for seed in args.seeds.split(","):
            for side, results in found.items():
                command = [sys.executable, __file__, "--side", side, "--device", args.device, "--minutes",
                           str(args.minutes), "--precision", args.precision, *overrides, "--seed", seed]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
                print(f"seed {seed} {side}: {results[-1]}", file=sys.stderr)
    print(show(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def work(args: argparse.Namespace, rest: list[str]) -> dict:
    """Train one side until its time is over; then score."""
    from sbkit.recipe import arguments, load

    answer, sys.stdout = sys.stdout, sys.stderr
    if args.side == "sbkit" and args.device == "cpu":
        from sbkit.train.memory import keep_freed_memory

        keep_freed_memory()
    request = arguments.parse([str(bench_train.RECIPE), "--device", args.device, "--precision", args.precision, *rest])
    hparams = load.load(request.path, request.overrides | {"ckpt_interval_minutes": 0})
    hparams["schedule"] = clock = Clock(hparams["lr"], 60 * args.minutes)
    side = bench_train.SIDES[args.side](hparams, request)
    audio = 0.0
    while clock.done() < 1:
        audio += side.epoch()
    sys.stdout = answer
    return {"wer": side.word_errors(), "epochs": audio / side.epoch_seconds, "steps": side.brain.optimizer_step}


def show(found: dict[str, list[dict]]) -> str:
    from sbkit.console import table

    rows = [[side, f"{statistics.mean(each['wer'] for each in results):.2f}",
             " ".join(f"{each['wer']:.2f}" for each in results),
             f"{statistics.mean(each['epochs'] for each in results):.1f}"] for side, results in found.items()]
    return table(["side", "mean WER %", "each seed", "epochs"], rows)


if __name__ == "__main__":
    main()
