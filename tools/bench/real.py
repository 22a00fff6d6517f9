"""A small corpus, learnt from random weights, from pretrained weights, and by other toolkits.

    python -m tools.bench.real --out FOLDER --corpora cs=DATA_FOLDER[,es:1] [--ways nothing,demo,whisper,lora]
        [--source RUN] [--encoder FOLDER] [--epochs 4] [--minutes 15] [--seeds 1,2] [--key value]

A corpus is LANGUAGE=FOLDER, in any layout that a recipe reads, or LANGUAGE:HOURS of synthesised speech. Minutes are CPU
time, which depends little on other processes. The ways to train alternate:

- ``nothing`` is hparams/ctc.yaml, ``demo`` the same with ``--init_from`` a run of it that --source names, ``stock`` and
  ``nemo`` are stock SpeechBrain's Conformer and NeMo's as in tools.bench.learning: the number of epochs closest to
  --minutes of training, by the speed of one epoch, with a schedule of that length;
- ``whisper`` is hparams/finetune.yaml on the encoder of --encoder, ``lora`` lora.yaml: --epochs of the corpus;
- ``speechbrain`` is SpeechBrain's recipe with the same encoder in its wrapper, peers/stock_whisper.py, for --minutes.

Other keys go to the recipe of every run. Each result is a file in FOLDER/results, so the same command continues where
it was stopped. FOLDER/real.md is the table: the test of the best checkpoint (of other toolkits the last weights), and
the dev CER by minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write
from sbkit.system.cores import usable_cores
from tools.bench import corpora, systems
from tools.bench.harness import (
    RECIPE,
    ROOT,
    Results,
    as_words,
    call,
    check_keys,
    markdown,
    positive,
    processor_seconds,
    program,
    rates_of,
    read_lines,
    sbkit,
    whole_numbers,
)

RECIPES = {"nothing": RECIPE, "demo": RECIPE, "whisper": ROOT / "hparams" / "finetune.yaml",
           "lora": ROOT / "recipes" / "CommonVoice" / "ASR" / "CTC" / "hparams" / "lora.yaml"}
WAYS = (*RECIPES, "speechbrain", "stock", "nemo")
BY_EPOCHS, ON_ENCODER = ("whisper", "lora"), ("whisper", "lora", "speechbrain")
OWN = ("data_folder", "language", "seed", "number_of_epochs", "init_from", "encoder_source", "output_folder")
HEAD = ("corpus", "from", "seed", "epochs", "processor minutes", "test WER", "test CER", "dev CER after minutes")
SHOWN = 5  # points of a curve

T = TypeVar("T")


@program
def main() -> int:
    print(Bench(*parse()).run())
    return 0


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into the program's options and the keys for every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, results and the table")
    parser.add_argument("--corpora", required=True, help="LANGUAGE=FOLDER or LANGUAGE:HOURS, several with commas")
    parser.add_argument("--ways", default="nothing", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--source", type=Path, help="the run that `demo` starts from")
    parser.add_argument("--encoder", type=Path, help="Whisper's weights, as transformers saves them")
    parser.add_argument("--nemo", type=Path, default=Path("results/nemo"), help="as in tools.bench.learning")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minutes", type=positive, default=15.0)
    parser.add_argument("--seeds", type=whole_numbers, default="1,2")
    args, keys = parser.parse_known_args()
    args.ways = args.ways.split(",")
    if unknown := [way for way in args.ways if way not in WAYS]:
        parser.error(f"there is no way {unknown[0]}: choose of {', '.join(WAYS)}")
    if "demo" in args.ways and not (args.source and args.source.is_dir()):
        parser.error(f"the way demo starts from a run, --source RUN, which is {args.source or 'missing'}")
    if (way := next(iter({*ON_ENCODER} & {*args.ways}), None)) and not (
            args.encoder and (args.encoder / "config.json").is_file()):
        parser.error(f"the way {way} needs --encoder FOLDER with a config.json, which is {args.encoder or 'missing'}")
    return args, keys


class Bench:
    """The runs of the comparison, and the results that exist."""

    def __init__(self, args: argparse.Namespace, keys: list[str]):
        self.args, self.keys, self.out = args, keys, args.out.absolute()
        self.setting = systems.Setting("cpu", systems.precision("auto", "cpu"), usable_cores(), args.nemo.absolute(),
                                       keys)
        for recipe in {RECIPES.get(way, RECIPE) for way in args.ways}:
            check_keys(recipe, keys, OWN)
        if "nemo" in args.ways and (reason := systems.missing("nemo", self.setting)):
            raise SbkitError("bench", reason)
        self.specs = [corpora.parse(word) for word in args.corpora.split(",")]
        encoder = {"encoder_source": str(args.encoder and args.encoder.resolve())}
        self.starts = {"nothing": {}, "demo": {"init_from": str(args.source and args.source.resolve())},
                       **dict.fromkeys(ON_ENCODER, encoder)}
        self.rows: list[tuple[str, str, int, dict[str, Any]]] = []

    def run(self) -> str:
        """Make the missing runs; returns the table."""
        for seed in self.args.seeds:
            for spec in self.specs:
                for way in self.args.ways:
                    self.rows.append((spec.name, way, seed, self.measure(spec, way, seed)))
                    with atomic_write(self.out / "real.md") as file:
                        file.write(table(self.rows))
        return table(self.rows)

    def measure(self, spec: corpora.Spec, way: str, seed: int) -> dict[str, Any]:
        """Return a run's result from its file, or train it."""
        length = {"epochs": self.args.epochs} if way in BY_EPOCHS else {"minutes": self.args.minutes}
        name, results = f"{spec.name}.{way}.seed-{seed}", self.results(spec, way, **length)
        if (found := results.get(name)) is not None:
            return found
        found = self.train(name, spec, way, seed, self.args.epochs if way in ON_ENCODER else self.fit(spec, way))
        print(f"{name}: test WER {found['wer']:.2f} %, CER {found['cer']:.2f} %", file=sys.stderr, flush=True)
        return results.put(name, found)

    def results(self, spec: corpora.Spec, way: str, **length: float) -> Results:
        """Return the results that were measured as this one would be."""
        return Results(self.out / "results", {
            "corpus": spec.folder or spec.hours, "keys": self.keys, **self.starts.get(way, {}), **length})

    def fit(self, spec: corpora.Spec, way: str) -> int:
        """Return the epochs that come closest to the minutes, by the speed of one: the same for all seeds."""
        way = "nothing" if way == "demo" else way
        name, results = f"{spec.name}.{way}.one-epoch", self.results(spec, way)
        one = results.get(name) or results.put(name, self.train(name, spec, way, 0, 1))
        return max(1, round(60 * self.args.minutes / one["train_seconds"]))

    def train(self, name: str, spec: corpora.Spec, way: str, seed: int, epochs: int) -> dict[str, Any]:
        """Train by a recipe or by another toolkit for some epochs, or with SpeechBrain's wrapper for the minutes."""
        folder, log = self.out / "runs" / name, self.out / "logs" / f"{name}.log"
        shutil.rmtree(folder, ignore_errors=True)  # one that was stopped would be resumed
        given = {"data_folder": corpora.source_of(spec, self.out), "language": spec.language, "seed": seed,
                 "output_folder": folder}
        if way == "speechbrain":
            found = self.wrapped(name, folder, log, given)
        elif way in systems.SYSTEMS:
            found = self.other(systems.Cell(spec.name, way, seed, epochs), spec, folder, log)
        else:
            words = as_words({**given, **self.starts[way], "number_of_epochs": epochs, "min_steps": 0})
            _, share = with_share(lambda: sbkit(
                name, ["train", RECIPES[way], "--noprogressbar", *words, *self.keys], log))
            found = rates_of(folder)
            found = {**found, "epochs": epochs, "train_seconds": share * found["train_seconds"],
                     "curve": curve(read_lines(folder / "metrics.jsonl"), share)}
        shutil.rmtree(folder)
        return found

    def other(self, cell: systems.Cell, spec: corpora.Spec, folder: Path, log: Path) -> dict[str, Any]:
        """Train by a system of tools.bench.learning."""
        corpus = corpora.prepare(spec, self.out, RECIPE, self.keys)
        facts, share = with_share(lambda: systems.measure(systems.Run(cell, corpus, self.setting, folder, log)))
        seconds = share * facts["train_seconds"]
        return {"wer": facts["test_wer"], "cer": facts["test_cer"], "epochs": cell.epochs, "train_seconds": seconds,
                "curve": [(round(seconds / 60, 1), round(facts["dev_cer"], 1))], "versions": facts["versions"]}

    def wrapped(self, name: str, folder: Path, log: Path, given: dict[str, Any]) -> dict[str, Any]:
        """Train with SpeechBrain's wrapper, which counts its processor's minutes itself."""
        folder.mkdir(parents=True)
        call(name, [sys.executable, "-m", "tools.bench.peers.stock_whisper", folder / "answer.json",
                    *self.starts["speechbrain"].values(), self.args.minutes,
                    *as_words({**given, "step_seconds": 40}), *self.keys], log)
        found = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        test = Manifest.read(folder / "manifests" / "test.csv")
        rates = systems.score("test", dict(zip(test.ids, test.texts, strict=True)), found.pop("transcripts"))
        return {**found, "wer": rates["test_wer"], "cer": rates["test_cer"], "curve": []}


def with_share(run: Callable[[], T]) -> tuple[T, float]:
    """Run programs; returns what the function returns, and their seconds of a processor per second by the clock."""
    began, before = time.perf_counter(), processor_seconds()
    found = run()
    return found, (processor_seconds() - before) / (time.perf_counter() - began)


def curve(lines: list[dict[str, Any]], share: float = 1.0) -> list[tuple[float, float]]:
    """Return the minutes of training and the dev CER after each epoch, from the lines of metrics.jsonl.

    share : seconds of a processor in a second by the clock
    """
    seconds, points = 0.0, []
    for line in lines:
        seconds += line.get("train_seconds", 0.0) if line["kind"] == "epoch" else 0.0
        if "valid_CER" in line:
            points.append((round(share * seconds / 60, 1), round(line["valid_CER"], 1)))
    return points


def table(rows: list[tuple[str, str, int, dict[str, Any]]]) -> str:
    """Format the table in Markdown."""
    lines: list[tuple[str, ...]] = []
    for corpus, way, seed, found in rows:
        points = found["curve"]
        few = points[::-(-(-len(points) // SHOWN) or 1)][::-1]  # the last one among them
        lines.append((corpus, way, str(seed), str(found["epochs"]), f"{found['train_seconds'] / 60:.1f}",
                      f"{found['wer']:.1f} %", f"{found['cer']:.1f} %",
                      ", ".join(f"{minutes:g}: {cer:g} %" for minutes, cer in few)))
    return markdown(HEAD, lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the current run, as Ctrl-C does
    sys.exit(main())
