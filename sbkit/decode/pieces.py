"""A model's tokens as a search needs them: which begin a word, and the hashes of their letters."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sbkit.decode import hashing
from sbkit.decode.spans import WORD_START

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<blank>", "<blk>")


def _encode(letters: str) -> bytes:
    byte = _BYTE.fullmatch(letters)
    if byte:  # a piece such as <0xE4> is that byte
        return bytes([int(byte[1], 16)])
    return letters.encode("utf-8", "surrogatepass")


class Pieces:
    """The tokens of a vocabulary, as columns [V].

    ``opens``: the token begins a word. ``hash`` and ``power`` are those of its letters, so that
    hash(word + letters) = hash(word) * power + hash.

    texts : the pieces in order of their ids, as SentencePiece writes them (a space as ``▁``)
    separator : marks a word's start in a piece; None makes every piece a word
    """

    def __init__(self, texts: Sequence[str], separator: str | None = WORD_START):
        self.texts = list(texts)
        self.separator = separator
        special = [text in _SPECIAL for text in self.texts]
        if separator is None:
            opens = [True] * len(self.texts)
            letters = [text.replace(WORD_START, "") for text in self.texts]
        else:
            opens = [text.startswith(separator) for text in self.texts]
            letters = [text.removeprefix(separator) for text in self.texts]
        self.opens = np.array(opens, dtype=bool) & ~np.array(special, dtype=bool)
        self.across = [text for text in letters if separator is not None and separator in text]
        self.spoken = frozenset(text for text in self.texts if text not in _SPECIAL)
        self.letters = frozenset("".join(text for text, is_special in zip(letters, special, strict=True)
                                         if not is_special))
        self.any_letter = any(map(_BYTE.fullmatch, self.texts))
        encoded = [b"" if is_special else _encode(text) for text, is_special in zip(letters, special, strict=True)]
        self.hash = hashing.hash_all(encoded)
        self.power = hashing.powers(np.array([len(letters) for letters in encoded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.texts)

    def spells(self, word: str) -> bool:
        """Whether the tokens contain every letter of a word."""
        return self.any_letter or self.letters.issuperset(word)
