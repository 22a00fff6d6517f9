"""The number by which a task's checkpoints are compared."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class Order(TypedDict, total=False):
    """How checkpoints are ranked, as arguments of the checkpointer and of ``Brain.evaluate``; by time if empty."""

    min_key: str
    max_key: str


class Metric(NamedTuple):
    """The number that the best checkpoint has least or most of: a name among what a task's ``stats`` returns."""

    name: str
    lower_is_better: bool = True

    @property
    def order(self) -> Order:
        """The order in which the best checkpoint comes first."""
        return {"min_key": self.name} if self.lower_is_better else {"max_key": self.name}
