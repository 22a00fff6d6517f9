"""How much a recogniser has come to hear: its training loss, between chance and none at all."""

from __future__ import annotations

import math
from os import PathLike
from typing import Any

import yaml
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

#: The weight of the newest step in the moving average of the loss: its memory is some twenty steps.
NEWEST = 0.05
#: What is known of a step before step N begins may differ by device and by what was saved on the way; of step N - LAG
#: and those before it is known everywhere. So all ranks, and a run that was resumed, go by the same steps.
LAG = 3


@register_checkpoint_hooks
class Hearing:
    """A moving average of the loss per token, and what share of chance it has left behind.

    Chance is the entropy of the tokens (see ``Tokenizer.entropy``): the loss of a model that knows how often each token
    comes and hears nothing. Training with CTC comes down to it within some dozens of steps, and stays there until the
    model begins to hear.

    >>> hearing = Hearing(chance=3.0)
    >>> for step in range(1, 200):
    ...     hearing.count(step, total=6.0, tokens=4.0)
    >>> hearing.at(200)
    0.5
    """

    def __init__(self, chance: float = math.nan):
        self.chance = chance
        self._loss: float | None = None
        self._recent: list[tuple[int, float]] = []  # steps, and their loss per token, that don't count yet

    def count(self, step: int, total: float, tokens: float) -> None:
        """Take in a step's loss, summed over its tokens; one that is not finite tells nothing."""
        if tokens > 0 and math.isfinite(total):
            self._recent.append((step, total / tokens))

    @property
    def known(self) -> bool:
        """Whether somebody has said what chance is."""
        return self.chance > 0

    @property
    def loss(self) -> float | None:
        """The average per token that ``at`` went by last; None before there is any."""
        return self._loss

    def at(self, step: int) -> float:
        """What is heard when ``step`` begins: 0 (nothing: the loss is chance or above) to 1 (a loss of 0)."""
        while self._recent and self._recent[0][0] <= step - LAG:
            _, loss = self._recent.pop(0)
            self._loss = loss if self._loss is None else self._loss + NEWEST * (loss - self._loss)
        if self._loss is None or not self.known:
            return 0.0
        return min(1.0, max(0.0, 1 - self._loss / self.chance))

    @mark_as_saver
    def _save(self, path: str | PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump({"loss": self._loss, "recent": [list(each) for each in self._recent]}, out)

    @mark_as_loader
    def _load(self, path: str | PathLike[str], end_of_epoch: bool) -> None:
        with open(path, encoding="utf-8") as file:
            state: dict[str, Any] = yaml.safe_load(file)
        self._loss, self._recent = state["loss"], [(step, loss) for step, loss in state["recent"]]
