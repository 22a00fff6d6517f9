"""What replay saves and costs: a model learns a second corpus with and without replaying the first one.

    python -m tools.bench.replay --out FOLDER --source RUN --corpora es=DATA_FOLDER:6[,cs=DATA_FOLDER:5] [--replay 0.2]
        [--key value ...]

A corpus is LANGUAGE=FOLDER:EPOCHS, in any layout that a recipe reads. On each, hparams/ctc.yaml starts from the run
--source and trains for these epochs, once with --replay and once without. Both are scored on the test of --source; the
table has 95 % intervals. Other keys go to the recipe of every run. Each result is a file in FOLDER/results, so the same
command continues where it was stopped. FOLDER/replay.md is the table.

The exit code is 1 if with replay the WER on the old corpus leaves its earlier interval, or the WER on the new one is
more than a tenth above that without replay.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.runs.replay import NEW
from sbkit.score.old_set import OldSet
from sbkit.score.run_files import EVALUATIONS, RESULT, TESTED
from sbkit.system.console import atomic_write
from tools.bench.harness import RECIPE, Results, as_words, markdown, parse_checked, program, sbkit

MOST = 1.1  # times the new WER without replay
OWN = ("data_folder", "language", "number_of_epochs", "init_from", "output_folder", "replay")  # keys that it sets
HEAD = ("corpus", "way", "new WER", "old WER before", "old WER after", "the mean that saves the old")


@program
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, results and the table")
    parser.add_argument("--source", type=Path, required=True, help="the run to start from")
    parser.add_argument("--corpora", required=True, help="LANGUAGE=FOLDER:EPOCHS, several with commas")
    parser.add_argument("--replay", type=float, default=0.2)
    args, keys = parse_checked(parser, RECIPE, OWN)
    return Bench(args, keys).run()


class Bench:
    """The runs of the comparison, and the results that exist."""

    def __init__(self, args: argparse.Namespace, keys: list[str]):
        self.args, self.keys, self.out, self.source = args, keys, args.out.absolute(), args.source.absolute()
        self.results = Results(self.out / "results", {"source": str(self.source), "keys": keys})

    def run(self) -> int:
        """Make the missing runs, and print the table; returns the exit code."""
        rows: list[tuple[str, ...]] = []
        code = 0
        for word in self.args.corpora.split(","):
            language, _, rest = word.partition("=")
            folder, _, epochs = rest.rpartition(":")
            if not Path(folder).exists() or not epochs.isdigit():
                raise SbkitError("bench", f"--corpora {word}: there is no such folder, or no number of epochs",
                                 hint="write LANGUAGE=DATA_FOLDER:EPOCHS")
            given = {"data_folder": Path(folder).resolve(), "language": language, "number_of_epochs": epochs}
            with_replay = self.measure(f"{language}.replay-{self.args.replay:g}", {**given, "replay": self.args.replay})
            without = self.measure(f"{language}.without", given)
            rows += [row(language, "without replay", without, with_replay), row(
                language, f"`--replay {self.args.replay:g}`", with_replay, with_replay)]
            known = OldSet(**with_replay["before"])
            code |= known.is_worse(with_replay["old"]) or with_replay["new"] > MOST * without["new"]
            with atomic_write(self.out / "replay.md") as file:
                file.write(markdown(HEAD, rows))
        print(markdown(HEAD, rows))
        return code

    def measure(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return a run's result from its file, or train it and score it on the source's test."""
        if (found := self.results.get(name)) is not None:
            return found
        folder, log = self.out / "runs" / name, self.out / "logs" / f"{name}.log"
        shutil.rmtree(folder, ignore_errors=True)  # one that was stopped would be resumed
        words = as_words({**given, "init_from": self.source, "min_steps": 0, "output_folder": folder})
        sbkit(name, ["train", RECIPE, "--noprogressbar", *words, *self.keys], log)
        sbkit(name, ["evaluate", folder, "--data_folder", self.source / "manifests" / "test.csv", "--name", "old",
                     "--workers", 0], log)
        tested = json.loads((folder / TESTED).read_text(encoding="utf-8"))
        old = json.loads((folder / EVALUATIONS / "old-best" / RESULT).read_text(encoding="utf-8"))
        before = OldSet.read(folder)
        return self.results.put(name, {
            "new": tested.get(f"WER {NEW}", tested["WER"]), "said": tested["said"], "old": old["WER"],
            "old_interval": old["WER_interval"], "before": None if before is None else vars(before)})


def row(corpus: str, way: str, found: dict[str, Any], other: dict[str, Any]) -> tuple[str, ...]:
    """A run's line of the table; ``other`` has the initial model's score on the old test."""
    before, mean = other["before"], found["before"] or {}
    saved = "" if mean.get("share") is None else \
        f"{mean['share']:g} of the new: new WER {mean['new']:.1f}, old {mean['old']:.1f} %"
    return (corpus, way, f"{found['new']:.1f} %", interval(before["before"], before["interval"]),
            interval(found["old"], found["old_interval"]), saved)


def interval(rate: float, bounds: tuple[float, float]) -> str:
    return f"{rate:.1f} % ({bounds[0]:.1f} to {bounds[1]:.1f})"


if __name__ == "__main__":
    sys.exit(main())
