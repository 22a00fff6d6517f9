"""Cross-fitting: trains a recipe once for each part of its training rows, on all rows of the other parts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.text import AsWritten
from sbkit.errors import SbkitError
from sbkit.recipe import arguments
from sbkit.system import processes
from sbkit.system.environment import training_command

_LISTS = "lists"


class Fold(NamedTuple):
    """A part of the training rows, and the run that has not seen it."""

    number: int
    of: int
    run: Path
    held_out: Manifest


def split(texts: Sequence[str], count: int) -> np.ndarray:
    """Number the fold of each row, [N] from 0: rows with the same sentence are in the same fold.

    So a model can't have learnt a wrong label from another speaker of the sentence. Speakers are in all folds: a voice
    says nothing about whether a label is wrong.
    """
    sentences = sorted(set(texts), key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).digest())
    if not 2 <= count <= len(sentences):
        raise SbkitError("bad-value", f"--folds {count}: the training rows have {len(sentences)} different sentences",
                         hint="choose 2 or 3; each fold has sentences that the others lack", key="folds", value=count)
    numbers = {text: number % count for number, text in enumerate(sentences)}
    return np.array([numbers[text] for text in texts])


def write(train: Manifest, dev: Manifest, count: int, folder: Path) -> list[Fold]:
    """Write the lists of all folds. Other rows or labels get other folders, so that no run resumes one that has seen
    the held-out rows."""
    where = folder / f"{train.digest()[:8]}-{count}"
    numbers = split(list(train.texts), count)
    folds = []
    for number in range(count):
        fold = Fold(number + 1, count, where / f"fold-{number + 1}", train.select(numbers == number))
        for name, rows in {"train": train.select(numbers != number), "dev": dev, "test": fold.held_out}.items():
            path = fold.run / _LISTS / f"{name}.csv"
            if not path.exists() or Manifest.read(path).digest() != rows.digest():
                path.parent.mkdir(parents=True, exist_ok=True)
                rows.write(path)
        folds.append(fold)
    return folds


def train(fold: Fold, words: Sequence[str], corpus: Corpus, count: int) -> None:
    """Train or resume a fold's run with ``sbkit train``; returns at once if it is complete.

    words : the recipe and its overrides, as on a command line
    corpus : whose rows they are
    count : the processes of the run
    """
    rules = "AsWritten {}" if isinstance(corpus.text, AsWritten) else \
        f"NormalizedBefore {json.dumps(corpus.text.options(), ensure_ascii=False)}"
    keys = {"output_folder": fold.run, "corpus.source": (fold.run / _LISTS).resolve(),
            # These were applied to the rows already.
            "corpus.splits": "null", "corpus.columns": "null", "corpus.data_root": "null", "corpus.exclude": "null",
            "corpus.skip_short_texts": "[]", "corpus.text": f"!new:sbkit.data.text.{rules}",
            "corpus.schemes": f"[{', '.join(corpus.remote.schemes)}]"}
    command = training_command(arguments.without(words, keys), count)
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    print(f"fold {fold.number} of {fold.of}: {fold.run}", file=sys.stderr, flush=True)
    with processes.child(command) as process:
        code = process.wait()
    if code:
        raise SbkitError("failed-fold", f"the run of fold {fold.number} ended with code {code}: {fold.run}",
                         hint="its messages above say why; the same command resumes it", exit_code=1, file=fold.run)
