"""The gain of starting from another corpus's model: WER after the same minutes with --init_from and without.

    python -m tools.bench.transfer --out FOLDER [--source RUN] [--corpora es:1,de:1]
        [--recordings NAME:LANGUAGE=DATA_FOLDER] [--minutes 3] [--seeds 1,2,3] [--key value ...]

The source is a run of hparams/ctc.yaml on the demo corpus (English), trained first unless --source names one. The
corpora are synthesised (LANGUAGE:HOURS, any language of espeak-ng) or recordings in any layout that a recipe reads. For
each of them, a run of one epoch measures how long an epoch takes. All other runs have the number of epochs that comes
closest to --minutes, with the schedule planned for it, and differ only in --init_from. Other keys go to the recipe of
every run except the source's. Compared is the test WER of the best checkpoint.

Each result is a file in FOLDER/results, so the same command continues where it was stopped. FOLDER/transfer.md is the
table. The exit code is 1 if on some corpus the mean WER with --init_from is more than --at-most (0.5) times that
without.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write
from tools.bench.harness import RECIPE, Results, as_words, call, discard, parse_checked, read_lines

SCRATCH, TRANSFER = "scratch", "init_from"
OWN = ("data_folder", "language", "seed", "number_of_epochs", "init_from", "output_folder")  # keys of its own runs


def main() -> int:
    args = parse()
    try:
        bench = Bench(args)
        bench.run()
    except SbkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(bench.table())
    return int(any(ratio > args.at_most for ratio in bench.ratios().values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, results and the table")
    parser.add_argument("--source", type=Path, help="a run to start from (default: make one on the demo corpus)")
    parser.add_argument("--source-keys", default="", help="keys of the recipe for that run, in one word")
    parser.add_argument("--corpora", default="es:1", help="LANGUAGE:HOURS of synthesised speech; '' for none")
    parser.add_argument("--recordings", action="append", default=[], metavar="NAME:LANGUAGE=DATA_FOLDER")
    parser.add_argument("--minutes", type=float, default=3.0, help="minutes of training")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--at-most", type=float, default=0.5, help="the largest ratio of the WERs that passes")
    args, keys = parse_checked(parser, RECIPE, OWN)
    args.keys = keys
    return args


class Bench:
    """The runs of the comparison, and the results that exist."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.out: Path = args.out.absolute()
        self.seeds = [int(word) for word in args.seeds.split(",")]
        self.corpora = dict(map(self._corpus, filter(None, args.corpora.split(","))))
        for word in args.recordings:
            name, sign, folder = word.partition("=")
            if not sign or not Path(folder).exists():
                raise SbkitError(f"--recordings {word}: there is no such folder",
                                 hint="write NAME:LANGUAGE=DATA_FOLDER")
            name, _, language = name.partition(":")
            self.corpora[name] = {"data_folder": str(Path(folder).resolve()), "language": language or "en"}
        self.found: dict[tuple[str, str, int], dict[str, Any]] = {}
        source = str(args.source.absolute()) if args.source else args.source_keys
        self.results = Results(self.out / "results", {"keys": args.keys, "source": source})

    def _corpus(self, word: str) -> tuple[str, dict[str, Any]]:
        """Synthesise a corpus, once."""
        from sbkit.data.demo import make_demo_corpus

        language, _, hours = word.partition(":")
        folder = make_demo_corpus(self.out / "corpora" / language, hours=float(hours or 1), language=language)
        return language, {"data_folder": str(folder), "language": language}

    def run(self) -> None:
        """Train the missing runs, with and without --init_from in turn."""
        source = self.args.source or self._source()
        for name, corpus in self.corpora.items():
            epochs = self._epochs(name, corpus)
            for seed in self.seeds:
                for way, more in ((SCRATCH, {}), (TRANSFER, {"init_from": str(source.absolute())})):
                    keys = {**corpus, "seed": seed, "number_of_epochs": epochs, **more}
                    self.found[name, way, seed] = self._run(f"{name}-{way}-{epochs}-epochs-seed-{seed}", keys)
                    self._write()

    def _source(self) -> Path:
        folder = self.out / "source"
        self._train("source", folder, {}, self.args.source_keys.split())  # returns at once if it is complete
        return folder

    def _epochs(self, name: str, corpus: Mapping[str, Any]) -> int:
        """Find the number of epochs that takes about --minutes."""
        one = self._run(f"{name}-epoch", {**corpus, "seed": 0, "number_of_epochs": 1})
        return max(1, round(60 * self.args.minutes / one["train_seconds"]))

    def _run(self, name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's result from its file, or train it."""
        if (found := self.results.get(name)) is not None:
            return found
        folder = self.out / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)  # one that was stopped would be resumed
        self._train(name, folder, {"least_steps": 0, **keys}, self.args.keys)
        result = read(folder)
        discard(folder)
        print(f"{name}: test WER {result['wer']:.2f} %, {result['train_seconds']:.0f} s of training", file=sys.stderr)
        return self.results.put(name, result)

    def _train(self, name: str, folder: Path, keys: Mapping[str, Any], more: Sequence[str]) -> None:
        words = as_words({**keys, "output_folder": folder})
        call(name, [sys.executable, "-m", "sbkit", "train", RECIPE, "--noprogressbar", *words, *more],
             self.out / "logs" / f"{name}.log")

    # ------------------------------------------------------------ the table

    def _of(self, name: str, way: str, what: str) -> list[float]:
        return [self.found[name, way, seed][what] for seed in self.seeds if (name, way, seed) in self.found]

    def ratios(self) -> dict[str, float]:
        """Divide the mean WER with --init_from by that without, for each corpus whose runs are complete."""
        return {name: statistics.mean(self._of(name, TRANSFER, "wer")) / statistics.mean(self._of(name, SCRATCH, "wer"))
                for name in self.corpora if len(self._of(name, TRANSFER, "wer")) == len(self.seeds)}

    def table(self) -> str:
        """Format the table in Markdown."""
        rows = [["corpus", "minutes of training", "WER from nothing", "with `--init_from`", "ratio"], ["---"] * 5]
        ratios = self.ratios()
        for name in self.corpora:
            seconds = self._of(name, SCRATCH, "train_seconds") + self._of(name, TRANSFER, "train_seconds")
            if seconds:
                rows.append([name, f"{min(seconds) / 60:.1f} to {max(seconds) / 60:.1f}",
                             shown(self._of(name, SCRATCH, "wer")), shown(self._of(name, TRANSFER, "wer")),
                             f"{ratios[name]:.2f}" if name in ratios else ""])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _write(self) -> None:
        with atomic_write(self.out / "transfer.md") as file:
            file.write(self.table() + "\n")


def shown(rates: Sequence[float]) -> str:
    """Format the mean, followed by the single rates."""
    return f"{statistics.mean(rates):.1f} ({', '.join(f'{rate:.1f}' for rate in rates)})" if rates else ""


def read(folder: Path) -> dict[str, float]:
    """Read a run's test WER and CER, and its seconds of training."""
    lines = read_lines(folder / "metrics.jsonl")
    test = [line for line in lines if line["kind"] == "test"]
    return {"wer": test[-1]["test_WER"], "cer": test[-1]["test_CER"],
            "train_seconds": sum(line.get("train_seconds", 0.0) for line in lines if line["kind"] == "epoch")}


if __name__ == "__main__":
    sys.exit(main())
