"""Writes a SentencePiece model from given pieces, without the protobuf package, whose format it has."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from sbkit.errors import SbkitError
from sbkit.system import untrusted

_UNIGRAM, _BPE, _CHAR = 1, 2, 4  # kinds of models
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # kinds of pieces
_RARE = -1e4  # the score of a piece that is used only if a text can't be cut otherwise


def piece_model(pieces: Sequence[str], silent: Collection[int] = (), scores: Mapping[str, float] | None = None,
                merges: bool = False) -> bytes:
    """Make the contents of a model's file.

    pieces : in the order of their ids, with ``▁`` for a space; the first is the unknown piece, and CTC's blank. ``<s>``
        and ``</s>`` begin and end a sentence if they are silent
    silent : the ids of further pieces that aren't text
    scores : the pieces' scores, by which a text is cut; None: it is cut into characters
    merges : whether scores are ranks of merges (BPE)
    """
    if twice := [piece for piece, count in Counter(pieces).items() if count > 1 or not piece]:
        raise SbkitError("bad-tokenizer", f"{len(twice)} tokens are duplicates or empty, such as {twice[0]!r}",
                         hint="SentencePiece needs a unique text for each")
    untrusted.check_tokens(pieces, "the tokenizer")
    kinds = [_UNKNOWN if not i else _CONTROL if i in silent else _NORMAL for i in range(len(pieces))]
    scores = scores or {}
    listed = []
    for piece, kind in zip(pieces, kinds, strict=True):
        score = _varint(2 << 3 | 5) + struct.pack("<f", scores.get(piece, _RARE if scores else 0.0))
        listed.append(_bytes(1, _bytes(1, piece.encode()) + score + _number(3, kind)))
    trainer = _number(3, (_BPE if merges else _UNIGRAM) if scores else _CHAR) + _number(40, 0) \
        + _bytes(45, pieces[0].encode())
    normalizer = _bytes(1, b"identity") + b"".join(_number(field, 1) for field in (3, 4, 5))
    return b"".join(listed) + _bytes(2, trainer) + _bytes(3, normalizer)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
