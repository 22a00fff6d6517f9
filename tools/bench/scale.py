"""Seconds and private memory that a rank needs to start and to resume on a corpus of many rows.

    python -m tools.bench.scale [--rows 2000000,20000000] [--parts 1] [--folder DIR] [--json FILE]

For each size, a training manifest with rows like Common Voice's and a tokenizer are written. A process then does what
rank 0 does before training: it reads the manifest, checks the tokenizer, makes the plan, and finds the rows of its
first micro-batch, and, like a rank that resumes, those of a step in the middle of the third epoch. A process that it
forks reads rows like a data worker. Memory is what Linux counts as private (pages that the process has written) and the
peak, which includes the pages of a mapped file that all processes share. Seconds are CPU time, so that other processes
change little; time for the disk is not included. The last column extrapolates from the last two sizes: seconds by the
exponent, which is the slope on logarithmic axes, memory on a straight line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

TARGET = 200_000_000
_BLOCK = 2_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", default="2000000,20000000")
    parser.add_argument("--parts", type=int, default=1, help="number of corpora in a mixture, with different shares")
    parser.add_argument("--folder", type=Path, help="where corpora are written; by default a temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--do", choices=("write", "rank"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.do:
        print(json.dumps({"write": write, "rank": rank}[args.do](args.folder, int(args.rows), args.parts)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rows in map(int, args.rows.split(",")):
            folder = (args.folder or Path(scratch)) / str(rows)
            found[rows] = {**ask("write", folder, rows, args.parts), **ask("rank", folder, rows, args.parts)}
            print(rows, found[rows], file=sys.stderr)
    print(show(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def ask(what: str, folder: Path, rows: int, parts: int) -> dict[str, float]:
    """Do it in a separate process."""
    command = [sys.executable, "-m", "tools.bench.scale", "--do", what, "--folder", str(folder), "--rows", str(rows),
               "--parts", str(parts)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def write(folder: Path, rows: int, parts: int) -> dict[str, float]:
    """Write a manifest of this many rows, in this many parts of about the same size."""
    import pyarrow as pa

    from sbkit.data.manifest import Column, Manifest, join
    from sbkit.data.tokens import Tokenizer

    rng = np.random.default_rng(0)
    number = pa.array(np.arange(rows)).cast(pa.large_string())
    sentences = Column([" ".join(words) for words in rng.choice(["candle", "opens", "old", "window"], (5000, 8))])
    speakers = Column([rng.bytes(32).hex() for _ in range(5000)])
    manifest = Manifest(
        ids=join("common_voice_en_", number), durations=rng.gamma(4.0, 1.3, rows).clip(0.5, 20).astype(np.float32),
        wavs=join("/data/common-voice/en/clips/common_voice_en_", number, ".mp3"),
        texts=sentences.take(rng.integers(0, 5000, rows)), speakers=speakers.take(rng.integers(0, 5000, rows)),
        meta={"corpus": Column([f"part{i}" for i in range(parts)]).take(np.arange(rows) * parts // rows)})
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(folder, model_type="char", character_coverage=1.0).prepare(manifest.texts)
    began = time.process_time()
    manifest.write_prepared(folder / "train.csv")
    return {"write s": time.process_time() - began, "file GB": sum(
        path.stat().st_size for path in folder.iterdir()) / 1e9}


def rank(folder: Path, rows: int, parts: int) -> dict[str, float]:
    """What a rank does until it has its first micro-batch, and one that resumes."""
    from sbkit.data.manifest import Manifest
    from sbkit.data.plan import Batching, Plan
    from sbkit.data.tokens import Tokenizer

    (folder / "few.csv").write_text("ID,duration,wav,wrd\n" + 9 * "a,1,a.wav,a\n")
    Plan.of(Manifest.read(folder / "few.csv"), Batching(max_batch_seconds=9), None, 1)  # imports all
    bare, found = own(), dict[str, float]()

    began = [time.process_time()]

    def took(what: str) -> None:
        began.append(time.process_time())
        found[f"{what} s"] = began[-1] - began[-2]
        found[f"{what} GB"] = own() - bare

    train = Manifest.open_prepared(folder / "train.csv")
    took("manifest")
    tokenizer = Tokenizer(folder, model_type="char", character_coverage=1.0)
    tokenizer.prepare(train.texts)
    assert not tokenizer.coverage(train.texts)
    took("tokenizer")
    train.shares = {f"part{i}": (1 + i % 7) / parts for i in range(parts)} if parts > 1 else {}
    plan = Plan.of(train, Batching(max_batch_seconds=500, step_seconds=4000), None, 10, 0.16)
    took("plan")
    epoch = plan.epoch(1)
    epoch.share(0, 3, 8)
    took("epoch")
    del epoch
    epoch = plan.epoch(3)
    share = epoch.share(len(epoch) // 2, 3, 8)
    took("resumed")
    read = [train.row(int(i)).id for i in share[0]]
    assert len(set(read)) == len(share[0])
    found["peak GB"] = field("status", "VmHWM")
    found["worker GB"] = worker(train, epoch)
    return found


def worker(train: Any, epoch: Any) -> float:  # a Manifest and an EpochPlan
    """GB that a forked process makes its own by reading the rows of a thousand micro-batches."""
    out, into = os.pipe()
    if not os.fork():
        for step in range(1000):
            for i in epoch.share(step % len(epoch), step % 8, 8)[0]:
                train.row(int(i))
        os.write(into, str(own()).encode())
        os._exit(0)
    os.wait()
    return float(os.read(out, 100))


def own() -> float:
    """GB of this process's private pages that were written, since a copy of them would be another's."""
    return field("smaps_rollup", "Private_Dirty")


def field(file: str, name: str) -> float:
    """GB that Linux says of this process."""
    lines = Path(f"/proc/self/{file}").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e9


def show(found: dict[int, dict[str, float]]) -> str:
    """A table with the exponents."""
    from sbkit.system.console import table

    rows = []
    for name in next(iter(found.values())):
        values = [each[name] for each in found.values()]
        exponent, target = "", ""
        if len(values) > 1:
            (x, a), (y, b) = list(zip(found, values, strict=True))[-2:]
            if name.endswith("GB"):  # a part of it is the same at any size
                target = f"{b + (b - a) / (y - x) * (TARGET - y):.1f}"
            elif min(a, b) > 0.01:
                power = math.log(b / a) / math.log(y / x)
                exponent, target = f"{power:.2f}", f"{b * (TARGET / y) ** power:.0f}"
        rows.append([name, *(f"{value:.2f}" for value in values), exponent, target])
    return table(["", *(f"{rows:,}" for rows in found), "exponent", f"at {TARGET:,}"], rows)


if __name__ == "__main__":
    main()
