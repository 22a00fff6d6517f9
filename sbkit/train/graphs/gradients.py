"""Where the gradients of graphs are: a graph adds to fixed addresses, while Python makes new tensors in each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from sbkit.train.distributed.exchange import GradientExchange
from sbkit.train.graphs.repeatable import NotRepeatable


class GradientPlaces:
    """The parameters that train, and for each the tensor that all graphs add its gradient to.

    The first capture decides on them, for all graphs until ``forget``.

    exchange : sums gradients over ranks, in views into its buckets, which then are the places; None: on one rank
    """

    def __init__(self, exchange: GradientExchange | None):
        self.exchange = exchange
        self._place_of: dict[Parameter, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._place_of)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._place_of.values())

    def take_from_exchange(self) -> None:
        """Decide on the places without a micro-step, which a rank may not have had: all ranks capture an update."""
        if not self._place_of and self.exchange is not None:
            self._place_of = self.exchange.views()

    def decide(self, reached: Sequence[Parameter]) -> None:
        """Decide on the places by the parameters that a micro-step gave a gradient.

        Raises ``NotRepeatable`` if a later one reaches others, for which graphs have no place.
        """
        if not reached:
            raise NotRepeatable("the loss reaches no parameter of the modules")
        if not self._place_of:
            if self.exchange is not None:
                places = self.exchange.views()
            else:
                places = {parameter: torch.zeros_like(parameter) for parameter in reached}
            if any(parameter not in places for parameter in reached):
                raise NotRepeatable("batches reach different parameters")
            self._place_of = places
            return
        # Ranks give zeros for what they don't reach; alone, an optimizer would leave that out.
        fewer = self.exchange is None and len(reached) < len(self._place_of)
        if fewer or any(parameter not in self._place_of for parameter in reached):
            raise NotRepeatable("batches reach different parameters")

    def point_to(self) -> None:
        """Make each place the gradient of its parameter, whatever was there."""
        for parameter, place in self._place_of.items():
            parameter.grad = place

    @torch.no_grad()
    def attach(self) -> None:
        """Bring gradients to their places before a replay: those of a micro-batch that Python computed, or zeros."""
        moved = [(parameter, place) for parameter, place in self._place_of.items() if parameter.grad is not place]
        if moved:
            torch._foreach_zero_([place for _, place in moved])
        for parameter, place in moved:
            if parameter.grad is not None:
                place.copy_(parameter.grad)
            parameter.grad = place

    def forget(self) -> None:
        """Take the places away, as other parameters train from now on."""
        for parameter in self._place_of:
            parameter.grad = None
        self._place_of = {}
