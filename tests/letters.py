"""Just enough of a tokenizer: pieces, and what they spell."""

from __future__ import annotations

from collections.abc import Sequence


class Letters(list[str]):
    """A list of pieces, each an id by its place."""

    def pieces(self) -> list[str]:
        return list(self)

    def piece(self, i: int) -> str:
        return self[i]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join("".join(self[i] for i in ids).replace("▁", " ").split())
