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
        self.source, self.kind, self.where = source, source.kind, source.where

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
    keys, corpus = recipe.keys, recipe.keys.corpus
    batching, speed = keys.batching, None
    step, text = min(batching.update_seconds, 1.2 * world * batching.max_batch_seconds), ""
    source = corpus.source
    on_hub = isinstance(source, (str, Path)) and is_hub_address(source)
    if isinstance(source, (Source, Mapping)) or (source is not None and not on_hub and Path(source).exists()):
        opened = source if isinstance(source, Source) else open_source(
            source, cache=folder / "audio", language=corpus.language, columns=corpus.columns,
            data_root=corpus.data_root, show_progress=False)
        short = copy.copy(corpus)
        short.folder, short.source, short.report = folder, _FirstRows(opened), None
        kept = short.prepare(show_progress=False, needed=SPLITS, needs_text=recipe.task.needs_text(),
                            columns=recipe.task.columns)
        step = min(step, float(planned_seconds(recipe.hparams.get("augment"), kept["train"].durations).sum()) / STEPS)
        speed = rate.measure(Reader(kept["train"], None, augment=keys.augment, sample_rate=keys.sample_rate,
                                    columns=BatchColumns(recipe.task.columns, keys), as_stored=True))
        what = f"the first rows of {corpus.source}"
    else:
        text = _noise(recipe, folder, max(STEPS * step, world * batching.max_batch_seconds))
        what = "noise and random words"
    options = {"source": str(folder), "folder": str(folder.parent / "manifests"), "language": corpus.language,
               "min_duration": corpus.min_duration, "max_duration": corpus.max_duration}
    given = ", ".join(f"{name}: {value}" for name, value in options.items() if value is not None)
    return {"what": what, "text": text, "reads": speed, "step_seconds": step, "args": [
        "--corpus", f"!new:sbkit.data.corpus.Corpus {{{given}}}", "--batching.step_seconds", f"{step:g}",
        "--batching.min_steps", "0", "--num_workers", "1",
        # The few rows may not have enough clips of each label.
        *(["--batching.clips_per", "null"] if batching.clips_per else []),
        # Replay does not change the size of a batch.
        *(["--replay", "null", "--replay_from", "null"] if vars(keys).get("replay") else [])]}


def refuse_words(recipe: Recipe, text: str) -> None:
    """Raise if the task's tokens are fixed and can't encode this text of random words."""
    task, keys = recipe.task, recipe.keys
    encoder = task.encoder(keys) if text and task.is_prepared(keys) else None
    try:
        if encoder is not None:
            encoder.encode(text)
    except Exception as error:  # each task has its own
        raise SbkitError(f"there is no corpus {keys.corpus.source or ''} on this machine, and {task.__name__} has no "
                         f"tokens for the random words that replace it: {first_line(error)}",
                         hint="run the check with a corpus; a few recordings are enough") from error


def _noise(recipe: Recipe, folder: Path, seconds: float) -> str:
    """Write clips of noise of several lengths, each in many rows of a split with other texts; return one text."""
    declared = BatchColumns(recipe.task.columns, recipe.keys)
    numbers, rate, corpus = np.random.default_rng(0), recipe.keys.sample_rate, recipe.keys.corpus
    known = set(corpus.text.alphabet or _LETTERS) - {" "}
    letters = sorted(_LETTERS if known.issuperset(_LETTERS) else known)
    longest = min(corpus.max_duration or LONGEST, recipe.keys.batching.max_batch_seconds)
    for split in SPLITS:
        lengths = [round(share * longest * (_TEST_LENGTH if split == "test" else 1), 2) for share in _LENGTHS]
        wavs = [folder / f"{split}{number}.wav" for number in range(len(lengths))]
        for wav, length in zip(wavs, lengths, strict=True):
            wav.parent.mkdir(exist_ok=True)
            soundfile.write(wav, 0.1 * numbers.standard_normal(round(length * rate)), rate)
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            out, written, row = csv.writer(file), 0.0, 0
            out.writerow((*_FIELDS, *declared.declared))
            while written < seconds if split == "train" else row < ROWS:
                length = lengths[row % len(lengths)]
                drawn = numbers.choice(letters, max(6, int(length * _LETTERS_PER_SECOND)))
                text = " ".join("".join(word) for word in np.array_split(drawn, max(2, len(drawn) // 5)))
                wav, classes = wavs[row % len(wavs)], declared.classes
                out.writerow((f"{split}-{row}", length, wav, text, *(
                    wav if name in declared.signals else classes[name][row % len(classes[name])]
                    if classes.get(name) else f"{name}{row % ROWS}" for name in declared.declared)))
                written, row = written + float(planned_seconds(recipe.hparams.get("augment"), length)), row + 1
    return text
