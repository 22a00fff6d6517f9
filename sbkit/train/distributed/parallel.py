"""How the ranks of a run share a step: alone, each with the whole model (Replicated), or with a part of it (Sharded).

Chosen once, when the modules are wrapped; a step only knows that it has a ``Parallel``. Whichever it is, a step sums
its losses and counts over ranks after its last backward, by ``reduce``, so all ranks send the same in the same order.
A rank that has no batch left computes a dummy one, whose gradients are ``zeroed``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from speechbrain.processing.features import InputNormalization
from torch import nn

from sbkit.nn import sync_batch_norm
from sbkit.nn.fast.front_end import FixedNormalization
from sbkit.train.distributed import ranks
from sbkit.train.distributed.exchange import GradientExchange

if TYPE_CHECKING:
    from sbkit.train.distributed.sharding import ShardedModules

LossFunction = Callable[[Any], Any]  # from a micro-batch of the recipe's class to a ``loss.Computed``


class Parallel(ABC):
    """How the ranks of a run share a step.

    What a way has nothing to do for needs no method in it: ``arm`` to ``accumulating`` are for exchanging gradients,
    and do nothing unless ``Replicated`` does.

    loss_of : computes forward and loss of a training micro-batch
    """

    #: What backward has divided gradients by, before a step divides them by its count.
    divided_by = 1
    #: What sums gradients over ranks, if hooks on whole parameters do that.
    exchange: GradientExchange | None = None
    #: The modules, if each rank has a part of their parameters.
    sharded: ShardedModules | None = None

    def __init__(self, loss_of: LossFunction):
        self.loss_of = loss_of

    @property
    @abstractmethod
    def not_captured(self) -> str | None:
        """Why steps can't be captured as CUDA graphs; None if they can."""

    @abstractmethod
    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """Return sums over all ranks."""

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all parameters on every rank inside this context."""
        yield

    # ------------------------------------------------------------ exchanging gradients

    def arm(self, last: bool) -> None:  # noqa: B027 (nothing to do, unless gradients are exchanged)
        """Prepare for a backward; ``last``: whether it is the last of its step, whose gradients are exchanged."""

    def finish(self) -> None:  # noqa: B027
        """Exchange gradients of a step whose last backward wasn't known to be the last."""

    @property
    def disagrees(self) -> bool:
        """Whether this rank's last backward reached other parameters than the ranks have agreed on."""
        return False

    def reset(self) -> None:  # noqa: B027
        """Agree anew in the next backward on what is exchanged, as other parameters train from now on."""

    def agree_each_time(self) -> bool:
        """Agree after each backward from now on; return whether this is new."""
        return False

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Exchange no gradients of backwards inside this context."""
        yield


class Single(Parallel):
    """One process, which has nobody to exchange anything with."""

    @property
    def not_captured(self) -> str | None:
        return None

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        return sums


class Replicated(Parallel):
    """Each rank has the whole model, and hooks on its parameters sum gradients over ranks while backward computes."""

    def __init__(self, loss_of: LossFunction, exchange: GradientExchange):
        super().__init__(loss_of)
        self.exchange: GradientExchange = exchange

    @property
    def not_captured(self) -> str | None:
        if self.exchange.agree_each_time:
            return "ranks agree in each step on the parameters that have gradients"
        return None

    def arm(self, last: bool) -> None:
        self.exchange.armed = last  # gradients of earlier micro-batches accumulate on this rank

    def finish(self) -> None:
        self.exchange.finish()

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        ranks.sum_in_place(sums)
        return sums

    @property
    def disagrees(self) -> bool:
        return bool(self.exchange.changed or self.exchange.missed)

    def reset(self) -> None:
        self.exchange.reset()

    def agree_each_time(self) -> bool:
        if self.exchange.agree_each_time:
            return False
        self.exchange.reset(agree_each_time=True)
        return True

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        was_armed = self.exchange.armed
        self.exchange.armed = False
        try:
            yield
        finally:
            self.exchange.armed = was_armed


class Sharded(Parallel):
    """Each rank has a part of every parameter (FSDP2), which gathers weights and scatters gradients by itself."""

    def __init__(self, sharded: ShardedModules):
        super().__init__(sharded.loss_of)
        self.sharded: ShardedModules = sharded
        self.divided_by = ranks.world_size()  # its gradients are means over ranks

    @property
    def not_captured(self) -> str | None:
        return "fsdp gathers weights in each step"

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        ranks.sum_in_place(sums)
        return sums

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        with self.sharded.gathered():
            yield


@contextlib.contextmanager
def zeroed(modules: nn.Module) -> Iterator[None]:
    """Set all gradients of backwards inside this context to 0, NaN included: those of a dummy batch."""
    handles = [p.register_hook(torch.zeros_like) for p in modules.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def communicates_in_forward(module: nn.Module) -> bool:
    """Return whether a layer communicates between ranks in its forward, so that all ranks must call it together."""
    if isinstance(module, InputNormalization):
        return module.norm_type == "global" and not isinstance(module, FixedNormalization)
    return isinstance(module, (nn.SyncBatchNorm, sync_batch_norm.SyncBatchNorm))
