"""A bundle's vocabulary, tokens.txt: turns token ids into words and text. Needs only numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sbkit.decode.spans import Spelling, Word
from sbkit.errors import SbkitError, shown
from sbkit.export.layout import MAX_BYTES, TOKENS, Config
from sbkit.system import untrusted

_MAX_DIGITS = 9  # of an id
BLANK = "<blk>"  # the blank in tokens.txt, as other runtimes expect it


class Vocabulary:
    """The tokens of a bundle.

    symbols : the tokens in order of their ids, with ``▁`` for the space before a word
    config : the bundle's configuration
    folder : the bundle, if its decoder needs more of its files
    """

    def __init__(self, symbols: Sequence[str], config: Config, folder: Path | None = None):
        self.symbols, self.config, self.folder = list(symbols), config, folder
        self.spelling = Spelling(self.symbols, config.frame_seconds, {config.blank_id, *config.silent_ids},
                                 config.word_separator, config.reliability)

    @classmethod
    def read(cls, folder: Path, config: Config) -> Vocabulary:
        return cls(read_tokens(folder / TOKENS, config.vocabulary), config, folder)

    def __len__(self) -> int:
        return len(self.symbols)

    def check(self, labels: np.ndarray) -> None:
        """Refuse ids outside the vocabulary; negative ones would silently index a wrong token."""
        if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < len(self):
            unknown = np.unique(labels[(labels < 0) | (labels >= len(self))]).tolist()
            raise SbkitError("damaged-bundle",
                             f"the model gave the token ids {unknown[:5]}, but the bundle has {len(self)} tokens",
                             hint=f"does {TOKENS} belong to this model?")

    @property
    def space(self) -> str:
        """The text between words: a space, or nothing for scripts without spaces."""
        return self.spelling.space

    def text(self, words: Sequence[Word]) -> str:
        return self.spelling.join(words)


def write_tokens(path: Path, pieces: list[str], blank_id: int) -> None:
    """Write tokens.txt: a line ``symbol id`` for each token, with the blank as ``<blk>``."""
    untrusted.check_tokens(pieces, "the tokenizer")
    lines = (f"{BLANK if i == blank_id else piece} {i}\n" for i, piece in enumerate(pieces))
    path.write_text("".join(lines), encoding="utf-8")


def read_tokens(path: Path, vocabulary: int) -> list[str]:
    """Read the symbols of tokens.txt, in order of their ids."""
    try:
        lines = untrusted.read_text(path, MAX_BYTES).split("\n")
    except FileNotFoundError:
        raise SbkitError("damaged-bundle", f"{path} is missing", hint="copy the bundle again", file=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SbkitError("damaged-bundle", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
                         hint="copy the bundle again", file=path) from error
    symbols: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        symbol, _, index = line.rpartition(" ")
        if not symbol or not index.isdecimal() or len(index) > _MAX_DIGITS:
            raise SbkitError("damaged-bundle", f"{path}:{number}: expected 'symbol id', found {shown(line)}",
                             hint="copy the bundle again", file=path, line=number)
        symbols[int(index)] = symbol
    if sorted(symbols) != list(range(vocabulary)):
        raise SbkitError("damaged-bundle", f"{path} has {len(symbols)} tokens, but the model has {vocabulary} outputs",
                         hint="do both come from the same export?", file=path)
    tokens = [symbols[i] for i in range(vocabulary)]
    untrusted.check_tokens(tokens, str(path))
    return tokens
