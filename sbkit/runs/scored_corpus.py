"""The corpus that an evaluation scores: the run's own test set, another split, or another corpus."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sbkit.data.columns import Declared
from sbkit.data.corpus import Corpus
from sbkit.data.remote import Remote
from sbkit.data.sources import ONE_SPLIT, Named, Source
from sbkit.data.splits import ALIASES
from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe
from sbkit.runs import trained_on
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.score.run_files import CORPORA
from sbkit.system import disk

_TEST = ("test", "testing")  # names of the split that is scored by default


class ScoredCorpus(NamedTuple):
    """What an evaluation scores."""

    name: str
    """Of the folder with the results, before what it says of the weights."""
    manifest: Path
    remote: Remote
    """Which URLs in the manifest may be opened."""


def find(request: EvaluateRequest, recipe: Recipe) -> ScoredCorpus:
    """Find what a request names, and prepare it unless it is a prepared split of the run."""
    own = recipe.keys.corpus
    if (request.on or "").startswith("{"):
        raise SbkitError("bad-option",
                         f"--data_folder is a mapping of several splits, {request.on}, but one split is scored",
                         hint="name its list: --data_folder test.csv", key="data_folder", value=request.on)
    split = request.split or "test"
    is_own = request.on is None and request.data_root is None
    if request.split and is_own and not own.manifest_path(split).is_file() and split not in own.names():
        split = next((name for name, aliases in ALIASES.items() if split.lower() in aliases), split)
    if is_own and own.manifest_path(split).is_file():
        trained_on.check(request.run, own, split)
        name, corpus = request.name or split, own
    else:
        split = "test"
        source = own.source if request.on is None else request.on
        name, corpus = prepare(request, own, source, recipe.task.needs_text(), recipe.task.columns)
    recipe.task.check_manifest(recipe.keys, split, corpus.manifest(split))
    return ScoredCorpus(name, corpus.manifest_path(split), corpus.remote)


def prepare(request: EvaluateRequest, own: Corpus, source: Named | Source | None, needs_text: bool = True,
            columns: Declared | None = None) -> tuple[str, Corpus]:
    """Prepare the split to score: the run's own, or another corpus's with texts normalised by the run's rules.

    Returns the name of its results, and the corpus, whose split is called test.
    """
    if isinstance(source, Source):
        title = request.name or source.kind
    elif source:
        title = request.name or Path(str(source).split("?")[0]).name.split(".")[0]
    else:
        title = request.name or "demo"
    if isinstance(source, str) and source.endswith(ONE_SPLIT):
        source = {"test": source}
    corpora = request.folder / CORPORA

    def corpus_of(split: str, folder: Path) -> Corpus:
        return _corpus_of(request, own, source, columns or {}, split, folder)

    try:
        split = request.split or _only_test(corpus_of("test", corpora / title).names(), source, request)
        if split.lower() not in _TEST and request.name is None:
            title += f"-{split}"
        corpus = corpus_of(split, corpora / title)
        with disk.writing_into(corpora, "--to"):
            corpus.prepare(needs_text=needs_text, columns=columns)
    except SbkitError as error:
        if request.on is not None:
            raise
        # The command did not name this corpus.
        raise SbkitError(error.code, f"the corpus of {request.run}: {error.message}", hint=error.hint,
                         file=error.file, line=error.line, key=error.key) from error
    print(corpus.summary(), file=sys.stderr)
    return title, corpus


def _corpus_of(request: EvaluateRequest, own: Corpus, source: Named | Source | None, columns: Declared, split: str,
               folder: Path) -> Corpus:
    """The corpus whose test split is a split of the source, prepared in ``folder``."""
    if request.on is None and request.data_root is None:
        return own.only_split(split, folder)
    root: str | Path | None = request.data_root
    if root is None and _is_of(request.on or "", own):
        root = own.data_root
    own_names = {role: name for role, name in own.columns.items() if role in columns}
    return Corpus(source, own.language, folder, splits={"test": split}, text=own.text, only=("test",),
                  columns=own_names, data_root=root, schemes=own.schemes, url_megabytes=own.url_megabytes,
                  url_seconds=own.url_seconds)


def _only_test(names: list[str], source: Named | Source | None, request: EvaluateRequest) -> str:
    """The split to score if the command names none: the test, or the only one of a corpus that the command names."""
    # A run's own only list is what it was trained on.
    alone = names[0] if len(names) == 1 and request.on is not None else None
    split = next((name for name in names if name.lower() in _TEST), alone)
    if split is None:
        raise SbkitError("missing-split", f"{source} has no test split (it has {', '.join(names) or 'none'})",
                         hint="choose one with --split")
    return split


def _is_of(path: str, corpus: Corpus) -> bool:
    """Whether a path is one of a corpus' sources, or lies directly in one."""
    real = os.path.realpath(path)
    sources = corpus.source.values() if isinstance(corpus.source, Mapping) else [corpus.source]
    real_sources = {os.path.realpath(source) for source in sources if isinstance(source, str)}
    return real in real_sources or os.path.dirname(real) in real_sources


def named(on: str | None) -> str | None:
    """Normalise the name or path of a corpus, for the record of what was scored."""
    return str(Path(on).resolve()) if on and Path(on).exists() else on
