"""How many wrong labels ``sbkit clean`` finds, and how much training without them lowers the WER.

    python -m tools.bench.clean --out FOLDER [--hours 1] [--levels 10,5,20] [--only RUN,...] [--key value ...]

A share of the demo corpus's training labels is made wrong, a third of it in each way:

- swapped: the label of another such row
- cut: a third to two thirds of the words are missing at the beginning or at the end
- misspelt: one letter is wrong in every third word, the longest first: two or three of about thirty-five letters

In as many other labels one word is another word of the corpus.

Dev and test are unchanged. For each level the recipe (hparams/ctc.yaml with the given keys) trains on all rows, on
those that ``sbkit clean`` keeps, and without the same number of random rows; ``original`` is trained on correct labels.
All have the same number of epochs. Runs and results are in FOLDER, so the same command continues where it was stopped;
``--only planted,found`` runs just these. FOLDER/clean.md is the table: for each kind, the share of the named rows with
its reasons whose labels are wrong, and the share of its rows that are named.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sbkit.data import suspects
from sbkit.data.delimited import read_delimited
from sbkit.data.manifest import Manifest
from sbkit.data.suspects import Exclusions
from sbkit.score import label_errors
from sbkit.system.console import atomic_write
from tools.bench.harness import RECIPE, as_words, markdown, parse_checked, program, rates_of, sbkit

OWN = ("data_folder", "seed", "output_folder", "corpus")  # keys that it sets
KINDS = ("swapped", "cut", "misspelt")
ONE_WORD = "one word"
_ALL = (*KINDS, ONE_WORD)
#: The kind that a reason speaks of; the others are "swapped".
REASONS = {label_errors.MORE_SPEECH: "cut", label_errors.SPELLING: "misspelt", label_errors.ONE_WORD: ONE_WORD}
RUNS = ("original", "planted", "found", "without found", "without as many")


class Planted(NamedTuple):
    """A training row with its label, and how it was made wrong: one of ``KINDS`` or ``ONE_WORD``, "" if it is right."""

    id: str
    text: str
    kind: str


def by_lot(rows: int, count: int, seed: int) -> list[int]:
    """Draw rows for comparison; the seed alone would draw the very ones that ``plant`` makes wrong."""
    return random.Random(f"by lot {seed}").sample(range(rows), count)


def plant(rows: Sequence[tuple[str, str]], share: float, seed: int) -> list[Planted]:
    """Make the labels of a share of the rows (id, text) wrong, in their order, and one word of as many others."""
    draw = random.Random(seed)
    chosen = draw.sample(range(len(rows)), round(share * len(rows)))
    kinds = {index: KINDS[number % len(KINDS)] for number, index in enumerate(chosen)}
    by_word = random.Random(f"one word {seed}")
    kinds |= dict.fromkeys(by_word.sample(sorted(set(range(len(rows))) - kinds.keys()), len(kinds)), ONE_WORD)
    said = [word.strip(string.punctuation) for _, text in rows for word in text.split()]
    swapped = [index for index, kind in kinds.items() if kind == "swapped"]
    other = dict(zip(swapped, swapped[1:] + swapped[:1], strict=True))
    wrong = []
    for index, (name, text) in enumerate(rows):
        kind = kinds.get(index, "")
        if kind == "swapped":
            text = rows[other[index]][1]
        elif kind == ONE_WORD:
            words = text.split()
            at = by_word.randrange(len(words))
            right = words[at].strip(string.punctuation).lower()
            words[at] = by_word.choice([word for word in said if word.lower() != right])
            text = " ".join(words)
        elif kind:
            text = (cut if kind == "cut" else misspelt)(text, draw)
        wrong.append(Planted(name, text, kind))
    return wrong


def cut(text: str, draw: random.Random) -> str:
    """Leave out a third to two thirds of the words at one end."""
    words = text.split()
    gone = max(1, round(draw.uniform(1 / 3, 2 / 3) * len(words)))
    return " ".join(words[gone:] if draw.random() < 0.5 else words[:-gone])


def misspelt(text: str, draw: random.Random) -> str:
    """Change a letter in a third of the words, the longest."""
    words = text.split()
    for index in sorted(range(len(words)), key=lambda i: -len(words[i]))[:max(1, round(len(words) / 3))]:
        letters = [i for i, letter in enumerate(words[index]) if letter.isalpha()]
        at = draw.choice(letters)
        letter = draw.choice([each for each in string.ascii_lowercase if each != words[index][at].lower()])
        words[index] = words[index][:at] + letter + words[index][at + 1:]
    return " ".join(words)


@program
def main() -> int:
    args = parse()
    bench = Bench(args)
    for level in args.levels:
        for run in args.only:
            bench.make(level, run)
    print(bench.table())
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of corpora, runs and the table")
    parser.add_argument("--hours", type=float, default=1.0, help="size of the demo corpus (1)")
    parser.add_argument("--levels", default="10,5,20", type=lambda text: [int(word) for word in text.split(",")],
                        help="percentages of training labels to make wrong")
    parser.add_argument("--only", default=RUNS, type=lambda text: text.split(","), help="which of the runs to do")
    parser.add_argument("--smaller", default="--number_of_epochs 1 --min_steps 600", help="keys of the clean's runs")
    parser.add_argument("--seed", type=int, default=1)
    args, keys = parse_checked(parser, RECIPE, OWN)
    args.keys = keys
    if unknown := [run for run in args.only if run not in RUNS]:
        parser.error(f"there is no run {unknown[0]!r}: choose of {', '.join(RUNS)}")
    return args


class Bench:
    """Corpora with wrong labels, and the runs on them."""

    def __init__(self, args: argparse.Namespace):
        from sbkit.data.demo import make_demo_corpus

        self.args = args
        self.out: Path = args.out.absolute()
        self.demo = Path(make_demo_corpus(self.out / "demo", hours=args.hours))

    def make(self, level: int, run: str) -> None:
        """Make one of the ``RUNS``; returns at once if it is complete."""
        folder = self._folder(level, run)
        keys = {"data_folder": self.demo if run == "original" else self._corpus(level), "seed": self.args.seed,
                "output_folder": folder}
        command, more = "train", ["--noprogressbar"]
        if run == "found":
            command, more = "clean", self.args.smaller.split()
        elif run.startswith("without"):
            keys["corpus.exclude"] = self._list(level, run)
        sbkit(run, [command, RECIPE, *as_words(keys), *self.args.keys, *more], self.out / "logs" / f"{folder.name}.log")

    def _folder(self, level: int, run: str) -> Path:
        return self.out / "runs" / ("original" if run == "original" else f"{level}-{run.replace(' ', '-')}")

    def _corpus(self, level: int) -> Path:
        """Write a corpus with wrong training labels, once."""
        folder = self.out / "corpora" / f"planted-{level}" / "en"
        if (folder / "planted.json").exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.demo.iterdir():
            if path.name != "train.tsv" and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        with (self.demo / "train.tsv").open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        planted = plant([(row["path"], row["sentence"]) for row in table], level / 100, self.args.seed)
        with atomic_write(folder / "train.tsv") as out:
            out.write("\t".join(table[0]) + "\n")
            for row, wrong in zip(table, planted, strict=True):
                out.write("\t".join((row | {"sentence": wrong.text}).values()) + "\n")
        with atomic_write(folder / "planted.json") as out:
            json.dump({Path(row.id).stem: row.kind for row in planted if row.kind}, out, indent=1)
        return folder

    def _list(self, level: int, run: str) -> Path:
        """The list that was found, or one of as many rows drawn by lot."""
        found = self._folder(level, "found") / "clean" / "suspects.csv"
        if run == "without found":
            return found
        corpus = Manifest.read(self._folder(level, "found") / "manifests" / "train.csv")
        count, path = len(Exclusions.read(found).labels), self._corpus(level) / "as-many.csv"
        if not path.exists():
            suspects.write(path, [
                suspects.Suspect(row.id, suspects.DROP, "by lot", 0.0, 1.0, row.text, "", "", row.wav, str(self.demo))
                for row in map(corpus.row, by_lot(len(corpus), count, self.args.seed))])
        return path

    # ------------------------------------------------------------ the table

    def table(self) -> str:
        """Format what is there, in Markdown, and keep it."""
        head = ["wrong labels", "named", "precision, recall", *(f"{kind}: precision, recall" for kind in _ALL),
                *(f"WER, {run}" for run in RUNS if run != "found")]
        text = markdown(head, map(self._row, self.args.levels))
        with atomic_write(self.out / "clean.md") as file:
            file.write(text)
        return text

    def _row(self, level: int) -> list[str]:
        wers = [f"{rates_of(folder)['wer']:.2f} %" if (folder / "tested.json").exists() else "" for folder in (
            self._folder(level, run) for run in RUNS if run != "found")]
        path = self._folder(level, "found") / "clean" / "suspects.csv"
        if not path.exists():
            return [f"{level} %", *[""] * (2 + len(_ALL)), *wers]
        listed = read_delimited(path)
        named = {name: REASONS.get(reason, "swapped") for name, reason, decision in zip(
            *(listed.columns[each].to_pylist() for each in ("ID", "reason", "decision")), strict=True)
            if decision != suspects.KEEP}
        planted = json.loads((self._corpus(level) / "planted.json").read_text(encoding="utf-8"))

        def rates(kinds: Sequence[str]) -> str:
            of_reason = [name for name, kind in named.items() if kind in kinds]
            of_kind = [name for name, kind in planted.items() if kind in kinds]
            return ", ".join(f"{sum(name in others for name in names) / max(1, len(names)):.2f}"
                             for names, others in ((of_reason, planted), (of_kind, named)))

        return [f"{level} %", str(len(named)), rates(_ALL), *(rates([kind]) for kind in _ALL), *wers]


if __name__ == "__main__":
    sys.exit(main())
