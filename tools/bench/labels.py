"""The gain of untranscribed hours: WER of a tenth of the demo corpus, and with ``sbkit label``'s labels for the rest.

    python -m tools.bench.labels --out FOLDER [--hours 3] [--rounds 1] [--keep 0.8] [--lm] [--key value ...]

A run of hparams/ctc.yaml on a random tenth of the training rows is exported, and `sbkit label` transcribes the others
with it, and with --lm also with a language model of only the tenth's texts. Another run, from random weights, learns
from the tenth and these labels; with --rounds 2 its bundle labels again. Other keys go to all runs; for a fair
comparison, --min_steps gives the tenth as many steps as the last run, whose corpus is larger. Printed are the test
WERs, with the language model too, their ratios to those of the tenth, the hours that were kept, and the WER of the
labels against the true texts. Results are in FOLDER/results, so the same command continues where it was stopped. The
exit code is 1 if the last ratio, without the language model, is more than --at-most (0.7).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.data.corpus import Corpus
from sbkit.data.demo import make_demo_corpus
from sbkit.data.manifest import Manifest
from sbkit.score.rates import ErrorRates
from tools.bench.harness import RECIPE, Results, as_words, parse_checked, program, rates_of, read_lines, sbkit

OWN = ("data_folder", "language", "output_folder")
GREEDY = "greedy"
_SHARE = 10


@program
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus, runs and labels")
    parser.add_argument("--hours", type=float, default=3.0, help="hours of speech in all splits together")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of labelling and training")
    parser.add_argument("--keep", type=float, default=0.8, help="expected word accuracy of labels that are kept")
    parser.add_argument("--lm", action="store_true", help="label with a language model of the tenth's texts")
    parser.add_argument("--at-most", type=float, default=0.7, help="the largest ratio of the WERs that passes")
    args, keys = parse_checked(parser, RECIPE, OWN)
    return int(Bench(args.out.absolute(), args.hours, args.keep, args.lm, keys).run(args.rounds) > args.at_most)


class Bench:
    """The corpus, a tenth of it with texts, and the runs."""

    def __init__(self, out: Path, hours: float, keep: float, lm: bool, keys: list[str]):
        self.out, self.keep, self.keys = out, keep, keys
        self.results = Results(out / "results", {"hours": hours, "keep": keep, "lm": lm, "keys": keys})
        self.lm = out / "tenth.arpa" if lm else None
        demo = make_demo_corpus(out / "demo", hours=hours)
        corpus = Corpus(str(demo), "en", out / "manifests", max_duration=20.0, min_duration=0.4)
        self.train = corpus.prepare()["train"]
        self.tenth, self.rest = out / "tenth.jsonl", out / "rest.jsonl"
        order = np.random.default_rng(1234).permutation(len(self.train))
        _write(self.tenth, self.train, order[: len(order) // _SHARE], texts=True)
        _write(self.rest, self.train, order[len(order) // _SHARE :], texts=False)

    def run(self, rounds: int) -> float:
        """Train, label and train again; returns the last WER as a share of the first."""
        first = last = self._trained("round-0", [self.tenth])
        for number in range(1, rounds + 1):
            labels = self._labelled(self.out / f"round-{number - 1}", self.out / f"labels-{number}")
            last = self._trained(f"round-{number}", [self.tenth, labels])
            print("ratio to round 0:", shown({way: last[way] / rate for way, rate in first.items()}), flush=True)
        return last[GREEDY] / first[GREEDY]

    def _trained(self, name: str, lists: list[Path]) -> dict[str, float]:
        """Train a run unless it is there; returns its test WERs by way of searching."""
        facts = self.results.get(name) or self.results.put(name, self._train(name, lists))
        wer: dict[str, float] = facts["wer"]
        print(f"{name}: test WER % after {facts['steps']:,} steps: {shown(wer)}", flush=True)
        return wer

    def _train(self, name: str, lists: list[Path]) -> dict[str, Any]:
        folder, log = self.out / name, self.out / "logs" / f"{name}.log"
        source: dict[str, str | list[str]] = {
            split: str(self.out / "manifests" / f"{split}.csv") for split in ("dev", "test")}
        source["train"] = [*map(str, lists)]
        words = as_words({"data_folder": json.dumps(source), "output_folder": folder})
        sbkit(name, ["train", RECIPE, "--noprogressbar", *words, *self.keys], log)
        wer, steps = {GREEDY: rates_of(folder)["wer"]}, read_lines(folder / "metrics.jsonl")[-1]["step"]
        if self.lm:
            if not self.lm.exists():
                sbkit("the language model", ["lm", self.out / "round-0", "--to", self.lm], log)
            scores = self.out / "evaluations" / name
            sbkit("the search", ["evaluate", folder, "--lm", self.lm, "--to", scores], log)
            [result] = scores.glob("*/result.json")
            wer["with the language model"] = json.loads(result.read_text())["WER"]
        return {"steps": steps, "wer": wer}

    def _labelled(self, run: Path, labels: Path) -> Path:
        """Label the rest unless that is done; returns the list of what is kept."""
        facts = self.results.get(labels.name) or self.results.put(labels.name, {"found": self._label(run, labels)})
        print(f"{labels.name}: {shown(facts['found'])}", flush=True)
        return labels / "train.jsonl"

    def _label(self, run: Path, labels: Path) -> dict[str, float]:
        log = self.out / "logs" / f"{labels.name}.log"
        if not (run / "bundle").exists():
            sbkit("the export", ["export", run, "--to", run / "bundle", "--formats", "onnx"], log)
        sbkit("the labels", ["label", run / "bundle", self.rest, "--to", labels, "--keep", self.keep, "--calibrate",
                             self.out / "manifests" / "dev.csv", *(["--lm", self.lm] if self.lm else [])], log)
        rows, rates = read_lines(labels / "train.jsonl"), ErrorRates("word")
        texts = dict(zip(self.train.ids, self.train.texts, strict=True))
        rates.add([row["id"] for row in rows], [texts[row["id"]] for row in rows], [row["text"] for row in rows])
        hours, right, there = (sum(row["duration"] * row.get(factor, 1) for row in lines) / 3600 for lines, factor in (
            (rows, ""), (rows, "confidence"), (read_lines(self.rest), "")))
        return {"hours": there, "hours kept": hours, "their WER %": rates.rate,
                "their expected word accuracy %": 100 * right / hours}


def shown(values: dict[str, float]) -> str:
    """Format named numbers for a line."""
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def _write(path: Path, manifest: Manifest, rows: np.ndarray, texts: bool) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for row in (manifest.row(int(i)) for i in rows):
            line = {"id": row.id, "audio_filepath": row.wav, "duration": row.duration, "speaker": row.speaker}
            file.write(json.dumps(line | ({"text": row.text} if texts else {}), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
