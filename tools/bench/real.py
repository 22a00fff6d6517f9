"""Real recordings with few hours: what they give from nothing, and from weights that others have trained.

    python -m tools.bench.real --out FOLDER --encoder FOLDER --corpora cs=DATA_FOLDER[,es=DATA_FOLDER]
        [--source RUN] [--ways nothing,whisper,lora,speechbrain] [--epochs 4] [--minutes 15] [--seeds 1,2] [--key value]

A corpus is LANGUAGE=FOLDER, in any layout that a recipe reads. Minutes are those of a processor, which hardly depend on
what else the machine does. The ways to train, which take turns:

- ``nothing`` is hparams/ctc.yaml, ``demo`` the same with ``--init_from`` a run of it that --source names: as many
  epochs as come closest to --minutes of training, by the speed of one epoch, with a schedule of that length;
- ``whisper`` is hparams/ssl.yaml on the encoder of --encoder, ``lora`` lora.yaml: --epochs of the corpus;
- ``speechbrain`` is SpeechBrain's recipe with the same encoder in its wrapper, peers/stock_whisper.py, for --minutes.

Other keys go to the recipe of every run. Each result is a file in FOLDER/results, so the same command continues where
it was stopped. FOLDER/real.md is the table: the test of the best checkpoint, and the dev CER after so many minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write
from tools.bench import transfer
from tools.bench.harness import RECIPE, ROOT, Results, as_words, call, discard, read_lines
from tools.bench.systems import score

RECIPES = {"nothing": RECIPE, "demo": RECIPE, "whisper": ROOT / "hparams" / "ssl.yaml",
           "lora": ROOT / "recipes" / "CommonVoice" / "ASR" / "CTC" / "hparams" / "lora.yaml"}
WAYS = (*RECIPES, "speechbrain")
HEAD = ("corpus", "from", "seed", "epochs", "processor minutes", "test WER", "test CER", "dev CER after minutes")
SHOWN = 5  # points of a curve


def main() -> int:
    args, keys = parse()
    try:
        print(Bench(args, keys).run())
    except SbkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into the program's options and the keys for every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, results and the table")
    parser.add_argument("--encoder", type=Path, required=True, help="Whisper's weights, as transformers saves them")
    parser.add_argument("--corpora", required=True, help="LANGUAGE=DATA_FOLDER, several with commas")
    parser.add_argument("--source", type=Path, help="the run that `demo` starts from")
    parser.add_argument("--ways", default="nothing,whisper,lora,speechbrain", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seeds", default="1,2")
    args, keys = parser.parse_known_args()
    args.ways = args.ways.split(",")
    if unknown := [way for way in args.ways if way not in WAYS]:
        parser.error(f"there is no way {unknown[0]}: choose of {', '.join(WAYS)}")
    if "demo" in args.ways and args.source is None:
        parser.error("the way demo starts from a run: --source RUN")
    return args, keys


class Bench:
    """The runs of the comparison, and the results that exist."""

    def __init__(self, args: argparse.Namespace, keys: list[str]):
        self.args, self.keys, self.out = args, keys, args.out.absolute()
        self.corpora = [word.partition("=") for word in args.corpora.split(",")]
        if wrong := [language for language, sign, folder in self.corpora if not sign or not Path(folder).exists()]:
            raise SbkitError(f"--corpora {wrong[0]}: there is no such folder", hint="write LANGUAGE=DATA_FOLDER")
        self.results = Results(self.out / "results", {"epochs": args.epochs, "minutes": args.minutes, "keys": keys})
        self.rows: list[tuple[str, str, str, dict[str, Any]]] = []

    def run(self) -> str:
        """Make the missing runs; returns the table."""
        for seed in self.args.seeds.split(","):
            for language, _, folder in self.corpora:
                for way in self.args.ways:
                    given = {"data_folder": Path(folder).resolve(), "language": language, "seed": seed}
                    self.rows.append((language, way, seed, self.measure(f"{language}.{way}.seed-{seed}", way, given)))
                    with atomic_write(self.out / "real.md") as file:
                        file.write(table(self.rows))
        return table(self.rows)

    def measure(self, name: str, way: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return a run's result from its file, or train it."""
        if (found := self.results.get(name)) is not None:
            return found
        if way == "speechbrain":
            found = self.peer(name, given)
        elif RECIPES[way] == RECIPE:
            one = self.results.get(f"{name}.one-epoch") or self.results.put(
                f"{name}.one-epoch", self.ours(f"{name}.one-epoch", way, given, 1))
            found = self.ours(name, way, given, max(1, round(60 * self.args.minutes / one["train_seconds"])))
        else:
            found = self.ours(name, way, given, self.args.epochs)
        print(f"{name}: test WER {found['wer']:.2f} %, CER {found['cer']:.2f} %", file=sys.stderr, flush=True)
        return self.results.put(name, found)

    def ours(self, name: str, way: str, given: dict[str, Any], epochs: int) -> dict[str, Any]:
        folder = self.out / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)  # one that was stopped would be resumed
        start = {"demo": {"init_from": self.args.source}, "nothing": {}}.get(
            way, {"encoder_source": self.args.encoder.resolve()})
        words = as_words({**given, **start, "number_of_epochs": epochs, "least_steps": 0, "output_folder": folder})
        began, used = time.perf_counter(), processor_seconds()
        call(name, [sys.executable, "-m", "sbkit", "train", RECIPES[way], "--noprogressbar", *words, *self.keys],
             self.out / "logs" / f"{name}.log")
        share = (processor_seconds() - used) / (time.perf_counter() - began)
        rates = transfer.read(folder)
        found = {**rates, "epochs": epochs, "train_seconds": share * rates["train_seconds"],
                 "curve": curve(read_lines(folder / "metrics.jsonl"), share)}
        discard(folder)
        return found

    def peer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        folder = self.out / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        words = as_words({**given, "output_folder": folder, "step_seconds": 40})
        call(name, [sys.executable, "-m", "tools.bench.peers.stock_whisper", folder / "answer.json",
                    self.args.encoder.resolve(), self.args.minutes, *words, *self.keys],
             self.out / "logs" / f"{name}.log")
        found = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        test = Manifest.read(folder / "manifests" / "test.csv")
        rates = score("test", dict(zip(test.ids, test.texts, strict=True)), found.pop("heard"))
        return {**found, "wer": rates["test_wer"], "cer": rates["test_cer"], "curve": []}


def processor_seconds() -> float:
    """Return the processor time of all programs that this one has run and that have ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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


def table(rows: list[tuple[str, str, str, dict[str, Any]]]) -> str:
    """Format the table in Markdown."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for corpus, way, seed, found in rows:
        points = found["curve"]
        few = points[::-(-(-len(points) // SHOWN) or 1)][::-1]  # the last one among them
        lines.append((corpus, way, seed, str(found["epochs"]), f"{found['train_seconds'] / 60:.1f}",
                      f"{found['wer']:.1f} %", f"{found['cer']:.1f} %",
                      ", ".join(f"{minutes:g}: {cer:g} %" for minutes, cer in few)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
