"""How a step is computed: forward and backward of its micro-batches, and its update.

``Eager`` does so with Python, one kernel after the other. ``graphs.Captured`` replays CUDA graphs of what ``Eager``
does. A recipe that updates nothing gets ``GradientsOnly``. Which one is chosen once, before the first step of a run.
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
from sbkit.train.distributed.parallel import Parallel, zeroed
from sbkit.train.hooks import Hooks
from sbkit.train.monitor.timing import StepTimes
from sbkit.train.precision import Precision
from sbkit.train.results import COUNT, TOTAL, step_values, sums_of
from sbkit.train.update import gradients, update, write_rates

Rates = Sequence[Sequence[Tensor] | None]  # the tensors of learning rates of each optimizer, see ``update.write_rates``


class MicroStep(NamedTuple):
    """What a micro-step leaves behind besides gradients."""

    sums: Tensor  # of its loss and extras, see ``results.sums_of``
    extra_names: list[str]
    outputs: Outputs
    objectives: Objectives


class Runner(Protocol):
    """Computes steps."""

    updates_weights: bool
    """Whether a step updates weights, as all do but those of a recipe without an optimizer."""
    nodes: dict[str, int]
    """The nodes of the CUDA graphs that were captured last: of a "micro-step", and of an "update"."""

    def micro_step(self, batch: MicroBatch, last: bool) -> MicroStep:
        """Run forward and backward of a micro-batch; ``last``: whether its step ends with it."""

    def update(self, sums: Tensor) -> Tensor:
        """Update by the gradients of a step, and return what the host reads later. Nothing waits for the device.

        sums : of the whole step over all ranks, with flags
        Returns the values of the step, see ``results``.
        """

    def reset(self) -> None:
        """Forget what was captured: other parameters train from now on, or gradients are exchanged in another way."""


class Eager:
    """Computes a step with Python.

    An update has two parts. ``prepare_update`` does what only the host can do. ``apply_gradients`` is what the device
    computes; it can be captured as a CUDA graph. SpeechBrain's own step (``Brain.optimizers_step``) uses other parts.
    """

    updates_weights = True

    def __init__(self, hooks: Hooks, parallel: Parallel, precision: Precision, moving_average: EMA | None,
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
            raise SbkitError("nothing-to-train",
                             "the loss depends on no trainable parameter",
                             hint="check what is frozen, detached or computed under torch.no_grad()")
        self.times.mark("loss")

        sums, extra_names = sums_of(loss, self.device)
        self.precision.begin(sums[COUNT])
        with zeroed(self.hooks.modules) if loss.counts_nothing else contextlib.nullcontext():
            self.precision.scaled(loss.total).backward()
        self.times.mark("backward")
        return MicroStep(sums, extra_names, outputs, objectives)

    def update(self, sums: Tensor) -> Tensor:
        optimizers, rates = self.prepare_update()
        return self.update_and_clear(optimizers, sums, rates)

    def prepare_update(self) -> tuple[list[Optimizer], Rates]:
        """Return the optimizers of the update that is due, and the tensors of their rates, written to the device.

        Called after all hooks, which may change both. What the host alone knows of an update is counted here.
        """
        optimizers = self.hooks.optimizers()
        if self.moving_average is not None:
            self.moving_average.count_update()
        return optimizers, write_rates(optimizers, self.device)

    def update_and_clear(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> Tensor:
        """Update by gradients of Python's, and clear those that were used."""
        with self.rescaling_frozen(optimizers) as frozen_gradients:
            values = self.apply_gradients(optimizers, sums, rates)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            if frozen_gradients and self.parallel.exchange is not None:  # the next sum over ranks includes them
                torch._foreach_div_(frozen_gradients, ranks.world_size())
        return values

    def apply_gradients(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> Tensor:
        """Change weights by their gradients, and with them the loss scale and the moving average; return the values.

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
        self.adjust_scale_and_average(unchanged, skipped)
        self.precision.follow_count(count / ranks.world_size())
        return values

    def adjust_scale_and_average(self, unchanged: Tensor, skipped: Tensor) -> None:
        """Adapt the loss scale and the moving average of the weights to what optimizers have done.

        unchanged, skipped : 1 if they changed nothing, and if that is because something was not finite
        """
        self.precision.adjust(skipped)
        if self.moving_average is not None:
            self.moving_average.update(unchanged)

    @contextlib.contextmanager
    def rescaling_frozen(self, optimizers: Sequence[Optimizer]) -> Iterator[list[Tensor]]:
        """Bring gradients that frozen optimizers keep, as in SpeechBrain, to the loss scale that an update leaves.

        optimizers : those that update inside this context, so that all others are frozen
        Yields those gradients.
        """
        updating = {id(optimizer) for optimizer in optimizers}
        frozen = [optimizer for optimizer in self.hooks.all_optimizers() if id(optimizer) not in updating]
        frozen_gradients = gradients(frozen)
        scale_before = self.precision.gradient_scale() if frozen_gradients else None
        yield frozen_gradients
        if scale_before is not None:
            torch._foreach_mul_(frozen_gradients, self.precision.gradient_scale() / scale_before)

    def tensors_changed_with_weights(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """Return the tensors that ``apply_gradients`` writes, besides weights and their gradients."""
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()
                  if isinstance(value, Tensor)]
        averages = [] if self.moving_average is None else self.moving_average.tensors()
        return [*states, *averages, *self.precision.tensors()]

    def reset(self) -> None:
        """Nothing is kept from step to step."""


class GradientsOnly:
    """Computes the gradients of a recipe without an optimizer, which reads them by itself.

    eager : computes them
    """

    updates_weights = False

    def __init__(self, eager: Eager):
        self.eager = eager
        self.nodes: dict[str, int] = {}

    def micro_step(self, batch: MicroBatch, last: bool) -> MicroStep:
        return self.eager.micro_step(batch, last)

    def update(self, sums: Tensor) -> Tensor:
        """As ``Runner.update``, of which there is only what the host reads."""
        norm = skipped = torch.zeros_like(sums[TOTAL])
        return step_values(norm, skipped, self.eager.precision.scales(), sums)

    def reset(self) -> None:
        """Nothing is kept from step to step."""
