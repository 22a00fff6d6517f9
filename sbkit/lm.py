"""``sbkit lm``: a language model from text files, manifests and runs, and how well it expects other text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.decode import lm
from sbkit.errors import SbkitError

_STDIN = "-"


@dataclass(frozen=True)
class Request:
    """What a model is to be made of, and how: see :func:`sbkit.decode.lm.build`.

    sources : text files (``.gz`` too), ``-`` for stdin, manifests (``.csv``), and runs: their training transcripts
    out : an ARPA file (``.gz``: compressed), or KenLM's binary where it ends in ``.bin``
    like : the run that the model is for: all texts are written by its rules, and pieces are its tokenizer's. By
        default the first run among the sources
    evaluate : sources to report perplexity and unknown words on, a run's being its dev transcripts. By default those
        of ``like``, or else what the model is made of
    """

    sources: Sequence[str]
    out: Path
    like: str | None = None
    evaluate: Sequence[str] = ()
    order: int = 3
    prune: Sequence[int] | int | float | None = None
    unit: str = "word"
    min_count: int = 1
    binary: bool = False


def estimate(request: Request) -> int:
    """Make the model, write it, print the report; the exit code."""
    like = request.like or next((name for name in request.sources if Path(name).is_dir()), None)
    if request.unit == "piece" and like is None:
        raise SbkitError("a language model over pieces is made for the tokenizer of a run", hint="name it: --like RUN")
    run = _read_run(like) if like else {}
    # What is missing is said before anything takes time.
    sources = [_found(name, "train") for name in request.sources]
    held_out = [_found(name, "dev") for name in request.evaluate]
    if run and not held_out and run["corpus"].manifest_path("dev").is_file():
        held_out = [str(run["corpus"].manifest_path("dev"))]
    _check_writable(request.out)
    rules = run["corpus"].text if run else str
    try:
        report = lm.build(
            map(rules, _texts(sources)), request.out, order=request.order, prune=request.prune, unit=request.unit,
            tokenizer=run.get("tokenizer"), min_count=request.min_count,
            evaluate=map(rules, _texts(held_out)) if held_out else None, binary=request.binary)
    except OSError as error:
        raise _unwritable(request.out, error) from error
    print(report)
    return 0


def _read_run(folder: str) -> dict[str, Any]:
    from sbkit.runs import restore

    hparams = restore.read_run(folder)
    if "corpus" not in hparams or "tokenizer" not in hparams:
        raise SbkitError(f"the recipe of {folder} names no corpus or no tokenizer",
                         hint="give its transcripts as a file")
    return hparams


def _found(name: str, split: str) -> str:
    """The file that a source stands for; an error where there is none."""
    path = Path(name)
    if path.is_dir():
        path = _read_run(name)["corpus"].manifest_path(split)
    if name != _STDIN and not path.exists():  # it may be a pipe
        what = f"{name} has no transcripts of {split} ({path})" if Path(name).is_dir() else f"{name}: no such file"
        raise SbkitError(what, hint="name a text file, a manifest or a run")
    return str(path)


def _texts(files: Sequence[str]) -> Iterator[str]:
    """The texts of all files; an error where there are none, rather than a model or a perplexity of nothing."""
    empty = True
    for name in files:
        for text in _transcripts(name) if name.endswith(".csv") else lm.read_texts([name]):
            empty = empty and not text.strip()
            yield text
    if empty:
        raise SbkitError(f"there is no text in {', '.join('stdin' if name == _STDIN else name for name in files)}")


def _transcripts(path: str) -> Iterable[str]:
    from sbkit.data.delimited import read_delimited
    from sbkit.data.manifest import Column

    return Column(read_delimited(path, only=("wrd",)).need("wrd", hint="a manifest has its transcripts there"))


def _check_writable(path: Path) -> None:
    """Raise now, and not after the counting, where ``path`` can't be written."""
    if path.is_dir():
        raise SbkitError(f"{path} is a folder", hint="name a file for the model: --out words.arpa")
    there = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> SbkitError:
    return SbkitError(f"cannot write {path}: {error.strerror or error}", hint="choose another place with --out")
