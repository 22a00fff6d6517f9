#!/usr/bin/env python3
"""How much sbkit, stock SpeechBrain and NVIDIA NeMo learn from the same audio and in the same minutes.

    python tools/bench_learning.py --make-nemo [--nemo FOLDER]   make NeMo's own environment, some 7 GB; once
    python tools/bench_learning.py --out FOLDER --plan           print what would run, and about how long it takes
    python tools/bench_learning.py --out FOLDER [--key value ...]

Runs follow one another, with the systems in turn. Each result is a file in FOLDER/results, so the same command
continues where it was stopped. After each run, FOLDER/learning.md has the table and FOLDER/learning.svg the plot of all
results.

All three train a model of one size on the same utterances with the same texts, prepared once. sbkit is hparams/ctc.yaml
as it is shipped, started as by ``make demo``; stock SpeechBrain has the same model, seconds of a step and schedule in
its own Brain and data pipeline, with AdamW and neither SpecAugment nor intermediate CTC (tools/peers/stock_ctc.py);
NeMo is its small Conformer-CTC with the settings in tools/peers/nemo_ctc.py, in an environment of its own. Other keys
go to the recipe of the first two. A run of N epochs has a schedule of N epochs; no result is taken from the middle of a
longer run. A run of 5 minutes has the number of whole epochs that comes closest to 5 minutes of training, by the speed
of earlier runs, or of a run of two epochs that is made first.

*Training* is the time of the epochs' training, with reading audio. *Wait* is all that a user waits for: start,
preparation (for NeMo: MP3 to WAV), training, a validation after each epoch, the test. Every system has one thread per
core (OMP_NUM_THREADS); sbkit and stock decode MP3 in two more processes, NeMo reads its WAVs itself, at some 4,000 s of
audio per second. WER is by sbkit's scorer, on greedy transcripts of the weights at the end of the run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sbkit.errors import SbkitError  # noqa: E402
from sbkit.system.console import atomic_write, table  # noqa: E402
from sbkit.system.cores import usable_cores  # noqa: E402
from tools.learning import corpora as corpus_list  # noqa: E402
from tools.learning import systems  # noqa: E402
from tools.learning.figure import figure  # noqa: E402
from tools.learning.recipe_keys import check_keys  # noqa: E402
from tools.learning.results import SYSTEMS, Asked, Cell, Length, Results, matrix  # noqa: E402
from tools.learning.table import table as as_markdown  # noqa: E402

OWN = ("number_of_epochs", "seed", "data_folder", "language", "output_folder")  # keys of its own runs
SPEED_EPOCHS = 2  # of a run that measures a system's speed


def main() -> int:
    args = parse()
    try:
        if args.make_nemo:
            systems.make_nemo(args.nemo)
            return 0
        bench = Bench(args)
        return bench.plan() if args.plan else bench.run()
    except SbkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command runs what is missing", file=sys.stderr)
        return 130


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="folder of corpora, results, table and plot")
    parser.add_argument("--plan", action="store_true", help="print which runs are missing, and how long they take")
    parser.add_argument("--corpora", default="en:1,es:1", help="LANGUAGE:HOURS of synthesised speech, LANGUAGE=FOLDER")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", default="2,4,6", help="lengths in epochs; '' for none")
    parser.add_argument("--minutes", default="5", help="lengths in minutes of training; '' for none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", help="of all systems; auto: bf16 if the device has it")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="threads of each system (all cores)")
    parser.add_argument("--nemo", type=Path, default=Path("results/nemo"), help="NeMo's environment (results/nemo)")
    parser.add_argument("--make-nemo", action="store_true", help="make that environment, and nothing else")
    args, keys = parser.parse_known_args()
    args.keys = keys
    args.nemo = args.nemo.absolute()
    if not args.make_nemo and args.out is None:
        parser.error("say where results go: --out FOLDER")
    unknown = [system for system in words(args.systems) if system not in SYSTEMS]
    if unknown:
        parser.error(f"there is no system {unknown[0]}: choose of {', '.join(SYSTEMS)}")
    try:
        check_keys(systems.RECIPE, keys, OWN)
    except SbkitError as error:
        parser.error(str(error))
    return args


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


class Bench:
    """The runs of the comparison, and the results that exist."""

    def __init__(self, args: argparse.Namespace):
        self.out = args.out.absolute()
        self.specs = {spec.name: spec for spec in map(corpus_list.parse, words(args.corpora))}
        self.lengths = [*(Length(epochs=int(word)) for word in words(args.epochs)),
                        *(Length(minutes=float(word)) for word in words(args.minutes))]
        self.setting = systems.Setting(args.device, precision(args), args.threads, args.nemo, args.keys)
        self.skipped = {system: reason for system in words(args.systems)
                        if (reason := systems.missing(system, self.setting))}
        self.results = Results(self.out, self.setting.options())
        wanted = [system for system in words(args.systems) if system not in self.skipped]
        self.asked = list(matrix(list(self.specs), wanted, list(map(int, words(args.seeds))), self.lengths))

    def plan(self) -> int:
        """Print each missing run with an estimate of its time, and the sum."""
        rows, summary = self.estimates()
        self.tell_skipped()
        print(table(["corpus", "system", "seed", "run of", "epochs", "minutes", "by speed"], rows))
        print(summary)
        return 0

    def estimates(self) -> tuple[list[list[Any]], str]:
        """Return a row for each missing run, with an estimate of its time, and the sum in words."""
        rows: list[list[Any]] = []
        total, unknown, guessed = 0.0, 0, False
        for asked in self.asked:
            epochs = self.results.fitted(asked.corpus, asked.system, asked.length)
            if epochs and self.results.get(Cell(asked.corpus, asked.system, asked.seed, epochs)):
                continue
            minutes, measured = self.results.estimate(asked, self.train_seconds(asked.corpus)) or (None, False)
            total += minutes or 0
            unknown += minutes is None
            guessed |= not measured
            rows.append([asked.corpus, asked.system, asked.seed, str(asked.length), epochs,
                         None if minutes is None else round(minutes, 1), "measured" if measured else "guessed"])
        return rows, (f"{len(rows)} of {len(self.asked)} runs are missing: about {total:.0f} min"
                      f"{f', and {unknown} on a corpus of unknown length' if unknown else ''}"
                      f"{'; guesses become measurements once a system has run' if guessed else ''}")

    def run(self) -> int:
        """Make the missing runs; one that fails is reported and left for the next call."""
        self.tell_skipped()
        print(self.estimates()[1], file=sys.stderr, flush=True)
        failed = 0
        for asked in self.asked:
            try:
                for cell in self.cells(asked):
                    self.measure(cell)
            except SbkitError as error:
                failed += 1
                print(f"error: {error}", file=sys.stderr, flush=True)
        if failed:
            print(f"{failed} of {len(self.asked)} runs failed", file=sys.stderr)
        print(self.write())
        return int(failed > 0)

    def tell_skipped(self) -> None:
        for system, reason in self.skipped.items():
            print(f"without {system}: {reason}", file=sys.stderr, flush=True)

    def cells(self, asked: Asked) -> Iterator[Cell]:
        """List the missing runs for an entry: itself, and before it one that measures the system's speed."""
        corpus, system, seed = asked.corpus, asked.system, asked.seed
        epochs = asked.length.epochs
        if epochs is None:
            assert asked.length.minutes is not None, "a length has one or the other"
            if self.results.epoch_seconds(corpus, system) is None:
                yield Cell(corpus, system, seed, SPEED_EPOCHS)
            epochs = self.results.fit(corpus, system, asked.length.minutes)
            assert epochs is not None, "the system's speed is known"
        cell = Cell(corpus, system, seed, epochs)
        if self.results.get(cell) is None:
            yield cell

    def measure(self, cell: Cell) -> None:
        corpus = corpus_list.prepare(self.specs[cell.corpus], self.out, systems.RECIPE, self.setting.keys)
        folder = self.out / "work" / cell.name
        shutil.rmtree(folder, ignore_errors=True)  # a run that was stopped would be resumed
        print(f"{cell.name} ...", end=" ", file=sys.stderr, flush=True)
        run = systems.Run(cell, corpus, self.setting, folder, self.out / "logs" / f"{cell.name}.log")
        facts = systems.measure(run)
        shutil.rmtree(folder)
        self.results.put(cell, facts)
        self.write()
        print(f"dev WER {facts['dev_wer']:.2f} %, test {facts['test_wer']:.2f} %, {facts['train_seconds']:.0f} s of "
              f"training, {facts['wall_seconds']:.0f} s in all", file=sys.stderr, flush=True)

    def write(self) -> str:
        """Write the table and the plot of all results; returns the table."""
        found = self.results.of()
        page = as_markdown(self.results, list(self.specs), self.lengths)
        if found:
            for name, content in (("learning.md", page), ("learning.svg", figure(found, list(self.specs)))):
                with atomic_write(self.out / name) as file:
                    file.write(content)
        return page

    def train_seconds(self, name: str) -> float | None:
        """Estimate the seconds of a corpus's training audio."""
        spec, found = self.specs[name], corpus_list.find(self.specs[name], self.out)
        if found is not None:
            return 3600 * found.train_hours
        return None if spec.folder is not None else 3600 * spec.hours * corpus_list.TRAIN_SHARE


def precision(args: argparse.Namespace) -> str:
    """Return the precision for all systems."""
    if args.precision != "auto":
        return args.precision
    import torch

    from sbkit.train import device

    return device.native_precision(torch.device(args.device))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the current run, as Ctrl-C does
    sys.exit(main())
