"""tokens.txt: from the ids that a model says to words and text; needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sbkit.decode.spans import Spans, Word, words
from sbkit.errors import SbkitError
from sbkit.export.layout import TOKENS, Config

BLANK = "<blk>"  # how tokens.txt writes the blank, for runtimes that look for it


class Vocabulary:
    """The tokens of a bundle.

    Arguments
    ---------
    symbols : in order of their ids, ``▁`` for the space before a word
    config : the bundle's
    """

    def __init__(self, symbols: Sequence[str], config: Config):
        self.symbols, self.config = list(symbols), config
        self._silent = {config.blank_id, *config.silent_ids}

    @classmethod
    def read(cls, folder: Path, config: Config) -> Vocabulary:
        """Of the bundle in ``folder``."""
        return cls(read_tokens(folder / TOKENS, config.vocabulary), config)

    def __len__(self) -> int:
        return len(self.symbols)

    def check(self, labels: np.ndarray) -> None:
        """Refuse ids that the table lacks, where looking them up would go wrong or hide it."""
        if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < len(self):
            alien = np.unique(labels[(labels < 0) | (labels >= len(self))]).tolist()
            raise SbkitError(f"the model said the tokens {alien[:5]} and the bundle has {len(self)}",
                             hint=f"does {TOKENS} belong to this model?")

    def words(self, spans: Spans, start: float = 0.0, pause_seconds: float | None = None) -> list[Word]:
        """Words with times and confidences; the first frame lies at ``start`` seconds. None goes on over a pause."""
        frame = self.config.frame_seconds
        return words(spans, self.symbols.__getitem__, frame, start=start, skip=self._silent,
                     separator=self.config.word_separator,
                     pause=None if pause_seconds is None else pause_seconds / frame)

    @property
    def space(self) -> str:
        """Between words."""
        return "" if self.config.word_separator is None else " "

    def text(self, found: Sequence[Word]) -> str:
        """What the words say together."""
        return self.space.join(word.text for word in found)


def write_tokens(path: Path, pieces: list[str], blank_id: int) -> None:
    """tokens.txt: a line ``symbol id`` for each token, the blank as ``<blk>``."""
    lines = (f"{BLANK if i == blank_id else piece} {i}\n" for i, piece in enumerate(pieces))
    path.write_text("".join(lines), encoding="utf-8")


def read_tokens(path: Path, vocabulary: int) -> list[str]:
    """The symbols of tokens.txt, in order of their ids."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SbkitError(f"{path} cannot be read: {error}") from error
    symbols: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        symbol, _, index = line.rpartition(" ")
        if not symbol or not index.isdecimal():
            raise SbkitError(f"{path}:{number}: expected 'symbol id', found {line!r}")
        symbols[int(index)] = symbol
    if sorted(symbols) != list(range(vocabulary)):
        raise SbkitError(f"{path} has {len(symbols)} tokens and the model's output is {vocabulary} wide",
                         hint="do both come from the same export?")
    return [symbols[i] for i in range(vocabulary)]
