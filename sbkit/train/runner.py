"""How a step is computed: forward and backward of its micro-batches, and its update.

``Eager`` does so with Python, one kernel after the other. ``graphs.Captured`` replays CUDA graphs of what ``Eager``
does. A recipe that updates nothing gets ``GradientsOnly``. Which one is chosen when a run is set up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from sbkit.errors import SbkitError
from sbkit.train.averaging import EMA
from sbkit.train.batches import MicroBatch, Objectives, Outputs
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import Single, zeroed
from sbkit.train.hooks import Hooks
from sbkit.train.monitor.timing import StepTimes
from sbkit.train.precision import Unscaled
from sbkit.train.results import step_values
from sbkit.train.step import COUNT, TOTAL, Loss, row_of
from sbkit.train.update import gradients, update, write_rates

Rates = Sequence[Sequence[Tensor] | None]  # the tensors of learning rates of each optimizer, see ``update.write_rates``


class MicroStep(NamedTuple):
    """What a micro-step leaves behind besides gradients."""

    row: Tensor  # its sums and counts, see ``step.row_of``
    names: list[str]  # of its extras
    outputs: Outputs
    objectives: Objectives


class Runner(Protocol):
    """Computes steps."""

    updates: int
    """Updates of weights in a step: 1, or 0 for a recipe without an optimizer."""
    nodes: dict[str, int]
    """The nodes of the CUDA graphs that were captured last: of a "micro-step", and of an "update"."""

    def micro_step(self, batch: MicroBatch, last: bool) -> MicroStep:
        """Run forward and backward of a micro-batch; ``last``: whether its step ends with it."""

    def update(self, sums: Tensor) -> Tensor:
        """Update by the gradients of a step, and return what the host reads later.

        sums : of the whole step over all ranks, see ``results.step_values``
        Returns the row of the step, see ``results``. Nothing waits for the device.
        """

    def reset(self) -> None:
        """Forget what was captured: other parameters train from now on, or gradients are exchanged in another way."""


class Eager:
    """Computes a step with Python."""

    updates = 1

    def __init__(self, hooks: Hooks, parallel: Single, precision: Unscaled, moving_average: EMA | None,
                 times: StepTimes, device: torch.device):
        self.hooks = hooks
        self.parallel = parallel
        self.precision = precision
        self.moving_average = moving_average
        self.times = times
        self.device = device
        self.nodes: dict[str, int] = {}

    def micro_step(self, batch: MicroBatch, last: bool) -> MicroStep:
        self.parallel.arm(last)
        outputs, objectives, loss = self.parallel.loss_of(batch)
        if not loss.total.requires_grad:
            raise SbkitError("the loss depends on no trainable parameter", hint="freeze and detach less")
        self.times.mark("loss")
        row, names = row_of(loss, self.device)
        self.precision.begin(row[COUNT])
        with zeroed(self.hooks.modules) if _is_dummy(loss) else contextlib.nullcontext():
            self.precision.scaled(loss.total).backward()
        self.times.mark("backward")
        return MicroStep(row, names, outputs, objectives)

    def update(self, sums: Tensor) -> Tensor:
        optimizers, rates = self.prepare_update()
        return self.take_update(optimizers, sums, rates)

    def prepare_update(self) -> tuple[list[Optimizer], Rates]:
        """Return this step's optimizers and the tensors of their rates; called after all hooks, which may change them.

        What the host alone knows of an update is counted here, so that the rest can be captured.
        """
        optimizers = self.hooks.optimizers()
        if self.moving_average is not None:
            self.moving_average.count_update()
        return optimizers, write_rates(optimizers, self.device)

    def take_update(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> Tensor:
        """Update, and clear the gradients that were used."""
        with self.keeping_frozen(optimizers) as kept:
            values = self.compute_update(optimizers, sums, rates)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            if kept and self.parallel.exchange is not None:  # the next sum over ranks includes them
                torch._foreach_div_(kept, ranks.world_size())
        return values

    def compute_update(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> Tensor:
        """Compute an update, all of which can be captured.

        One factor multiplies all gradients: it divides by the count of the whole step, removes the loss scale, and
        clips.
        """
        count = sums[COUNT]
        counted = count > 0
        finite = torch.isfinite(sums[TOTAL])
        factor = torch.where(counted, self.parallel.divided_by / count, torch.zeros_like(count))
        max_norm = self.hooks.settings.max_grad_norm
        norm, unchanged = update(optimizers, self.precision.unscaled(factor), max_norm, finite & counted, rates)
        # A step that counts nothing changes nothing: weights would decay, and move by momentum. That is no skip.
        skipped = torch.where(counted, unchanged, (~finite).to(unchanged))
        values = step_values(norm.float(), skipped, self.precision.scales(), sums)
        self.follow_update(unchanged, skipped)
        self.precision.follow(count / ranks.world_size())
        return values

    def follow_update(self, unchanged: Tensor, skipped: Tensor) -> None:
        """Let the loss scale and the average of the weights follow an update.

        unchanged, skipped : 1 if it changed nothing, and if that is because something was not finite
        """
        self.precision.adjust(skipped)
        if self.moving_average is not None:
            self.moving_average.update(unchanged)

    @contextlib.contextmanager
    def keeping_frozen(self, optimizers: Sequence[Optimizer]) -> Iterator[list[Tensor]]:
        """Bring gradients that frozen optimizers keep, as in SpeechBrain, to the loss scale that an update leaves.

        optimizers : those that update inside this context
        Yields those gradients.
        """
        active = {id(optimizer) for optimizer in optimizers}
        frozen = [optimizer for optimizer in self.hooks.all_optimizers() if id(optimizer) not in active]
        kept = gradients(frozen)
        before = self.precision.gradient_scale() if kept else None
        yield kept
        if before is not None:
            torch._foreach_mul_(kept, self.precision.gradient_scale() / before)

    def written_by_update(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """Return the tensors that an update writes, besides weights and their gradients."""
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()
                  if isinstance(value, Tensor)]
        averages = [] if self.moving_average is None else self.moving_average.tensors()
        return [*states, *averages, *self.precision.tensors()]

    def reset(self) -> None:
        pass


class GradientsOnly(Eager):
    """Computes the gradients of a recipe without an optimizer, which reads them by itself."""

    updates = 0

    def update(self, sums: Tensor) -> Tensor:
        norm = skipped = torch.zeros_like(sums[TOTAL])
        return step_values(norm, skipped, self.precision.scales(), sums)


def _is_dummy(loss: Loss) -> bool:
    """Return whether a loss is of a dummy batch, which a rank without data computes so that all exchange alike."""
    return not isinstance(loss.count, Tensor) and loss.count == 0
