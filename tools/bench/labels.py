"""The gain of hours without labels: WER of a tenth of the demo corpus, and of that with the rest as a bundle hears it.

    python -m tools.bench.labels --out FOLDER [--hours 3] [--rounds 1] [--keep 0.8] [--lm] [--key value ...]

A run of hparams/ctc.yaml on a random tenth of the training rows is exported, and `sbkit label` transcribes the others
with it, and with a language model of the tenth's texts if --lm is given. Another run, from nothing, learns from the
tenth and these labels; with --rounds 2 its bundle labels again. Other keys go to all runs; a fair --least_steps gives
the tenth as many steps as the last run, whose corpus is larger. Printed are the test WERs with their ratio to that of
the tenth, the hours that were kept, and the WER of the labels themselves, by the texts that nobody was shown. The same
command goes on where it was stopped. The exit code is 1 if the last ratio is more than --at-most (0.7).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from sbkit.data.corpus import Corpus
from sbkit.data.demo import make_demo_corpus
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.score.rates import ErrorRates
from tools.bench.harness import RECIPE, as_words, call, parse_checked, read_lines
from tools.bench.transfer import read

OWN = ("data_folder", "language", "output_folder")
SBKIT = [sys.executable, "-m", "sbkit"]
_SHARE = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus, runs and labels")
    parser.add_argument("--hours", type=float, default=3.0, help="of speech, in all splits together")
    parser.add_argument("--rounds", type=int, default=1, help="how often labels are made and learnt from")
    parser.add_argument("--keep", type=float, default=0.8, help="expected word accuracy of labels that are kept")
    parser.add_argument("--lm", action="store_true", help="label with a language model of the tenth's texts")
    parser.add_argument("--at-most", type=float, default=0.7, help="the largest ratio of the WERs that passes")
    args, keys = parse_checked(parser, RECIPE, OWN)
    try:
        ratio = Bench(args.out.absolute(), args.hours, args.keep, args.lm, keys).run(args.rounds)
    except SbkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return int(ratio > args.at_most)


class Bench:
    """The corpus, a tenth of it with texts, and the runs."""

    def __init__(self, out: Path, hours: float, keep: float, lm: bool, keys: list[str]):
        self.out, self.keep, self.keys = out, keep, keys
        self.lm = out / "tenth.arpa" if lm else None
        demo = make_demo_corpus(out / "demo", hours=hours)
        corpus = Corpus(str(demo), "en", out / "manifests", max_duration=20.0, min_duration=0.4)
        self.said = corpus.prepare()["train"]
        self.tenth, self.rest = out / "tenth.jsonl", out / "rest.jsonl"
        order = np.random.default_rng(1234).permutation(len(self.said))
        _write(self.tenth, self.said, order[: len(order) // _SHARE], texts=True)
        _write(self.rest, self.said, order[len(order) // _SHARE :], texts=False)

    def run(self, rounds: int) -> float:
        """Train, label and train again; returns the last WER as a share of the first."""
        first = wer = self._train("round-0", [self.tenth])
        for number in range(1, rounds + 1):
            labels = self._label(self.out / f"round-{number - 1}", self.out / f"labels-{number}")
            wer = self._train(f"round-{number}", [self.tenth, labels])
            print(f"ratio to round 0: {wer / first:.2f}", flush=True)
        return wer / first

    def _train(self, name: str, lists: list[Path]) -> float:
        folder = self.out / name
        source: dict[str, str | list[str]] = {
            split: str(self.out / "manifests" / f"{split}.csv") for split in ("dev", "test")}
        source["train"] = [*map(str, lists)]
        words = as_words({"data_folder": json.dumps(source), "output_folder": folder})
        call(name, [*SBKIT, "train", RECIPE, "--noprogressbar", *words, *self.keys],
             self.out / "logs" / f"{name}.log")
        wer, steps = read(folder)["wer"], max(line.get("step", 0) for line in read_lines(folder / "metrics.jsonl"))
        print(f"{name}: test WER {wer:.2f} % after {steps:,} steps{self._searched(name)}", flush=True)
        return wer

    def _searched(self, name: str) -> str:
        """Return the WER of a run with the language model, as text."""
        if self.lm is None:
            return ""
        log, out = self.out / "logs" / f"{name}.log", self.out / "evaluations"
        if not self.lm.exists():
            call("the language model", [*SBKIT, "lm", self.out / "round-0", "--out", self.lm], log)
        call("the search", [*SBKIT, "evaluate", self.out / name, "--lm", self.lm, "--name", name, "--out", out], log)
        [folder] = out.glob(f"{name}-*")
        return f"; with the language model {json.loads((folder / 'result.json').read_text())['WER']:.2f} %"

    def _label(self, run: Path, labels: Path) -> Path:
        log = self.out / "logs" / f"{labels.name}.log"
        if not (run / "bundle").exists():
            call("the export", [*SBKIT, "export", run, "--to", run / "bundle", "--formats", "onnx"], log)
        call("the labels", [*SBKIT, "label", run / "bundle", self.rest, "--to", labels, "--keep", self.keep,
                            "--calibrate", self.out / "manifests" / "dev.csv",
                            *(["--lm", self.lm] if self.lm else [])], log)
        rows, rates = read_lines(labels / "train.jsonl"), ErrorRates("word")
        texts = dict(zip(self.said.ids, self.said.texts, strict=True))
        rates.add([row["id"] for row in rows], [texts[row["id"]] for row in rows], [row["text"] for row in rows])
        hours, expected = (sum(row["duration"] * factor for row, factor in zip(rows, factors, strict=True)) / 3600
                           for factors in ([1.0] * len(rows), [row["confidence"] for row in rows]))
        there = sum(row["duration"] for row in read_lines(self.rest)) / 3600
        print(f"{labels.name}: {hours:.2f} of {there:.2f} hours kept, of their words {rates.rate:.1f} % wrong, "
              f"expected word accuracy {100 * expected / hours:.1f} %", flush=True)
        return labels / "train.jsonl"


def _write(path: Path, manifest: Manifest, rows: np.ndarray, texts: bool) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for row in (manifest.row(int(i)) for i in rows):
            line = {"id": row.id, "audio_filepath": row.wav, "duration": row.duration, "speaker": row.speaker}
            file.write(json.dumps(line | ({"text": row.text} if texts else {}), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
