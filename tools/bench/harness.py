"""What benchmarks share: keys of a recipe, programs with a log, and results on disk that a second call reuses."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "hparams" / "ctc.yaml"


def program(main: Callable[[], int]) -> Callable[[], int]:
    """Decorate a benchmark's main function: an error that its user can mend is a line, as with sbkit's commands."""
    @functools.wraps(main)
    def run() -> int:
        try:
            return main()
        except SbkitError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("\nstopped; the same command runs what is missing", file=sys.stderr)
            return 130
    return run


def check_keys(recipe: Path, words: list[str], own: Collection[str] = ()) -> None:
    """Refuse words that are no options of the benchmark, unless they are ``--key value`` of its recipe.

    own : keys that the benchmark itself gives each run
    """
    from sbkit.recipe import arguments
    from sbkit.recipe.check import check

    options = "--help lists this program's own options"
    request = arguments.parse([str(recipe), *words], importable=False)
    if taken := sorted(request.overrides.keys() & own):
        raise SbkitError("bench", f"--{taken[0]} is set by this program for each run", hint=options)
    if wrong := [each for each in check(request.path, request.overrides, run=False).errors if each.key not in own]:
        raise SbkitError("bench", "; ".join(f"{each.key}: {each.message}" for each in wrong),
                         hint=wrong[0].suggestion if wrong[0].suggestion.startswith("did you") else options)


def parse_checked(parser: argparse.ArgumentParser, recipe: Path,
                  own: Collection[str] = ()) -> tuple[argparse.Namespace, list[str]]:
    """Parse a benchmark's own options; the rest are ``--key value`` of its recipe, which are checked."""
    args, words = parser.parse_known_args()
    try:
        check_keys(recipe, words, own)
    except SbkitError as error:
        parser.error(str(error))
    return args, words


def positive(text: str) -> float:
    """Read a number above 0, for argparse."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def whole_numbers(text: str) -> list[int]:
    """Read whole numbers with commas between them, for argparse; '' has none."""
    return [int(word) for word in text.split(",") if word]


def as_words(keys: Mapping[str, Any]) -> list[str]:
    """Return keys of a recipe as words of a command line."""
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def call(name: str, command: Sequence[Any], log: Path, threads: int | None = None) -> None:
    """Run a program with its output added to a log; raises with the log's last line if it fails.

    name : of the run, in the message
    """
    words = [str(word) for word in command]
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as out:
        print("$", *words, file=out, flush=True)
        code = subprocess.run(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                              check=False).returncode
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-1]
        raise SbkitError("bench", f"{name} ended with code {code}: {last}", hint=f"its log is {log}")


def sbkit(name: str, words: Sequence[Any], log: Path, threads: int | None = None) -> None:
    """Run a command of sbkit, as ``call`` does."""
    call(name, [sys.executable, "-m", "sbkit", *words], log, threads)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def processor_seconds() -> float:
    """Return the processor time of all programs that this one has run and that have ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rates_of(folder: Path) -> dict[str, float]:
    """Read a run's test WER and CER, and its seconds of training."""
    lines = read_lines(folder / "metrics.jsonl")
    test = [line for line in lines if line["kind"] == "test"]
    return {"wer": test[-1]["test_WER"], "cer": test[-1]["test_CER"],
            "train_seconds": sum(line.get("train_seconds", 0.0) for line in lines if line["kind"] == "epoch")}


class Results:
    """A folder with one JSON file per run, all measured with the same options.

    folder : holds the files
    options : what is the same for all runs; a result with others is refused
    """

    def __init__(self, folder: Path, options: dict[str, Any]):
        self.folder, self.options = folder, options

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the result of a run; None if it is missing."""
        path = self.folder / f"{name}.json"
        return self._read(path) if path.is_file() else None

    def put(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Keep the result of a run, and return it."""
        facts = {"options": self.options, **facts}
        with atomic_write(self.folder / f"{name}.json") as file:
            json.dump(facts, file, indent=1, ensure_ascii=False)
        return facts

    def every(self) -> list[dict[str, Any]]:
        """Return all results."""
        return [self._read(path) for path in sorted(self.folder.glob("*.json"))]

    def _read(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["options"] != self.options:
            raise SbkitError("bench", f"{path} was measured with other options: {found['options']}, now {self.options}",
                             hint="choose another --out for these, or remove the results")
        return found
