"""The capture of one variant: from a trial by Python, over the recording, to the comparison with a first replay.

Nothing here trains: weights, gradients, states of optimizers and random numbers are put back. All that this file calls
belongs to a capture, by which a rehearsal tells it from a step (see ``is_capture``).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from sbkit.nn import guard
from sbkit.nn.peek import Peek
from sbkit.train.batches import MicroBatch
from sbkit.train.distributed import ranks
from sbkit.train.graphs.comparison import check_micro_step, check_update
from sbkit.train.graphs.gradients import GradientPlaces
from sbkit.train.graphs.graph import MicroStepGraph, UpdateGraph, tensors_of
from sbkit.train.graphs.recorder import Recorder, refusing_waits
from sbkit.train.graphs.repeatable import HostState, NotRepeatable
from sbkit.train.graphs.variants import Variant
from sbkit.train.memory.oom import is_out_of_memory
from sbkit.train.runner import Eager, MicroStep, Rates


class Expected(NamedTuple):
    """What Python computed in a micro-step, to compare a first replay with."""

    parameters: list[Parameter]  # that it gave a gradient
    figures: Peek  # its sums, and the norm of each gradient


class MicroStepCapture:
    """Captures a variant of micro-steps, and compares a first replay; raises an error, such as ``NotRepeatable``.

    batch : the first one of the variant; it is copied, and the copy holds what later batches are copied into
    exchanges : whether the micro-step is the last of its step, so that gradients are summed over ranks
    """

    def __init__(self, eager: Eager, recorder: Recorder, places: GradientPlaces, variant: Variant[MicroStepGraph],
                 batch: MicroBatch, exchanges: bool):
        self.eager = eager
        self.hooks = eager.hooks
        self.recorder = recorder
        self.places = places
        self.variant = variant
        self.exchanges = exchanges
        self.batch = _copied(batch, eager.device)
        if not tensors_of(self.batch):
            raise NotRepeatable("batches hold no tensors to copy new ones to")

    def run(self) -> None:
        with self.hooks.restoring(), self.recorder.in_stream(), self.eager.times.paused(), guard.collecting():
            expected = self.warm_up()
            self.places.point_to()

            # Other ranks don't take part in a comparison, so what is compared exchanges nothing.
            graph = self.record(exchanges=False)
            is_verified = expected is not None and self.verify(graph, expected)
            if self.exchanges:
                graph = self.record_with_exchange()
            self.variant.take(graph, is_verified)

    def warm_up(self) -> Expected | None:
        """Compute the micro-step twice, of which the second time must change nothing that only Python knows.

        Returns what the second one gave; None if there is no memory for it. Decides on the places of gradients, once.
        """
        try:
            self.eager.micro_step(self.batch, last=False)  # a first call may fill caches
            parameters = [parameter for parameter in self.hooks.modules.parameters() if parameter.requires_grad]
            for parameter in parameters:
                parameter.grad = None

            before = HostState(self.hooks)
            with self.hooks.restoring():
                with refusing_waits():
                    sums = self.eager.micro_step(self.batch, last=False).sums
                HostState(self.hooks).refuse_changes(before)
                reached = [parameter for parameter in parameters if parameter.grad is not None]
                expected = Expected(reached, _figures(sums, reached))
            self.places.decide(reached)
            return expected
        except Exception as error:
            # Beside the graphs' memory there is none for this trial; the capture uses that memory.
            if is_out_of_memory(error) and self.places:
                return None
            raise

    def record(self, exchanges: bool) -> MicroStepGraph:
        """Record the micro-step on the batch whose tensors stay where they are."""
        with guard.collecting() as guarded:
            def work() -> tuple[MicroStep, Tensor | None]:
                step = self.eager.micro_step(self.batch, last=exchanges)
                results = [call.result for call in guarded if call.result is not None]
                return step, torch.stack(results) if results else None

            graph, (result, checks) = self.recorder.record("micro-step", work)
        if not self.hooks.reads_outputs:  # graphs of autograd must not outlive this
            result = result._replace(outputs=None, objectives=None)
        result = tree_map_only(Tensor, Tensor.detach, result)
        tables = [call._replace(result=None) for call in guarded]
        held = self.batch, [dict(vars(owner)) for _, owner in self.hooks.state_owners()]
        return MicroStepGraph(graph, tensors_of(self.batch), result, checks, tables, held)

    def record_with_exchange(self) -> MicroStepGraph:
        """Record the micro-step that was compared, with the sums of gradients over ranks."""
        exchange = self.places.exchange
        assert exchange is not None, "a single rank exchanges nothing"
        try:
            return self.record(exchanges=True)
        except BaseException:
            exchange.forget_backward()  # which has sent nothing
            raise

    def verify(self, graph: MicroStepGraph, expected: Expected) -> bool:
        """Replay on the batch and the random numbers of the trial; return False if there is no memory to compare."""
        number_of_sums = len(graph.result.sums)
        try:
            earlier = [place.clone() for place in self.places.tensors]  # of earlier micro-batches
            torch._foreach_zero_(self.places.tensors)
            graph.graph.replay()
            replayed = _figures(graph.result.sums, expected.parameters).numpy()
            torch._foreach_copy_(self.places.tensors, earlier)
        except Exception as error:
            if is_out_of_memory(error):  # for a moment there are two sets of gradients
                return False
            raise
        check_micro_step(expected.figures.numpy(), replayed, number_of_sums)
        return True


class UpdateCapture:
    """Captures a variant of updates, and compares a first replay; raises an error, such as ``NotRepeatable``.

    All ranks do so at the same update, since an optimizer may communicate.

    optimizers, sums, rates : of the update that is due, see ``Eager.apply_gradients``
    """

    def __init__(self, eager: Eager, recorder: Recorder, places: GradientPlaces, variant: Variant[UpdateGraph],
                 optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates):
        self.eager = eager
        self.recorder = recorder
        self.places = places
        self.variant = variant
        self.optimizers = optimizers
        self.sums = sums
        self.rates = rates

    def run(self, compares: bool) -> None:
        """Capture; ``compares``: whether to compare a first replay, the same on all ranks."""
        graph: UpdateGraph | None = None
        is_verified = False
        try:
            graph = self.record()
        finally:  # also where it failed, as the other ranks compare together or not at all
            if compares:
                with self.recorder.in_stream():
                    is_verified = self.verify(graph)
        self.variant.take(graph, is_verified)

    def record(self) -> UpdateGraph:
        static_sums = self.sums.clone()

        def work() -> Tensor:
            values = self.eager.apply_gradients(self.optimizers, static_sums, self.rates)
            torch._foreach_zero_(self.places.tensors)
            return values

        with self.recorder.in_stream(), _as_capturable(self.optimizers):
            graph, values = self.recorder.record("update", work)
        return UpdateGraph(graph, static_sums, values, self.rates)

    @torch.no_grad()
    def verify(self, graph: UpdateGraph | None) -> bool:
        """Update once with Python and once by the graph, from the same state, and compare; then put the state back.

        graph : None if recording it failed on this rank

        Returns whether it was compared: if a rank has no graph, or no memory for the comparison, none compares.
        """
        tensors = None if graph is None else self._tensors_to_compare()
        if ranks.any_of({"unable": tensors is None})["unable"] or graph is None or tensors is None:
            return False
        self._compare(graph, tensors)
        return True

    def _tensors_to_compare(self) -> _UpdatedTensors | None:
        """Return the tensors that an update changes, and room for two copies; None if there is no memory for these."""
        weights = [weight for optimizer in self.optimizers for group in optimizer.param_groups
                   for weight in group["params"]]
        changed = [*weights, *self.places.tensors, *self.eager.tensors_changed_with_weights(self.optimizers)]
        try:
            before = [tensor.detach().clone() for tensor in changed]
            weights_by_python = [torch.empty_like(weight) for weight in weights]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        return _UpdatedTensors(weights, changed, before, weights_by_python)

    def _compare(self, graph: UpdateGraph, tensors: _UpdatedTensors) -> None:
        """Raise ``NotRepeatable`` if the graph changes weights otherwise than Python does."""
        weights, changed, before, weights_by_python = tensors
        # What the host counts, such as Muon's turns, is in dictionaries.
        states = [(state, dict(state)) for optimizer in self.optimizers for state in optimizer.state.values()]

        def put_back() -> None:
            torch._foreach_copy_(changed, before)
            for state, state_before in states:
                state.clear()
                state.update(state_before)

        try:
            self.eager.apply_gradients(self.optimizers, self.sums.clone(), self.rates)
            torch._foreach_copy_(weights_by_python, weights)
            put_back()
            graph.graph.replay()
            changes = torch._foreach_norm(torch._foreach_sub(weights_by_python, before[:len(weights)]))
            distances = torch._foreach_norm(torch._foreach_sub(weights_by_python, weights))
        finally:  # also without memory for the differences: this update is still to be taken, once
            put_back()
        norms = Peek(torch.stack([norm.float() for norm in (*changes, *distances)]))
        change, distance = np.split(norms.numpy(), 2)
        check_update(change, distance, [weight.shape for weight in weights])


class _UpdatedTensors(NamedTuple):
    """What comparing two updates needs."""

    weights: list[Tensor]
    changed: list[Tensor]
    """The weights, and all else that an update changes."""
    before: list[Tensor]
    """Copies of ``changed``, to put them back."""
    weights_by_python: list[Tensor]
    """Room for the weights after Python's update."""


def _copied(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a copy of a batch, on the device."""
    if hasattr(batch, "to") and not isinstance(batch, Tensor):
        return copy.deepcopy(batch).to(device)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), batch)


def _figures(sums: Tensor, parameters: Sequence[Parameter]) -> Peek:
    """Return the sums of a micro-step, and the norms of the gradients that it gave."""
    norms = torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return Peek(torch.cat([sums, torch.stack([norm.float() for norm in norms])]))


@contextlib.contextmanager
def _as_capturable(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Set the flag inside this context that torch asks for in a capture; fused kernels can be captured without it."""
    flagged = [group for optimizer in optimizers for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in flagged]
    for group in flagged:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, flag in zip(flagged, before, strict=True):
            group["capturable"] = flag
