"""``sbkit lm``: estimate a language model from text, for a search with --lm."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sbkit.commands.options import RUNS_CODE
from sbkit.errors import SbkitError
from sbkit.system import disk


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = RUNS_CODE
    parser.add_argument("sources", metavar="TEXT", nargs="+",
                        help="text files (.gz too), - for stdin, manifests, or runs (their training transcripts)")
    parser.add_argument("--to", dest="out", metavar="FILE", type=Path, required=True,
                        help="output: an ARPA file (.gz: compressed)")
    parser.add_argument("--order", type=int, default=3, metavar="N", help="words in the longest n-gram (3)")
    parser.add_argument("--prune", type=_prune, metavar="P",
                        help="1e-7: drop n-grams that change the perplexity by less; "
                        "0,0,1: drop n-grams seen this often or less, one number per order")
    parser.add_argument("--unit", choices=["word", "piece"], default="word",
                        help="words, or pieces of the run's tokenizer")
    parser.add_argument("--min-count", type=int, default=1, metavar="N", help="rarer words become the unknown word")
    parser.add_argument("--like", metavar="RUN",
                        help="the run that the model is for: texts are normalised by its rules")
    parser.add_argument("--evaluate", metavar="TEXT", nargs="+", default=[],
                        help="text to report perplexity and unknown words on (default: the run's dev transcripts)")


def _prune(text: str) -> list[int] | int | float:
    with contextlib.suppress(ValueError):
        if "," in text:
            return [int(count) for count in text.split(",")]
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a threshold such as 1e-7 nor counts such as 0,0,1")


def run(args: argparse.Namespace) -> int:
    from sbkit.decode import lm

    run_folders = [name for name in args.sources if Path(name).is_dir()]
    like = args.like or (run_folders[0] if run_folders else None)
    if args.unit == "piece" and like is None:
        raise SbkitError("missing-option", "a language model over pieces needs the tokenizer of a run",
                         hint="name the run: --like RUN", key="--like")
    run = _read_run(like) if like else None
    # Report what is missing before anything takes time.
    sources = [_find(name, "train") for name in args.sources]
    held_out = [_find(name, "dev") for name in args.evaluate]
    if run and not held_out and run.corpus.manifest_path("dev").is_file():
        held_out = [str(run.corpus.manifest_path("dev"))]
    disk.check_writable(args.out, "--to")
    rules = run.corpus.rules_of if run else lambda file: str
    try:
        report = lm.build(
            _texts(sources, rules), args.out, order=args.order, prune=args.prune, unit=args.unit,
            tokenizer=None if run is None else run.tokenizer, min_count=args.min_count,
            evaluate=_texts(held_out, rules) if held_out else None,
            held_out=", ".join("stdin" if name == "-" else name for name in held_out))
    except OSError as error:
        raise disk.unwritable(args.out, "--to", error) from error
    print(report)
    return 0


def _read_run(folder: str) -> Any:  # its task's own keys
    """Read the keys of a run's recipe, corpus and tokenizer included."""
    from sbkit.runs import restore

    keys = restore.read_run(folder).keys
    if not hasattr(type(keys), "declared") or "tokenizer" not in keys.declared():
        raise SbkitError("wrong-task", f"the recipe of {folder} has no tokenizer",
                         hint="pass its transcripts as a file", file=folder)
    return keys


def _find(name: str, split: str) -> str:
    """The file that a source stands for; raises if there is none."""
    path = _read_run(name).corpus.manifest_path(split) if Path(name).is_dir() else Path(name)
    if name != "-" and not path.exists():  # it may be a pipe
        what = f"{name} has no transcripts of {split}: there is no {path}" if Path(name).is_dir() else \
            f"{name} does not exist"
        raise SbkitError("no-such-path", what, hint="name a text file, a manifest or a run", file=path)
    return str(path)


def _texts(files: Sequence[str], rules_of: Callable[[str], Callable[[str], str]]) -> Iterator[str]:
    """Yield the texts of all files, normalised by their rules; raises if there are none."""
    from sbkit.data.delimited import read_delimited
    from sbkit.data.manifest import Column
    from sbkit.decode import lm

    is_empty = True
    for name in files:
        lines: Iterable[str]
        if name.endswith(".csv"):
            table = read_delimited(name, only=("wrd",))
            lines = Column(table.need("wrd", hint="that column of a manifest has the transcripts"))
        else:
            lines = lm.read_texts([name])
        for text in map(rules_of(name), lines):
            is_empty = is_empty and not text.strip()
            yield text
    if is_empty:
        names = ", ".join("stdin" if name == "-" else name for name in files)
        raise SbkitError("no-text", f"there is no text in {names}", hint="name files with a sentence per line")
