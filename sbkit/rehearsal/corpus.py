"""The corpus of a rehearsal: the first rows of the recipe's corpus, or noise with random words if there is none."""

from __future__ import annotations

import copy
import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.data import rate
from sbkit.data.augment import planned_seconds
from sbkit.data.columns import BatchColumns
from sbkit.data.manifest import Manifest
from sbkit.data.reader import Reader
from sbkit.data.sources import Rows, Source, is_hub_address, open_source
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError, first_line
from sbkit.recipe.cost import LONGEST
from sbkit.recipe.load import Recipe

#: Steps of an epoch, and rows of a split that is evaluated.
STEPS, ROWS = 5, 12
#: Lengths of clips, as shares of the longest. Those of the test set are short, because exported graphs run on the CPU.
_LENGTHS, _TEST_LENGTH = (1.0, 0.75, 0.5, 0.35), 0.2
# Letters of every vocabulary in Latin script, since the tokenizer may be another model's.
_LETTERS, _LETTERS_PER_SECOND = "adehilnorstu", 8
_FIELDS = "ID", "duration", "wav", "wrd"


class _FirstRows(Source):
    """The first rows of each split of another source."""

    def __init__(self, source: Source):
        self.source = source
        self.kind = source.kind
        self.where = source.where

    def names(self) -> list[str]:
        return self.source.names()

    def read(self, name: str, show_progress: bool = True) -> Rows:
        self.source.inherit_needs(self)
        rows = self.source.read(name, show_progress)
        return rows.take(np.arange(min(len(rows), STEPS * ROWS)))

    def fingerprint(self) -> list[Any]:
        return self.source.fingerprint()


def write(recipe: Recipe, folder: Path, world: int) -> dict[str, Any]:
    """Write a corpus for the recipe; return the arguments with which a run uses it, one text of random words, and how
    fast the recipe's own corpus is read.

    world : the number of ranks, with which an epoch has ``STEPS`` steps
    """
    keys = recipe.keys
    corpus = keys.corpus
    batching = keys.batching
    step_seconds = min(batching.update_seconds, 1.2 * world * batching.max_batch_seconds)
    source = corpus.source
    is_on_hub = isinstance(source, (str, Path)) and is_hub_address(source)
    if isinstance(source, (Source, Mapping)) or (source is not None and not is_on_hub and Path(source).exists()):
        train = _write_first_rows(recipe, folder)
        planned = planned_seconds(recipe.hparams.get("augment"), train.durations)
        step_seconds = min(step_seconds, float(planned.sum()) / STEPS)
        speed = rate.measure(Reader(train, None, augment=keys.augment, sample_rate=keys.sample_rate,
                                    columns=BatchColumns(recipe.task.columns, keys), as_stored=True))
        text = ""
        what = f"the first rows of {corpus.source}"
    else:
        speed = None
        text = _noise(recipe, folder, max(STEPS * step_seconds, world * batching.max_batch_seconds))
        what = "noise and random words"
    options = {"source": str(folder), "folder": str(folder.parent / "manifests"), "language": corpus.language,
               "min_duration": corpus.min_duration, "max_duration": corpus.max_duration}
    listed = ", ".join(f"{name}: {value}" for name, value in options.items() if value is not None)
    args = ["--corpus", f"!new:sbkit.data.corpus.Corpus {{{listed}}}", "--batching.step_seconds", f"{step_seconds:g}",
            "--batching.min_steps", "0", "--num_workers", "1"]
    if batching.clips_per:  # the few rows may not have enough clips of each label
        args += ["--batching.clips_per", "null"]
    if vars(keys).get("replay"):  # it does not change the size of a batch
        args += ["--replay", "null", "--replay_from", "null"]
    return {"what": what, "text": text, "reads": speed, "step_seconds": step_seconds, "args": args}


def _write_first_rows(recipe: Recipe, folder: Path) -> Manifest:
    """Write the first rows of each split of the recipe's corpus; return the training split."""
    corpus = recipe.keys.corpus
    source = corpus.source
    if not isinstance(source, Source):
        source = open_source(source, cache=folder / "audio", language=corpus.language, columns=corpus.columns,
                             data_root=corpus.data_root, show_progress=False)
    short = copy.copy(corpus)
    short.folder = folder
    short.source = _FirstRows(source)
    short.report = None
    return short.prepare(show_progress=False, needed=SPLITS, needs_text=recipe.task.needs_text(),
                         columns=recipe.task.columns)["train"]


def refuse_words(recipe: Recipe, text: str) -> None:
    """Raise if the task's tokens are fixed and can't encode this text of random words."""
    task = recipe.task
    keys = recipe.keys
    tokenizer = task.tokenizer(keys) if text and task.is_prepared(keys) else None
    try:
        if tokenizer is not None:
            tokenizer.encode(text)
    except Exception as error:  # each task has its own
        raise SbkitError("no-corpus",
                         f"there is no corpus {keys.corpus.source or ''} on this machine, and {task.__name__} has no "
                         f"tokens for the random words that replace it: {first_line(error)}",
                         hint="run the check with a corpus; a few recordings are enough") from error


def _noise(recipe: Recipe, folder: Path, seconds: float) -> str:
    """Write clips of noise of several lengths, each in many rows of a split with other texts; return one text."""
    columns = BatchColumns(recipe.task.columns, recipe.keys)
    rng = np.random.default_rng(0)
    sample_rate = recipe.keys.sample_rate
    corpus = recipe.keys.corpus
    alphabet = set(corpus.text.alphabet or _LETTERS) - {" "}
    letters = sorted(_LETTERS if alphabet.issuperset(_LETTERS) else alphabet)
    longest = min(corpus.max_duration or LONGEST, recipe.keys.batching.max_batch_seconds)
    for split in SPLITS:
        lengths = [round(share * longest * (_TEST_LENGTH if split == "test" else 1), 2) for share in _LENGTHS]
        wavs = [folder / f"{split}{number}.wav" for number in range(len(lengths))]
        for wav, length in zip(wavs, lengths, strict=True):
            wav.parent.mkdir(exist_ok=True)
            soundfile.write(wav, 0.1 * rng.standard_normal(round(length * sample_rate)), sample_rate)
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow((*_FIELDS, *columns.declared))
            written_seconds = 0.0
            row = 0
            while written_seconds < seconds if split == "train" else row < ROWS:
                length = lengths[row % len(lengths)]
                wav = wavs[row % len(wavs)]
                characters = rng.choice(letters, max(6, int(length * _LETTERS_PER_SECOND)))
                words = np.array_split(characters, max(2, len(characters) // 5))
                text = " ".join("".join(word) for word in words)
                others = [_value(columns, name, row, wav) for name in columns.declared]
                out.writerow((f"{split}-{row}", length, wav, text, *others))
                written_seconds += float(planned_seconds(recipe.hparams.get("augment"), length))
                row += 1
    return text


def _value(columns: BatchColumns, name: str, row: int, wav: Path) -> object:
    """Return the value of a column that the task declares: a signal, a class, or a label of a few."""
    if name in columns.signals:
        return wav
    classes = columns.classes.get(name)
    return classes[row % len(classes)] if classes else f"{name}{row % ROWS}"
