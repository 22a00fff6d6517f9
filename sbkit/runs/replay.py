"""Replay: training data of the initial model, mixed into the training on a new corpus (the key ``replay``)."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from sbkit.data.columns import Declared
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.mixture import Mixture
from sbkit.data.text import AsWritten, NormalizedBefore, TextRules
from sbkit.errors import SbkitError
from sbkit.nn.pretrained.source import names_model
from sbkit.recipe import load
from sbkit.recipe.keys import Problem, TaskKeys
from sbkit.runs.start_guard import NO_KEY
from sbkit.score.old_set import OLD
from sbkit.score.run_files import MANIFESTS, PREPARED, RECIPE
from sbkit.system.console import stored_json

NEW = "new"
_REPORT = Path(PREPARED).name
#: Keys for what a run starts from, which are fixed once it has a checkpoint.
SOURCES = "init_from", "replay", "replay_from"


class Replay(Mixture):
    """A mixture of the part ``new``, which a pass goes through once, and ``old``, with a share of every step.

    corpus : the new one, whose text rules are the default for the old one
    share : of the old corpus in the audio of every step
    source : of the old corpus; the folder of a run's manifests comes with that run's language and rules
    """

    divided = NEW

    def __init__(self, corpus: Corpus, share: float, source: str | Path):
        folder = corpus.folder / OLD
        options = stored_json(Path(source) / _REPORT).get("options")
        options = options if isinstance(options, dict) else {}  # the source has no manifests
        corpus_class = Prepared if source == folder else Corpus
        old = corpus_class(
            source, options.get("language"), folder, text=_rules_of_old(options.get("text"), corpus),
            min_duration=corpus.min_duration, max_duration=corpus.max_duration, schemes=corpus.schemes,
            workers=corpus.workers)
        super().__init__({NEW: corpus.in_folder(corpus.folder / NEW), OLD: old}, corpus.folder,
                         weights={NEW: 1 - share, OLD: share}, best_by=NEW, once=NEW)
        self.language = corpus.language
        self.text = corpus.text

    def check_splits(self, splits_of_parts: Mapping[str, Collection[str]], needed: Sequence[str]) -> None:
        super().check_splits(splits_of_parts, needed)
        if "test" in needed and "test" not in splits_of_parts[OLD]:
            raise SbkitError("missing-split",
                             f"replay: {self.parts[OLD].source} has no test split to measure forgetting on",
                             hint="name a run, or a corpus that has one: replay_from", key="replay")


def _rules_of_old(options: object, new: Corpus) -> TextRules:
    """The text rules for an old corpus: the new one's, unless its texts were prepared with the rules in ``options``."""
    if not isinstance(options, Mapping):
        return new.text
    if options.get("as_written"):
        return AsWritten()
    return NormalizedBefore.for_language(None, **options)


class Prepared(Corpus):
    """A corpus that was prepared earlier, and whose source is gone."""

    def prepare(self, show_progress: bool = True, needed: Sequence[str] = (), needs_text: bool = True,
                columns: Declared | None = None) -> dict[str, Manifest]:
        return self.load()


def with_replay(keys: TaskKeys) -> Replay:
    """The recipe's corpus mixed with the one that the initial model was trained on."""
    assert keys.replay is not None
    if isinstance(keys.corpus, Mixture):
        raise SbkitError("conflicting-options",
                         "replay: the corpus is a mixture already",
                         hint="make the old corpus a part of it, and leave "
                                                                        "out replay", key="replay")
    try:
        joint = Replay(keys.corpus, keys.replay, _source_of_old(keys))
        joint.parts[OLD].check_exists()
    except SbkitError:
        prepared = keys.corpus.folder / OLD
        if not (prepared / _REPORT).is_file():
            raise
        joint = Replay(keys.corpus, keys.replay, prepared)  # the run has started, and the source is gone
    return joint


def _source_of_old(keys: TaskKeys) -> str | Path:
    """The old corpus as ``replay_from`` names it, or the manifests of the run that this or ``init_from`` names."""
    if keys.replay_from is not None:
        named = Path(keys.replay_from).expanduser()
        return named / MANIFESTS if (named / PREPARED).is_file() else keys.replay_from
    run = _run_of(keys)
    if run is not None:
        return run / MANIFESTS
    if not Path(str(keys.init_from)).expanduser().exists() and not names_model(str(keys.init_from)):
        raise SbkitError("no-such-path", f"init_from: {keys.init_from} doesn't exist", hint="name a run",
                         key="init_from", file=str(keys.init_from))
    raise SbkitError("unknown-corpus",
                     f"replay: {keys.init_from} has no {PREPARED}, so it is unknown what it was trained on",
                     hint="name that corpus: replay_from: a run, or what data_folder could be", key="replay")


def _run_of(keys: TaskKeys) -> Path | None:
    """The folder of the run that ``init_from`` names: its own, or one in it, such as that of a checkpoint."""
    assert keys.init_from is not None
    path = Path(keys.init_from).expanduser().absolute()
    if not path.exists():
        return None
    for folder in (path, *path.parents[:2]):
        if (folder / PREPARED).is_file() and (folder / RECIPE).is_file():
            return folder
    return None


def arguments_of(values: Mapping[str, str]) -> str:
    """The command-line arguments for what a run starts from, given its recipe's values as text."""
    words = []
    for key in SOURCES:
        value = values.get(key, "null")
        if value not in ("null", NO_KEY):
            words += [f"--{key}", value]
    return shlex.join(words)


def problems(keys: TaskKeys) -> Iterator[Problem]:
    """Yield problems of the keys for replay."""
    if keys.replay is None:
        if keys.replay_from is not None:
            yield Problem("replay_from", f"it is {keys.replay_from}, but replay, its share of every step, is not set",
                          "write replay: 0.2, or leave replay_from out")
        return
    if keys.init_from is None:
        yield Problem("replay", f"it is {keys.replay:g}, but the run starts from no trained model",
                      _hint_without_model(keys))
        return
    if not isinstance(keys.corpus, Replay):
        try:
            with_replay(keys)
        except SbkitError as error:
            key = error.key or ""
            if key not in ("replay", "init_from"):
                key = "replay" if keys.replay_from is None else "replay_from"
            yield Problem(key, error.message.removeprefix(f"{key}: "), error.hint or "")
    recipe = (_run_of(keys) or Path(keys.init_from)) / RECIPE
    rate = load.tree(recipe).at("sample_rate") if recipe.is_file() else None
    if isinstance(rate, int) and rate != keys.sample_rate:
        yield Problem("sample_rate", f"it is {keys.sample_rate}, but {keys.init_from} has {rate}: what it learnt is "
                      "lost at another rate", f"write sample_rate: {rate}, or leave replay out")


def _hint_without_model(keys: TaskKeys) -> str:
    """What to give besides ``replay``: what the run in the output folder was started with, or any trained model."""
    recipe = Path(str(vars(keys).get("output_folder") or "")) / RECIPE
    recorded = load.tree(recipe).texts() if recipe.is_file() else {}
    if "replay" in recorded:
        return f"resume the run in {recipe.parent} with {arguments_of(recorded)}"
    return "write init_from: RUN"
