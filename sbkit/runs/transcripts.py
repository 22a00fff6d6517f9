"""Texts of files, manifests and runs, to make a language model from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sbkit.decode import lm
from sbkit.errors import SbkitError

_STDIN = "-"


def read_run(folder: str) -> Any:  # its task's own keys
    """Read the keys of a run's recipe, corpus and tokenizer included."""
    from sbkit.runs import restore

    keys = restore.read_run(folder).keys
    if not hasattr(type(keys), "declared") or "tokenizer" not in keys.declared():
        raise SbkitError(f"the recipe of {folder} has no tokenizer", hint="pass its transcripts as a file")
    return keys


def find(name: str, split: str) -> str:
    """The file that a source stands for; raises if there is none."""
    path = Path(name)
    if path.is_dir():
        path = read_run(name).corpus.manifest_path(split)
    if name != _STDIN and not path.exists():  # it may be a pipe
        what = f"{name} has no transcripts of {split} ({path})" if Path(name).is_dir() else f"{name}: no such file"
        raise SbkitError(what, hint="name a text file, a manifest or a run")
    return str(path)


def texts(files: Sequence[str], rules_of: Callable[[str], Callable[[str], str]]) -> Iterator[str]:
    """Yield the texts of all files by their rules; raises if there are none, rather than making a model of nothing."""
    empty = True
    for name in files:
        for text in map(rules_of(name), _transcripts(name) if name.endswith(".csv") else lm.read_texts([name])):
            empty = empty and not text.strip()
            yield text
    if empty:
        raise SbkitError(f"there is no text in {', '.join('stdin' if name == _STDIN else name for name in files)}")


def _transcripts(path: str) -> Iterable[str]:
    from sbkit.data.delimited import read_delimited
    from sbkit.data.manifest import Column

    return Column(read_delimited(path, only=("wrd",)).need("wrd", hint="that column of a manifest has the transcripts"))
