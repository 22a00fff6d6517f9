#!/usr/bin/env python3
"""Speed of preparing and loading a corpus of MP3s: sbkit against stock SpeechBrain, in turns in the same run.

    python tools/bench_data.py                              makes a corpus of synthesised 48 kHz MP3s first
    python tools/bench_data.py --data /data/cv-corpus/fr    a Common Voice folder
    python tools/bench_data.py --json bench.json --rounds 9

Each row is the median over rounds in which the contenders take turns; the spread is half the interquartile range. Stock
SpeechBrain is used as in its CommonVoice recipes: a header read for each row of the TSV, `read_audio` and a `Resample`
per utterance, `DynamicBatchSampler` with the recipes' 200 buckets, `SaveableDataLoader` with `PaddedBatch`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in a loader's worker

import numpy as np
import soundfile
import torch

from sbkit.data.audio import audio_info, read_utterance, resample
from sbkit.data.corpus import Corpus
from sbkit.data.loader import TrainLoader
from sbkit.data.manifest import Manifest, Utterance
from sbkit.data.plan import Batching, Plan
from sbkit.data.shards import write_shards
from sbkit.system.console import table
from sbkit.system.cores import usable_cores

SAMPLE_RATE = 16_000
#: Settings of DynamicBatchSampler in the CommonVoice recipes.
RECIPE_BUCKETS, RECIPE_SECONDS = 200, 300.0
#: Sizes in utterances of the corpora whose batches are compared.
SIZES = (1_000, 3_000, 10_000, 100_000)
EPOCHS = 4


class Letters:
    """A stand-in tokenizer for both sides: one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 100 + 1 for letter in text]


# ---------------------------------------------------------------- stock SpeechBrain


def stock_row(line: str, clips: str) -> tuple[str, float, str, str, str] | None:
    """Make one row as `common_voice_prepare` does: read the header, clean the text."""
    from speechbrain.dataio.dataio import read_audio_info

    speaker, path, text = (line.split("\t")[i] for i in (0, 1, 3))
    wav = f"{clips}/{path}"
    info = read_audio_info(wav)
    words = re.sub("[^’'A-Za-z0-9À-ÖØ-öø-ÿ]+", " ", unicodedata.normalize("NFKC", text)).upper()
    words = unicodedata.normalize("NFD", words).encode("ascii", "ignore").decode()
    words = re.sub(" +", " ", words.replace("'", " ")).strip()
    if len(words.split()) < 3:
        return None
    return Path(path).stem, info.num_frames / info.sample_rate, wav, speaker, words


def stock_prepare(data: Path, out: Path) -> int:
    """Write the three CSVs, with rows in parallel as in the recipe; returns the number of rows read."""
    from speechbrain.utils.parallel import parallel_map

    total = 0
    for split in ("train", "dev", "test"):
        lines = (data / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]
        total += len(lines)
        with open(out / f"{split}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["ID", "duration", "wav", "spk_id", "wrd"])
            one = functools.partial(stock_row, clips=str(data / "clips"))
            rows = parallel_map(one, lines, progress_bar=False)
            writer.writerows(row for row in rows if row is not None)
    return total


def stock_audio(wav: str) -> torch.Tensor:
    """Read audio as the recipes do."""
    import torchaudio
    from speechbrain.dataio.dataio import read_audio, read_audio_info

    info = read_audio_info(wav)
    return torchaudio.transforms.Resample(info.sample_rate, SAMPLE_RATE)(read_audio(wav))


def stock_sampler(durations: np.ndarray, seconds: float) -> Any:
    from speechbrain.dataio.sampler import DynamicBatchSampler

    return DynamicBatchSampler(durations, seconds, num_buckets=RECIPE_BUCKETS, max_batch_ex=256,
                               lengths_list=durations.tolist())


def stock_loader(manifest: Manifest, seconds: float, workers: int) -> Any:
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.utils.data_pipeline import provides, takes

    @takes("wav")
    @provides("sig")
    def audio(wav: str) -> torch.Tensor:
        return stock_audio(wav)

    @takes("wrd")
    @provides("tokens")
    def text(wrd: str) -> torch.Tensor:
        return torch.LongTensor(Letters().encode(wrd))

    rows = {row.id: {"wav": row.wav, "wrd": row.text, "duration": row.duration} for row in manifest}
    data = DynamicItemDataset(rows, [audio, text], ["id", "sig", "tokens"])
    sampler = stock_sampler(manifest.durations, seconds)
    return SaveableDataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=PaddedBatch)


# ---------------------------------------------------------------- what is measured


class Bench:
    """Collects rows of results that contenders gave in turns."""

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.rows: list[dict[str, Any]] = []

    def turns(self, **contenders: Callable[[], float]) -> dict[str, list[float]]:
        """Call each contender once per round, in reverse order every second round; returns their results."""
        results: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(self.rounds):
            order = list(contenders)[:: 1 if i % 2 == 0 else -1]
            for name in order:
                results[name].append(contenders[name]())
        return results

    def row(self, what: str, unit: str, ours: Sequence[float], other: Sequence[float], against: str,
            target: float | None = None, less_is_better: bool = False) -> None:
        ratios = [b / a if less_is_better else a / b for a, b in zip(ours, other, strict=True)]
        self.rows.append({
            "what": what, "unit": unit, "ours": statistics.median(ours), "other": statistics.median(other),
            "against": against, "ratio": statistics.median(ratios), "spread": spread(ratios), "target": target,
        })
        print(f"  {what}: {self.rows[-1]['ratio']:.2f}x {against}", file=sys.stderr)

    def show(self) -> str:
        cells = [[row["what"], significant(row["ours"]), significant(row["other"]), row["unit"], row["against"],
                  f"{row['ratio']:.2f}x", f"±{row['spread']:.2f}",
                  "" if row["target"] is None else f"{row['target']:g}x",
                  "" if row["target"] is None else "yes" if row["ratio"] >= row["target"] else "NO"]
                 for row in self.rows]
        return table(["", "sbkit", "other", "unit", "against", "ratio", "spread", "target", "met"], cells)


def spread(values: list[float]) -> float:
    low, high = np.percentile(values, [25, 75])
    return float(high - low) / 2


def significant(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def timed(work: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the amount that ``work`` returns per second."""
    start = clock()
    amount = work()
    return amount / (clock() - start)


def bench_prepare(bench: Bench, data: Path) -> None:
    """Measure preparation from TSVs to manifests, with and without the release's list of durations."""
    without = Path(tempfile.mkdtemp(prefix="bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, without)
        os.symlink((data / "clips").absolute(), without / "clips")
        for split in ("train", "dev", "test"):
            shutil.copy(data / f"{split}.tsv", without)

        def ours(source: Path) -> float:
            with tempfile.TemporaryDirectory() as out:
                corpus = Corpus(source, language="en", folder=out)

                def work() -> float:
                    corpus.prepare(show_progress=False)
                    report = json.loads(corpus.report_path.read_text(encoding="utf-8"))
                    return sum(split["rows"] for split in report["splits"].values())

                return timed(work)

        def stock() -> float:
            with tempfile.TemporaryDirectory() as out:
                return timed(lambda: stock_prepare(data, Path(out)))

        contenders = {"ours": lambda: ours(data), "headers": lambda: ours(without), "stock": stock}
        if not (data / "clip_durations.tsv").is_file():
            del contenders["ours"]
        results = bench.turns(**contenders)
    if "ours" in results:
        bench.row("prepare", "rows/s", results["ours"], results["stock"], "stock", 5)
    bench.row("prepare, no clip_durations.tsv", "rows/s", results["headers"], results["stock"], "stock")


def bench_reading(bench: Bench, manifest: Manifest, packed: Manifest) -> None:
    """Measure reading without a loader, in audio seconds per second of CPU time."""
    def reader(one: Callable[[Utterance], object], manifest: Manifest) -> Callable[[], float]:
        rows = list(manifest)

        def work() -> float:
            for row in rows:
                one(row)
            return sum(row.duration for row in rows)

        return lambda: timed(work, time.process_time)

    def decode(row: Utterance) -> None:
        with soundfile.SoundFile(row.wav) as file:
            file.read(dtype="float32")

    def ours(row: Utterance) -> None:
        read_utterance(row.wav, row.start, row.duration)

    results = bench.turns(decode=reader(decode, manifest), ours=reader(ours, manifest),
                          stock=reader(lambda row: stock_audio(row.wav), manifest), shards=reader(ours, packed))
    unit = "audio s / CPU s"
    bench.row("read MP3s", unit, results["ours"], results["stock"], "stock", 1.5)
    bench.row("read MP3s", unit, results["ours"], results["decode"], "decoding alone", 0.75)
    bench.row("read 16-bit PCM from shards", unit, results["shards"], results["stock"], "stock, MP3s", 5)


def bench_loading(bench: Bench, manifest: Manifest, packed: Manifest, seconds: float, workers: int) -> None:
    """Measure whole loaders with worker processes, in audio seconds per second and worker."""
    stock = stock_loader(manifest, seconds, workers)

    def theirs() -> float:
        total = 0.0
        for batch in stock:
            signals, lengths = batch.sig
            total += float(lengths.sum()) * signals.shape[1] / SAMPLE_RATE
        return total

    def ours(rows: Manifest) -> Callable[[], float]:
        loader = TrainLoader(rows, Letters(), Plan(rows.durations, Batching(seconds)), workers=workers)
        next(iter(loader.at(1)))  # its workers start once in a run; stock's start in each epoch
        epochs = iter(range(1, 10_000))

        def work() -> float:
            return sum(batch.seconds for batch in loader.at(next(epochs)))

        return lambda: timed(work) / workers

    results = bench.turns(ours=ours(manifest), shards=ours(packed), stock=lambda: timed(theirs) / workers)
    unit = "audio s / s, worker"
    bench.row("load batches of MP3s", unit, results["ours"], results["stock"], "stock", 1.5)
    bench.row("load batches from shards", unit, results["shards"], results["stock"], "stock, MP3s", 5)


def bench_batches(bench: Bench, durations: np.ndarray) -> None:
    """Compare padding and order with the recipes' batch size on corpora of realistic sizes."""
    for utterances in SIZES:
        compare_batches(bench, like_common_voice(utterances))
    if len(durations) > SIZES[0]:
        compare_batches(bench, durations, "this corpus, ")


def compare_batches(bench: Bench, durations: np.ndarray, whose: str = "") -> None:
    seconds = RECIPE_SECONDS

    def padding(batches: Sequence[list[int]]) -> float:
        computed = sum(float(durations[batch].max()) * len(batch) for batch in batches)
        return 1 - float(durations.sum(dtype=np.float64)) / computed

    plan = Plan(durations, Batching(seconds))
    ours = [[plan.epoch(e).step(i).tolist() for i in range(len(plan))] for e in range(1, EPOCHS + 1)]
    sampler = stock_sampler(durations, seconds)
    stock = [list(sampler) for _ in range(EPOCHS)]  # as Brain.fit does on one device
    size = f"{whose}{len(durations):,} utterances"
    bench.row(f"padding, {size}", "% of computed", [100 * padding(ours[0])], [100 * padding(stock[0])], "stock", 1,
              less_is_better=True)
    bench.row(f"batches, {size}", "an epoch", [len(ours[0])], [len(stock[0])], "stock", less_is_better=True)
    mine, theirs = ([len({str(epoch) for epoch in epochs})] for epochs in (ours, stock))
    bench.row(f"different orders, {size}", f"in {EPOCHS} epochs", mine, theirs, "stock")


PLAN = r"""
import re, sys, time
import numpy as np
durations = np.load(sys.argv[1])
{imports}
start = time.perf_counter()
{work}
print(time.perf_counter() - start, re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
"""
OURS = PLAN.format(imports="from sbkit.data.plan import Batching, Plan",
                   work="Plan(durations, Batching(300)).epoch(1)")
STOCK = PLAN.format(
    imports="from speechbrain.dataio.sampler import DynamicBatchSampler",
    work="DynamicBatchSampler(durations, 300, num_buckets=200, lengths_list=durations.tolist())")


def bench_plan(bench: Bench, utterances: int) -> None:
    """Measure the planning of an epoch of a large corpus: time, and memory of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/durations.npy", like_common_voice(utterances))

        def run(code: str) -> list[float]:
            out = subprocess.run([sys.executable, "-c", code, f"{folder}/durations.npy"], check=True, text=True,
                                 capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            return [float(word) for word in out.stdout.split()[-2:]]

        ours, stock = zip(*((run(OURS), run(STOCK)) for _ in range(min(bench.rounds, 3))), strict=True)
    for column, unit, scale in ((0, "s", 1), (1, "MB", 1e3)):
        bench.row(f"plan {utterances:,} utterances", unit, [run[column] / scale for run in ours],
                  [run[column] / scale for run in stock], "stock", less_is_better=True)


def like_common_voice(utterances: int) -> np.ndarray:
    """Draw durations like those of a Common Voice corpus."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(1.5, 0.45, utterances), 0.8, 20).astype(np.float32)


# ---------------------------------------------------------------- the corpus


def make_corpus(out: Path, hours: float) -> Path:
    """Make the demo corpus in Common Voice's format: mono MP3 at 48 kHz and 64 kbit/s."""
    from sbkit.data.demo import make_demo_corpus

    folder = out / "en-48k"
    if (folder / "done").is_file():
        return folder
    source = make_demo_corpus(out, hours=hours)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "clips").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for clip in sorted((source / "clips").glob("*.mp3")):
        signal, rate = soundfile.read(clip, dtype="float32")
        signal = resample(signal, rate, 48_000)
        signal += rng.normal(scale=1e-3, size=len(signal)).astype(np.float32)  # like a microphone's full band
        with soundfile.SoundFile(folder / "clips" / clip.name, "w", 48_000, 1, format="MP3",
                                 bitrate_mode="CONSTANT", compression_level=0.8) as file:
            file.write(signal)
    for tsv in source.glob("*.tsv"):
        shutil.copy(tsv, folder)
    (folder / "done").touch()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("results/bench_data"),
                        help="a Common Voice folder, or where to make a corpus (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=0.5, help="size of the corpus to make")
    parser.add_argument("--clips", type=int, default=300, help="clips of the training set to read in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-seconds", type=float, default=60)
    parser.add_argument("--plan-utterances", type=int, default=2_000_000)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    data = args.data if (args.data / "train.tsv").is_file() else make_corpus(args.data, args.hours)
    bench = Bench(args.rounds)
    with tempfile.TemporaryDirectory() as work:
        corpus = Corpus(data, language="en", folder=Path(work) / "manifests")
        whole = corpus.prepare(show_progress=False)["train"]
        rng = np.random.default_rng(0)
        manifest = whole.select(rng.permutation(len(whole))[: args.clips])
        packed = write_shards(manifest, Path(work) / "shards", encode="wav16k", show_progress=False)
        _, rate, channels = audio_info(manifest.wavs[0])
        print(f"{data}: {len(whole)} utterances; {len(manifest)} of {manifest.hours * 60:.1f} minutes, "
              f"{rate} Hz, {channels} channel(s), in each round", file=sys.stderr)
        bench_prepare(bench, data)
        bench_reading(bench, manifest, packed)
        bench_loading(bench, manifest, packed, args.batch_seconds, args.workers)
        bench_batches(bench, whole.durations)
        bench_plan(bench, args.plan_utterances)
    print(bench.show())
    if args.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": usable_cores(),
                   "machine": platform.machine(), "rounds": args.rounds, "sample_rate": rate}
        args.json.write_text(json.dumps({"rows": bench.rows, "with": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
