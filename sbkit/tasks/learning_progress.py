"""How far a recogniser's training loss is below chance: 0 at chance, 1 at a loss of 0."""

from __future__ import annotations

import math
from os import PathLike
from typing import Any

import yaml
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

#: The weight of the newest step in the moving average of the loss: it spans about twenty steps.
NEWEST = 0.05
#: Before step N begins, losses up to step N - LAG are known on any device, whether or not the run was resumed. Later
#: ones may or may not be, so they are left out: all ranks, and a resumed run, see the same.
LAG = 3
#: Steps after which the average is where the loss began: that of the first ones is far above any other.
BEGUN = 15


@register_checkpoint_hooks
class LearningProgress:
    """A moving average of the loss per token, compared with chance.

    Chance is the entropy of the tokens (see ``Tokenizer.entropy``): the loss of a model that knows how often each token
    occurs and nothing else. A CTC loss, for example, falls to it within some dozens of steps and stays there until the
    model begins to recognise speech.

    Only a loss that, per token, stays at chance until something is learnt can be compared. Others, such as sums over
    utterances, are counted as not ``comparable``: they are averaged until there is a comparable one, and ignored from
    then on.

    chance : NaN if it is not known

    >>> progress = LearningProgress(chance=3.0)
    >>> for step in range(1, 200):
    ...     progress.count(step, total=6.0, tokens=4.0)
    >>> progress.score_at(200)
    0.5
    """

    def __init__(self, chance: float = math.nan):
        self.chance = chance
        self.loss: float | None = None
        """The average loss per token at the last call of ``score_at``; None if there was none yet."""
        self.first: float | None = None
        """The average after the first ``BEGUN`` steps; None before."""
        self.lowest: float | None = None
        """The lowest average since then."""
        self._steps = 0  # in the average
        self._comparable = True  # whether the average is of comparable losses, or there is none yet
        self._recent: list[tuple[int, float, bool]] = []  # steps not yet in the average: loss, and if comparable

    def count(self, step: int, total: float, tokens: float, comparable: bool = True) -> None:
        """Record a step's loss, summed over its tokens; ignores one that is not finite."""
        if tokens > 0 and math.isfinite(total):
            self._recent.append((step, total / tokens, comparable))

    @property
    def known(self) -> bool:
        """Whether the loss can be compared with chance; True before the first loss, when nothing is learnt."""
        return self.chance > 0 and self._comparable

    def score_at(self, step: int) -> float:
        """Return the progress when ``step`` begins: from 0 (the loss is at chance or above) to 1 (a loss of 0); 1 if
        the loss can't be compared with chance."""
        while self._recent and self._recent[0][0] <= step - LAG:
            _, loss, comparable = self._recent.pop(0)
            self._average(loss, comparable)
        if not (self.chance > 0 and self._comparable):
            return 1.0
        if self.loss is None:
            return 0.0
        return min(1.0, max(0.0, 1 - self.loss / self.chance))

    def _average(self, loss: float, comparable: bool) -> None:
        if self.loss is None or comparable > self._comparable:
            self.loss, self._comparable = loss, comparable
            self.first = self.lowest = None
            self._steps = 0
        elif comparable == self._comparable:
            self.loss += NEWEST * (loss - self.loss)
        else:
            return
        self._steps += 1
        if self._steps == BEGUN:
            self.first = self.lowest = self.loss
        elif self.lowest is not None:
            self.lowest = min(self.lowest, self.loss)

    @mark_as_saver
    def save(self, path: str | PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump({"loss": self.loss, "comparable": self._comparable,
                            "recent": [list(each) for each in self._recent],
                            "first": self.first, "lowest": self.lowest, "steps": self._steps}, out)

    @mark_as_loader
    def load(self, path: str | PathLike[str], end_of_epoch: bool) -> None:
        with open(path, encoding="utf-8") as file:
            state: dict[str, Any] = yaml.safe_load(file)
        self.loss, self._comparable = state["loss"], state["comparable"]
        self._recent = [(step, loss, comparable) for step, loss, comparable in state["recent"]]
        # Checkpoints of earlier versions don't have these: the run then begins where it is.
        self.first, self.lowest, self._steps = state.get("first"), state.get("lowest"), state.get("steps", 0)
