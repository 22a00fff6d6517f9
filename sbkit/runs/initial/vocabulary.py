"""Which row of one vocabulary is which of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class TokenRows(NamedTuple):
    """What each id stands for."""

    pieces: Sequence[str]
    roles: dict[str, int]
    """The ids of what has a part to play, such as ``blank``, whatever it is written as."""

    def rows_in(self, other: TokenRows) -> list[int]:
        """For each id the same one's in another vocabulary; -1 where that lacks it.

        >>> Vocabulary(["_", "b", "a"], {"blank": 0}).rows_in(Vocabulary(["<unk>", "a", "c"], {"blank": 0}))
        [0, -1, 1]
        """
        mine, theirs = ({place: role for role, place in each.roles.items()} for each in (self, other))
        places = {piece: place for place, piece in enumerate(other.pieces) if place not in theirs}
        return [other.roles.get(mine[place], -1) if place in mine else places.get(piece, -1)
                for place, piece in enumerate(self.pieces)]


class TokenTables(NamedTuple):
    """The tensors of a model that have a row for each token, and what the rows stand for."""

    tensors: Sequence[torch.Tensor]
    vocabulary: Callable[[], TokenRows]
    """Asked for once the corpus is prepared."""
