"""Which weights of a run are meant: a checkpoint's or an average of several, and how they are called.

Everything that chooses, loads or names weights asks this file: ``sbkit evaluate`` and ``export``, the run's own test,
``init_from``, the names of results, the model card and the report. None of them knows an average by its name, so a new
one is a class here and its entry in ``AVERAGES``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sbkit.errors import SbkitError

if TYPE_CHECKING:
    from speechbrain.utils.checkpoints import Checkpoint
    from torch import Tensor

BEST, LAST = "best", "last"
"""The checkpoint with the best value of the task's metric, and the newest one."""


@dataclass(frozen=True)
class Average(ABC):
    """An average of the weights of ``count`` checkpoints: of the best ones, or of the newest."""

    count: int = 1

    name: ClassVar[str]
    """What it is called: ``median`` makes ``--average median-of-5`` and "the median of 5 checkpoints"."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SbkitError("bad-value", f"can't average {self.count} checkpoints", hint="ask for 1 or more",
                             key="count", value=self.count)

    @abstractmethod
    def combine(self, tensors: Sequence[Tensor], checkpoints: Sequence[Checkpoint]) -> Tensor:
        """Return the average of one floating-point tensor of the model, in any precision.

        tensors : the tensor in each checkpoint, the best checkpoint first
        checkpoints : these checkpoints, whose ``meta`` has the metric of their validation
        """

    @property
    def several(self) -> bool:
        """Whether it is of more than one checkpoint; otherwise it is that checkpoint."""
        return self.count > 1

    def label(self, count: int) -> str:
        """Return its name in files and options, such as ``mean-of-5``, for the number of checkpoints that were used."""
        return f"{self.name}-of-{count}"

    def describe(self, count: int) -> str:
        """Return its name in a sentence, such as "the mean of 5 checkpoints"."""
        return f"the {self.name} of {count} checkpoint{'s' if count > 1 else ''}"

    def __str__(self) -> str:
        """Return the value of keys and of ``--average`` that asks for it."""
        return self.label(self.count)


class Mean(Average):
    """The mean; a plain number in keys and options asks for it."""

    name = "mean"

    def combine(self, tensors: Sequence[Tensor], checkpoints: Sequence[Checkpoint]) -> Tensor:
        total = tensors[0].double()
        for tensor in tensors[1:]:
            total = total + tensor
        return total / len(tensors)

    def __str__(self) -> str:
        return str(self.count)


AVERAGES: dict[str, type[Average]] = {kind.name: kind for kind in (Mean,)}
"""All averages of checkpoints by name."""


def average_of(value: int | str) -> Average:
    """Return the average that the value of a key or of ``--average`` asks for.

    >>> average_of(5), average_of("mean-of-5"), str(average_of("5"))
    (Mean(count=5), Mean(count=5), '5')
    """
    text = str(value)
    if re.fullmatch(r"-?\d+", text):
        return Mean(int(text))
    name, _, count = text.rpartition("-of-")
    if name not in AVERAGES or not count.isdecimal():
        raise SbkitError("bad-value", f"{text!r} does not name an average of checkpoints",
                         hint=f"write {AVERAGE_VALUES}", value=text)
    average = AVERAGES[name](int(count))
    return average if average.several else Mean()  # of one checkpoint, all averages are the same


class _AverageValues:
    """The values of a key that asks for an average."""

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            return False
        try:
            average_of(value)
        except SbkitError:
            return False
        return True

    def __str__(self) -> str:
        return " or ".join(["a whole number, 1 or more,", *(f"{name}-of-N" for name in AVERAGES)])


AVERAGE_VALUES = _AverageValues()


@dataclass(frozen=True)
class ChosenWeights:
    """The weights of a run that somebody asks for.

    If the run kept a moving average of its weights (``ema``), that is what each of its checkpoints stands for.
    """

    checkpoint: str = BEST
    """``best``, ``last``, or the name of a checkpoint's folder, or a part of it."""
    average: Average = field(default_factory=Mean)
    """Of the best checkpoints or, with ``last``, of the newest."""
    share: float | None = None
    """The share of these weights in a mean with those that the run started from; None: they are taken alone."""

    def with_share(self, share: float | None) -> ChosenWeights:
        """Return the same weights with another share in a mean with the initial ones."""
        return replace(self, share=share)

    @property
    def by_name(self) -> bool:
        """Whether a single checkpoint is named, of which there can be no average."""
        return self.checkpoint not in (BEST, LAST)

    def label(self, used: str, count: int) -> str:
        """Return their name in files, such as ``best-mean-of-5``.

        used, count : the first checkpoint that was used, and the number of all
        """
        checkpoint = used if self.by_name else self.checkpoint
        return f"{checkpoint}-{self.average.label(count)}" if self.average.several else checkpoint

    def options(self) -> str:
        """Return the options of ``sbkit evaluate`` and ``export`` that choose them, each after a space."""
        options = ""
        if self.share is not None:
            options += f" --mean {self.share:g}"
        if self.checkpoint != BEST:
            options += f" --checkpoint {self.checkpoint}"
        if self.average.several:
            options += f" --average {self.average}"
        return options

    def describe(self) -> str:
        """Return their name in a sentence of a model card."""
        name = f"the checkpoint `{self.checkpoint}`"
        if self.average.several:
            name = f"{self.average.describe(self.average.count)} (`{self.checkpoint}`)"
        return name if self.share is None else f"{self.share:g} of {name} and {1 - self.share:g} of the initial weights"

    def facts(self, used: Sequence[Checkpoint]) -> dict[str, Any]:
        """Return what a bundle's config.json says of them.

        used : the checkpoints that were used
        """
        return {"checkpoint": Path(used[0].path).name, f"{self.average.name}_of": len(used)}

    def label_from(self, facts: Mapping[str, Any]) -> str:
        """Return ``label`` from the ``facts`` of a bundle."""
        return self.label(str(facts.get("checkpoint")), facts.get(f"{self.average.name}_of", self.average.count))


BEST_CHECKPOINT = ChosenWeights()
"""What is taken where nothing is chosen."""
