"""How much sbkit, stock SpeechBrain and NVIDIA NeMo learn from the same audio and in the same minutes.

    python -m tools.bench.learning --make-nemo [--nemo FOLDER]   make NeMo's own environment, some 7 GB; once
    python -m tools.bench.learning --out FOLDER --plan           print what would run, and about how long it takes
    python -m tools.bench.learning --out FOLDER [--key value ...]

The systems alternate. Each result is a file in FOLDER/results, so the same command continues where it was stopped.
After each run, FOLDER/learning.md has the table and FOLDER/learning.svg the plot of all results.

All three train a model of one size on the same utterances with the same texts, prepared once. sbkit trains the
unchanged hparams/ctc.yaml, as ``make demo`` does; stock SpeechBrain has the same model, seconds of a step and schedule
in its own Brain and data pipeline, with AdamW and without SpecAugment and intermediate CTC (peers/stock_ctc.py); NeMo
trains its small Conformer-CTC with the settings in peers/nemo_ctc.py, in a separate environment. Other keys go to the
recipe of the first two. A run of N epochs has a schedule of N epochs; no result is taken from the middle of a longer
run. A run of 5 minutes has the number of whole epochs closest to 5 minutes of training, by the speed of earlier runs,
or of a first run of two epochs.

*Training* is the time of the epochs' training, including reading audio. *Wait* is the whole time: start, preparation
(for NeMo: MP3 to WAV), training, a validation after each epoch, the test. Every system has one thread per core
(OMP_NUM_THREADS); sbkit and stock decode MP3 in two more processes, NeMo reads its WAVs itself, at about 4,000 s of
audio per second. WER is by sbkit's scorer, on greedy transcripts of the weights at the end of the run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write, table
from sbkit.system.cores import usable_cores
from tools.bench import corpora, harness, systems
from tools.bench.figure import figure
from tools.bench.harness import RECIPE, positive, whole_numbers
from tools.bench.systems import NAMES, SYSTEMS, Cell

OWN = ("number_of_epochs", "seed", "data_folder", "language", "output_folder")  # keys that it sets
SPEED_EPOCHS = 2  # of a run that measures a system's speed
#: Before anything was measured: audio seconds per second on two cores in fp32, and seconds of a run besides training.
GUESSED_SPEED = {"sbkit": 150.0, "stock": 70.0, "nemo": 60.0}
GUESSED_REST = 60.0
BUSY = 0.05  # share of the cores that others used, above which a run is marked as beside other work
HEAD = ("corpus", "run of", "system", "epochs", "audio, h", "training, min", "wait, min", "dev WER, each seed", "mean",
        "to sbkit", "test WER")


@harness.program
def main() -> int:
    args = parse()
    if args.make_nemo:
        systems.make_nemo(args.nemo)
        return 0
    bench = Bench(args)
    return bench.plan() if args.plan else bench.run()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="folder of corpora, results, table and plot")
    parser.add_argument("--plan", action="store_true", help="print which runs are missing, and how long they take")
    parser.add_argument("--corpora", default="en:1,es:1", help="LANGUAGE:HOURS of synthesised speech, LANGUAGE=FOLDER")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--seeds", type=whole_numbers, default="1,2,3")
    parser.add_argument("--epochs", type=whole_numbers, default="2,4,6", help="lengths in epochs; '' for none")
    parser.add_argument("--minutes", type=minutes, default="5", help="lengths in minutes of training; '' for none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", help="of all systems; auto: bf16 if the device has it")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="threads of each system (all cores)")
    parser.add_argument("--nemo", type=Path, default=Path("results/nemo"), help="NeMo's environment (results/nemo)")
    parser.add_argument("--make-nemo", action="store_true", help="only create that environment")
    args, keys = harness.parse_checked(parser, RECIPE, OWN)
    args.keys = keys
    args.nemo = args.nemo.absolute()
    if not args.make_nemo and args.out is None:
        parser.error("say where results go: --out FOLDER")
    unknown = [system for system in words(args.systems) if system not in SYSTEMS]
    if unknown:
        parser.error(f"there is no system {unknown[0]}: choose of {', '.join(SYSTEMS)}")
    return args


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def minutes(text: str) -> list[float]:
    return list(map(positive, words(text)))


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Length:
    """The length of a run, in epochs or in minutes of training."""

    epochs: int | None = None
    minutes: float | None = None

    def __str__(self) -> str:
        if self.epochs is None:
            return f"{self.minutes:g} min"
        return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"


@dataclass(frozen=True)
class PlannedRun:
    """A run as the command line describes it; minutes are converted to epochs when its turn comes."""

    corpus: str
    system: str
    seed: int
    length: Length


def matrix(corpora: Sequence[str], systems: Sequence[str], seeds: Sequence[int], lengths: Sequence[Length],
           ) -> Iterator[PlannedRun]:
    """List all runs in their order: the whole table with the first seed first, with alternating systems."""
    for seed in seeds:
        for corpus in corpora:
            for length in sorted(lengths, key=lambda one: (one.epochs is None, one.epochs or one.minutes)):
                for system in systems:
                    yield PlannedRun(corpus, system, seed, length)


class Results(harness.Results):
    """Results, and the speeds and estimates that follow from them."""

    def __init__(self, out: Path, options: dict[str, Any]):
        super().__init__(out / "results", options)
        self._fits_file = out / "fits.json"

    def of(self, corpus: str | None = None, system: str | None = None, epochs: int | None = None,
           ) -> list[dict[str, Any]]:
        """Return all results, or those of a corpus, a system and a number of epochs."""
        wanted = {"corpus": corpus, "system": system, "epochs": epochs}
        return [one for one in self.every() if all(value in (None, one[key]) for key, value in wanted.items())]

    def epoch_seconds(self, corpus: str, system: str) -> float | None:
        """Return the median seconds of training in an epoch.

        The first epoch of a run compiles and warms up, so it only counts if there is no other.
        """
        runs = [one["epoch_seconds"] for one in self.of(corpus, system)]
        found = [seconds for run in runs for seconds in run[1:]] or [seconds for run in runs for seconds in run]
        return statistics.median(found) if found else None

    def fit(self, corpus: str, system: str, minutes: float) -> int | None:
        """Return the number of epochs that comes closest to these minutes; None if the system has not run yet.

        Once found, it stays the same for all seeds.
        """
        length = Length(minutes=minutes)
        epochs, seconds = self.fitted(corpus, system, length), self.epoch_seconds(corpus, system)
        if epochs is None and seconds is not None:
            epochs = max(1, round(60 * minutes / seconds))
            found = {**self._fits(), _fit_name(corpus, system, length): {"epochs": epochs, "epoch_seconds": seconds}}
            with atomic_write(self._fits_file) as file:
                json.dump(found, file, indent=1)
        return epochs

    def fitted(self, corpus: str, system: str, length: Length) -> int | None:
        """Return the epochs of a length; None if its minutes have not been converted yet."""
        if length.epochs is not None:
            return length.epochs
        return self._fits().get(_fit_name(corpus, system, length), {}).get("epochs")

    def _fits(self) -> dict[str, dict[str, Any]]:
        return json.loads(self._fits_file.read_text(encoding="utf-8")) if self._fits_file.is_file() else {}

    def estimate(self, planned: PlannedRun, train_seconds: float | None) -> tuple[float, bool] | None:
        """Estimate the minutes of a whole run, and whether that is measured; None if the corpus's size is unknown."""
        epoch = self.epoch_seconds(planned.corpus, planned.system)
        rests = [one["wall_seconds"] - sum(one["epoch_seconds"]) for one in self.of(planned.corpus, planned.system)]
        rest = statistics.median(rests) if rests else GUESSED_REST
        if planned.length.minutes is not None:
            return planned.length.minutes + rest / 60, epoch is not None
        each = epoch
        if each is None and train_seconds is not None:
            each = train_seconds / GUESSED_SPEED[planned.system]
        if each is None or planned.length.epochs is None:
            return None
        return (planned.length.epochs * each + rest) / 60, epoch is not None


def _fit_name(corpus: str, system: str, length: Length) -> str:
    return f"{corpus}.{system}.{length.minutes:g}-minutes"


# ---------------------------------------------------------------- the runs


class Bench:
    """The runs of the comparison, and the results that exist."""

    def __init__(self, args: argparse.Namespace):
        self.out = args.out.absolute()
        self.specs = {spec.name: spec for spec in map(corpora.parse, words(args.corpora))}
        self.lengths = [*(Length(epochs=each) for each in args.epochs),
                        *(Length(minutes=each) for each in args.minutes)]
        self.setting = systems.Setting(args.device, systems.precision(args.precision, args.device), args.threads,
                                       args.nemo, args.keys)
        self.skipped = {system: reason for system in words(args.systems)
                        if (reason := systems.missing(system, self.setting))}
        self.results = Results(self.out, self.setting.options())
        wanted = [system for system in words(args.systems) if system not in self.skipped]
        self.planned = list(matrix(list(self.specs), wanted, args.seeds, self.lengths))

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
        for planned in self.planned:
            epochs = self.results.fitted(planned.corpus, planned.system, planned.length)
            if epochs and self.results.get(Cell(planned.corpus, planned.system, planned.seed, epochs).name):
                continue
            minutes, measured = self.results.estimate(planned, self.train_seconds(planned.corpus)) or (None, False)
            total += minutes or 0
            unknown += minutes is None
            guessed |= not measured
            rows.append([planned.corpus, planned.system, planned.seed, str(planned.length), epochs,
                         None if minutes is None else round(minutes, 1), "measured" if measured else "guessed"])
        return rows, (f"{len(rows)} of {len(self.planned)} runs are missing: about {total:.0f} min"
                      f"{f', and {unknown} on a corpus of unknown length' if unknown else ''}"
                      f"{'; guesses become measurements once a system has run' if guessed else ''}")

    def run(self) -> int:
        """Make the missing runs; one that fails is reported and left for the next call."""
        self.tell_skipped()
        print(self.estimates()[1], file=sys.stderr, flush=True)
        failed = 0
        for planned in self.planned:
            try:
                for cell in self.cells(planned):
                    self.measure(cell)
            except SbkitError as error:
                failed += 1
                print(f"error: {error}", file=sys.stderr, flush=True)
        if failed:
            print(f"{failed} of {len(self.planned)} runs failed", file=sys.stderr)
        print(self.write())
        return int(failed > 0)

    def tell_skipped(self) -> None:
        for system, reason in self.skipped.items():
            print(f"without {system}: {reason}", file=sys.stderr, flush=True)

    def cells(self, planned: PlannedRun) -> Iterator[Cell]:
        """List the missing runs for an entry: itself, and before it one that measures the system's speed."""
        corpus, system, seed = planned.corpus, planned.system, planned.seed
        epochs = planned.length.epochs
        if epochs is None:
            assert planned.length.minutes is not None, "a length has one or the other"
            if self.results.epoch_seconds(corpus, system) is None:
                yield Cell(corpus, system, seed, SPEED_EPOCHS)
            epochs = self.results.fit(corpus, system, planned.length.minutes)
            assert epochs is not None, "the system's speed is known"
        cell = Cell(corpus, system, seed, epochs)
        if self.results.get(cell.name) is None:
            yield cell

    def measure(self, cell: Cell) -> None:
        corpus = corpora.prepare(self.specs[cell.corpus], self.out, RECIPE, self.setting.keys)
        folder = self.out / "work" / cell.name
        shutil.rmtree(folder, ignore_errors=True)  # a run that was stopped would be resumed
        print(f"{cell.name} ...", end=" ", file=sys.stderr, flush=True)
        run = systems.Run(cell, corpus, self.setting, folder, self.out / "logs" / f"{cell.name}.log")
        facts = systems.measure(run)
        shutil.rmtree(folder)
        self.results.put(cell.name, {**asdict(cell), **facts})
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
        spec, found = self.specs[name], corpora.find(self.specs[name], self.out)
        if found is not None:
            return 3600 * found.train_hours
        return None if spec.folder is not None else 3600 * spec.hours * corpora.TRAIN_SHARE


# ---------------------------------------------------------------- the table


def as_markdown(results: Results, corpora: Sequence[str], lengths: Sequence[Length]) -> str:
    """Format a row for each corpus, length and system that has results, followed by notes on how they were made."""
    rows = [row for corpus in corpora for length in lengths for row in _rows(results, corpus, length)]
    return "\n".join([harness.markdown(HEAD, rows), *_notes(results.of())]) + "\n"


def _rows(results: Results, corpus: str, length: Length) -> Iterator[list[str]]:
    found = {}
    for system in SYSTEMS:
        epochs = results.fitted(corpus, system, length)
        found[system] = [] if epochs is None else results.of(corpus, system, epochs)
    for system, runs in found.items():
        if not runs:
            continue
        runs = sorted(runs, key=lambda run: run["seed"])
        wer = _mean(runs, "dev_wer")
        ours = _mean(found["sbkit"], "dev_wer") if found["sbkit"] else 0.0
        ratio = f"{wer / ours:.1f}x" if ours and system != "sbkit" else ""
        yield [corpus, str(length), NAMES[system], str(runs[0]["epochs"]), f"{runs[0]['audio_hours']:.2f}",
               _minutes(runs, "train_seconds"), _minutes(runs, "wall_seconds"),
               ", ".join(f"{run['dev_wer']:.1f}" for run in runs), f"{wer:.1f} %", ratio,
               f"{_mean(runs, 'test_wer'):.1f} %"]


def _minutes(runs: Iterable[dict[str, Any]], key: str) -> str:
    """The median, which a single slow run doesn't change."""
    return f"{statistics.median(run[key] for run in runs) / 60:.1f}"


def _mean(runs: Iterable[dict[str, Any]], key: str) -> float:
    return statistics.mean(run[key] for run in runs)


def _notes(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not runs:
        return
    options = runs[0]["options"]
    yield (f"{options['precision']} on {options['device']}, {options['threads']} threads each"
           f"{', ' + ' '.join(options['keys']) if options['keys'] else ''}; one run at a time.")
    for system in SYSTEMS:
        of = [run for run in runs if run["system"] == system]
        if of:
            versions = ", ".join(f"{name} {version}" for name, version in of[-1]["versions"].items() if version)
            commits = " ".join(sorted({run["commit"] for run in of}))
            yield f"{NAMES[system]}: {of[-1]['parameters'] / 1e6:.2f} M parameters; {versions}; commit {commits}."
    busy = [run for run in runs if (run["others_share"] or 0) > BUSY]
    if busy:
        most = max(run["others_share"] for run in busy)
        yield (f"Beside other work, so their times are unreliable: {len(busy)} of {len(runs)} runs (others took up to "
               f"{100 * most:.0f} % of the cores).")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the current run, as Ctrl-C does
    sys.exit(main())
