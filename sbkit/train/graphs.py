"""Steps as CUDA graphs: micro-steps and updates are captured once for each key, then replayed with one launch.

A small model's step has a thousand kernels, and the device idles while the host launches one after the other. A graph
launches all of them at once. But a replay runs no Python: it repeats kernels, with the addresses and numbers of the
capture. So a key has what Python decides (shapes, the task's ``graph_key``, what the optimizer does by turns), and what
changes from step to step is in tensors that stay where they are: the batch, learning rates, gradients. Random numbers
are drawn anew, since torch gives each replay the state of its generator.

On several ranks the last micro-step of a step sums gradients over ranks within its graph, bucket by bucket while
backward computes, by the same hooks as without graphs. So ranks that replay and ranks that don't send the same.

What can't be repeated that way runs as without graphs, and one line of the log says why.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import logging
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from sbkit.data.batch import Batch, as_planned
from sbkit.errors import first_line
from sbkit.nn import guard
from sbkit.nn.peek import Peek
from sbkit.train import rng
from sbkit.train.batches import MicroBatch, tensors_in, utterance_ids
from sbkit.train.distributed import ranks
from sbkit.train.distributed.equality import communicates_in_forward
from sbkit.train.memory.oom import is_out_of_memory, release
from sbkit.train.runner import Eager, MicroStep, Rates

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: The most graphs of micro-steps: each takes some MiB on the device besides the memory that all of them share.
MAX_GRAPHS = 128
#: The most nodes of a graph, of some KiB each. A recurrent layer has several for each of its time steps.
MAX_NODES = 20_000
#: What a first replay's sums, gradients and changes of weights may differ by from those of the step itself. Kernels
#: that add with atomics round in another order each time, and bf16 has 8 bits, 0.4 %. A replay that repeats something
#: wrong (an old batch, a number of the host, a branch not taken) is further away.
NEAR = 0.01
#: A tensor's change of less than this share of the whole change is compared with the whole one's, as it is rounding.
SMALL = 1e-3


@dataclass
class _Graph:
    """A captured graph, with the tensors that go in and come out at fixed addresses."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any  # a MicroStep, or what an update leaves for the host
    checks: Tensor | None = None  # what ``guard`` looks at after a micro-step ...
    tables: Sequence[guard.Checked] = ()  # ... and against what
    held: object = None  # what kernels read, and perhaps nobody else holds


class _Trial(NamedTuple):
    """What a micro-step computed, to compare a first replay with."""

    parameters: list[Parameter]  # that it gave a gradient
    figures: Peek  # its sums and counts, and the norm of each gradient


class _NotRepeatable(Exception):
    """Says why replays of a step would not compute what the step does."""


def wanted(device: torch.device, setting: bool | None) -> bool:
    """Return whether steps on a device are captured at all; ``setting``: the recipe's key ``graphs``."""
    return device.type == "cuda" and setting is not False


def is_capture(filename: str, function: str) -> bool:
    """Return whether a frame of a stack, of this file and function, captures or compares, as a run rarely does."""
    return filename == __file__ and function in ("_capture_micro_step", "_capture_update")


class Captured:
    """Captures and replays micro-steps and updates from the second step on.

    The first step makes optimizer states, and ranks agree in it on the gradients that they exchange.

    eager : computes what is captured, and what can't be
    """

    updates = 1

    def __init__(self, eager: Eager):
        self.eager = eager
        self.hooks = eager.hooks
        self.parallel = eager.parallel
        self.device = eager.device
        self.nodes: dict[str, int] = {}
        self._gradients: list[tuple[Parameter, Tensor]] = []
        self._stream: torch.cuda.Stream | None = None
        self._said_beyond_shape = False
        self.reset()

    def reset(self) -> None:
        for parameter, _ in self._gradients:
            parameter.grad = None
        #: The parameters that train, and the tensors that graphs add their gradients to.
        self._gradients = []
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: what has this key runs without
        self._update_graphs: dict[Hashable, _Graph | None] = {}  # the same; all ranks have the same keys
        self._pool: Any = None  # torch's handle of the memory that all graphs share
        self._decided = False  # after the first update, alike on all ranks
        self._captures = False  # may end on one rank alone
        self._refused = False  # by all ranks, when they decided

    def decide(self) -> None:
        """Decide whether to capture, after the first update."""
        self._decided = self._captures = True
        reason = self.parallel.not_captured or self.hooks.capture_refusal()
        if reason is None and ranks.world_size() > 1 and any(
                map(communicates_in_forward, self.hooks.modules.modules())):
            reason = "layers communicate with other ranks"
        self._refused = reason is not None
        if reason is not None:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        """Capture nothing from now on, and free the memory of graphs."""
        self._captures, self._pool, self._graphs = False, None, {}
        self._update_graphs = dict.fromkeys(self._update_graphs)
        release(self.device)
        if ranks.is_main():
            logger.info("Steps are not captured as CUDA graphs: %s", reason)

    # ------------------------------------------------------------ replays

    def micro_step(self, batch: MicroBatch, last: bool) -> MicroStep:
        graph = self._micro_step_graph(batch, exchanges=last and self.parallel.exchange is not None)
        if graph is None:
            return self.eager.micro_step(batch, last)
        self._attach_gradients()
        for own, new in zip(graph.inputs, _tensors(batch), strict=True):
            own.copy_(new, non_blocking=True)
        graph.graph.replay()
        if graph.checks is not None:
            guard.check_later(graph.checks, graph.tables, utterance_ids(batch) or None)
        self.eager.times.mark("backward")
        result: MicroStep = graph.result
        return result._replace(row=result.row.clone())  # which the next replay overwrites

    def _micro_step_graph(self, batch: MicroBatch, exchanges: bool) -> _Graph | None:
        """Return the graph of a micro-step, captured now if it is new; None if it has to be computed without."""
        planned = as_planned(batch)
        if not self._captures or planned.weight == 0:  # a dummy batch is of a shape of its own
            return None
        if planned.beyond_shape:  # a graph of its own would hardly be replayed
            if not self._said_beyond_shape:
                logger.info("A micro-batch is larger than its shape, as recordings are longer than their rows say: "
                            "such ones are computed without a CUDA graph")
            self._said_beyond_shape = True
            return None
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(batch))
        key = exchanges, self.hooks.graph_key(), shapes
        if key not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                self._stop(f"batches have more than {MAX_GRAPHS} shapes")
                return None
            self._graphs[key] = self._try("micro-step", lambda: self._capture_micro_step(batch, exchanges))
        return self._graphs.get(key)

    def update(self, sums: Tensor) -> Tensor:
        """As ``Runner.update``; by a graph, gradients are zeros afterwards, since graphs add to fixed addresses."""
        optimizers, rates = self.eager.prepare_update()
        graph = self._update_graph(optimizers, sums, rates)
        if graph is None:
            values = self.eager.take_update(optimizers, sums, rates)
        else:
            self._attach_gradients()
            graph.inputs[0].copy_(sums)
            graph.graph.replay()
            for optimizer in optimizers:
                if hasattr(optimizer, "count_step"):
                    optimizer.count_step()
            values = graph.result
        if not self._decided:
            self.decide()
        return values

    def _update_graph(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> _Graph | None:
        """Return the graph of an update, captured now if it is new; None if it has to be done without."""
        if not self._decided or self._refused:
            return None
        if not self._gradients and self.parallel.exchange is not None:
            # Also on a rank that had only dummies so far: an optimizer may communicate, so all capture it together.
            self._gradients = list(self.parallel.exchange.views().items())
        frozen = len(optimizers) < len(self.hooks.all_optimizers())  # whose gradients stay
        hooked = any(vars(optimizer).get(f"_optimizer_step_{when}_hooks")  # with Python
                     for optimizer in optimizers for when in ("pre", "post"))
        waits = any(rate is None for rate in rates)  # for the host, or has rates of its own
        if frozen or hooked or waits:
            return None
        addresses = tuple(id(rate) for own in rates for rate in own or ())
        key = len(sums), self.hooks.settings.max_grad_norm, *map(_settings, optimizers), *addresses
        if key not in self._update_graphs:
            able = self._captures and bool(self._gradients)
            # A comparison communicates if the optimizer does, so it takes all ranks, also those that have stopped.
            compares = not ranks.any_of({"unable": not able})["unable"]
            self._update_graphs[key] = None
            if able:
                self._attach_gradients()
                self._update_graphs[key] = self._try(
                    "update", lambda: self._capture_update(optimizers, sums, rates, compares))
        return self._update_graphs[key]

    @torch.no_grad()
    def _attach_gradients(self) -> None:
        """Bring gradients to the tensors that graphs add to."""
        moved = [(parameter, own) for parameter, own in self._gradients if parameter.grad is not own]
        if moved:
            torch._foreach_zero_([own for _, own in moved])
        for parameter, own in moved:
            if parameter.grad is not None:  # of a micro-batch that was computed without a graph
                own.copy_(parameter.grad)
            parameter.grad = own

    # ------------------------------------------------------------ captures

    def _try(self, kind: str, capture: Callable[[], _Graph]) -> _Graph | None:
        """Capture; if that fails, log why and let what has this key run without a graph."""
        first = kind not in self.nodes
        try:
            graph = capture()
        except Exception as error:  # of a recipe's own code, which can't do here what it does in a step
            while error.__context__ is not None and "captur" in str(error):
                error = error.__context__  # type: ignore[assignment]  # the capture that it ended fails after it
            if is_out_of_memory(error):
                self._stop(f"{self.device} has too little memory for them; a smaller max_batch_seconds leaves more")
                return None
            lines = [f" ({frame.filename}:{frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)
                     if "torch" not in frame.filename.split("/") and frame.filename != __file__]
            reason = first_line(error) + "".join(lines[-1:])  # with the last line that is not torch's
            if kind == "update":
                logger.info("Updates are not captured as a CUDA graph: %s", reason)
            else:
                self._stop(reason)
            return None
        if first and ranks.is_main():
            logger.info("The %s is captured as a CUDA graph of %d nodes (--graphs false leaves it out)", kind,
                        self.nodes[kind])
        return graph

    def _capture_micro_step(self, batch: MicroBatch, exchanges: bool) -> _Graph:
        """Capture a micro-step, after a first replay has computed what a trial did: nothing wrong trains a model.

        exchanges : whether it is the last of its step, so that gradients are summed over ranks
        """
        static = _copied(batch, self.device)
        if not _tensors(static):
            raise _NotRepeatable("batches hold no tensors to copy new ones to")
        with self.hooks.restoring(), self._on_own_stream(), self.eager.times.paused(), guard.collecting():
            trial = self._try_micro_step(static)
            for parameter, own in self._gradients:
                parameter.grad = own
            # Other ranks don't take part in a comparison, so what is compared exchanges nothing.
            graph = self._record_micro_step(static, exchanges=False)
            if trial is not None:
                self._compare_micro_step(graph, trial)
            if exchanges:
                assert self.parallel.exchange is not None
                try:
                    graph = self._record_micro_step(static, exchanges=True)
                except BaseException:
                    self.parallel.exchange.forget_backward()  # which has sent nothing
                    raise
            return graph

    def _try_micro_step(self, static: MicroBatch) -> _Trial | None:
        """Compute a micro-step twice, of which the second must change nothing that only Python knows.

        Returns what the second one gave; None if there is no memory for it. Decides on the memory of gradients, once.
        """
        try:
            self.eager.micro_step(static, last=False)  # a first call may fill caches
            parameters = [parameter for parameter in self.hooks.modules.parameters() if parameter.requires_grad]
            for parameter in parameters:
                parameter.grad = None
            before = self._host_state()
            with self.hooks.restoring():
                with _refusing_waits():
                    row = self.eager.micro_step(static, last=False).row
                self._refuse_changes(before)
                reached = [parameter for parameter in parameters if parameter.grad is not None]
                trial = _Trial(reached, _figures(row, reached))
            self._place_gradients(reached)
            return trial
        except Exception as error:
            # Beside the graphs' memory there is none for this trial; the capture uses that memory.
            if is_out_of_memory(error) and self._gradients:
                return None
            raise

    def _place_gradients(self, reached: Sequence[Parameter]) -> None:
        """Decide where graphs put gradients, or refuse a batch that reaches other parameters than those before."""
        if not reached:
            raise _NotRepeatable("the loss reaches no parameter of the modules")
        known = {id(parameter) for parameter, _ in self._gradients}
        exchange = self.parallel.exchange
        if not known:
            places = exchange.views() if exchange is not None else {each: torch.zeros_like(each) for each in reached}
            if any(parameter not in places for parameter in reached):
                raise _NotRepeatable("batches reach different parameters")
            self._gradients = list(places.items())
            return
        # Ranks give zeros for what they don't reach; alone, an optimizer would leave that out.
        fewer = exchange is None and len(reached) < len(known)
        if fewer or {id(parameter) for parameter in reached} - known:
            raise _NotRepeatable("batches reach different parameters")

    def _refuse_changes(self, before: dict[tuple[str, int], Any]) -> None:
        """Raise if a step has changed what Python knows, since a replay would not."""
        after = self._host_state()
        changed = [key[0] for key in dict.fromkeys([*before, *after])
                   if key not in before or key not in after or before[key][0] != after[key][0]]
        if changed:
            raise _NotRepeatable(f"a step changes {', '.join(changed[:3])}, and a replay would not")

    def _host_state(self) -> dict[tuple[str, int], Any]:
        """Return what Python knows of the model, of its layers and of random numbers, with what holds it."""
        state: dict[tuple[str, int], Any] = {(f"{name}'s random numbers on the host", 0): (value.tolist(), value)
                                             for name, value in rng.capture("cpu").items()}
        for kind, owner in self.hooks.state_owners():
            for name, value in vars(owner).items():
                for inner, held in value.items() if name == "_buffers" else [(name, value)]:
                    plain = held is None or isinstance(held, (bool, int, float, str))
                    size = len(held) if isinstance(held, (list, dict, set)) else 0
                    state[f"{kind}.{inner}", id(owner)] = (held if plain else (id(held), size), held)
        return state

    def _record_micro_step(self, static: MicroBatch, exchanges: bool) -> _Graph:
        """Capture a micro-step on a batch whose tensors stay where they are."""
        with guard.collecting() as guarded:
            def work() -> tuple[MicroStep, Tensor | None]:
                step = self.eager.micro_step(static, last=exchanges)
                results = [call.result for call in guarded if call.result is not None]
                return step, torch.stack(results) if results else None

            graph, (result, checks) = self._capture("micro-step", work)
        if not self.hooks.reads_outputs:  # graphs of autograd must not outlive this
            result = result._replace(outputs=None, objectives=None)
        result = tree_map_only(Tensor, Tensor.detach, result)
        held = static, [dict(vars(owner)) for _, owner in self.hooks.state_owners()]
        return _Graph(graph, _tensors(static), result, checks, [call._replace(result=None) for call in guarded], held)

    def _compare_micro_step(self, graph: _Graph, trial: _Trial) -> None:
        """Replay a new graph on the batch and the random numbers of the trial before it, and compare the two."""
        try:
            gradients = [own for _, own in self._gradients]
            kept = [own.clone() for own in gradients]  # of earlier micro-batches
            torch._foreach_zero_(gradients)
            graph.graph.replay()
            row = graph.result.row
            now, expected = _figures(row, trial.parameters).numpy(), trial.figures.numpy()
            torch._foreach_copy_(gradients, kept)
        except Exception as error:
            if is_out_of_memory(error):  # for a moment there are two sets of gradients
                return
            raise
        # Beside others, a part of the loss or a gradient may be nothing but rounding. In fp16 some may be infinite.
        finite = np.where(np.isfinite(expected), expected, 0.0)
        whole_loss = max(abs(finite[0]), abs(finite[1]))
        whole_gradient = np.linalg.norm(finite[len(row):])
        scale = np.concatenate([np.full(len(row), whole_loss), np.full(len(trial.parameters), whole_gradient)])
        apart = ~np.isclose(now, expected, rtol=NEAR, atol=0, equal_nan=True)
        apart &= ~(np.isfinite(now) & np.isfinite(expected)) | (abs(now - finite) > NEAR * scale)
        if apart.any():
            first = int(apart.argmax())
            raise _NotRepeatable(f"a replay computes another {'loss' if first < len(row) else 'gradient'} than the "
                                 f"step: {now[first]:g}, not {expected[first]:g}")

    def _capture_update(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates, compares: bool) -> _Graph:
        """Capture an update.

        compares : whether a first replay has to change the weights as the update itself does; alike on all ranks
        """
        static = sums.clone()

        def work() -> Tensor:
            values = self.eager.compute_update(optimizers, static, rates)
            torch._foreach_zero_([gradient for _, gradient in self._gradients])
            return values

        graph: _Graph | None = None
        try:
            with self._on_own_stream(), _as_capturable(optimizers):
                captured, values = self._capture("update", work)
            graph = _Graph(captured, [static], values, held=rates)
        finally:  # also where it failed, as the other ranks compare together or not at all
            if compares:
                with self._on_own_stream():
                    self._compare_update(graph, optimizers, sums, rates)
        return graph

    @torch.no_grad()
    def _compare_update(self, graph: _Graph | None, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates
                        ) -> None:
        """Update once with Python and once by the graph, from the same state, and compare; then put the state back.

        All ranks do so at the same update, since an optimizer may communicate. If one of them has no graph, or no
        memory for the comparison, none does.
        """
        weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
        written = [*weights, *(gradient for _, gradient in self._gradients), *self.eager.written_by_update(optimizers)]
        before: list[Tensor] = []
        expected: list[Tensor] = []
        try:
            if graph is not None:
                before = [tensor.detach().clone() for tensor in written]
                expected = [torch.empty_like(weight) for weight in weights]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if ranks.any_of({"unable": not expected})["unable"] or graph is None:
            return
        counters = [(state, dict(state)) for optimizer in optimizers for state in optimizer.state.values()]

        def put_back() -> None:
            torch._foreach_copy_(written, before)
            for state, held in counters:  # what the host counts, such as Muon's turns
                state.clear()
                state.update(held)

        try:
            self.eager.compute_update(optimizers, sums.clone(), rates)
            torch._foreach_copy_(expected, weights)
            put_back()
            graph.graph.replay()
            changes = torch._foreach_norm(torch._foreach_sub(expected, before[:len(weights)]))
            errors = torch._foreach_norm(torch._foreach_sub(expected, weights))
        finally:  # also without memory for the differences: this update is still to be taken, once
            put_back()
        figures = [*changes, *errors]
        size, distance = np.split(Peek(torch.stack([each.float() for each in figures])).numpy(), 2)
        allowed = NEAR * np.maximum(size, SMALL * np.linalg.norm(size))
        apart = np.isfinite(size) & ~(distance <= allowed)
        if apart.any():
            first = int(apart.argmax())
            raise _NotRepeatable(f"a replay changes a weight of shape {list(weights[first].shape)} otherwise than the "
                                 f"update: {distance[first]:g} apart, of {size[first]:g}")

    def _capture(self, kind: str, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads, such as those that pin batches, go on.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"), \
                    _refusing_waits():
                result = work()
        except BaseException:
            # A capture that was broken leaves torch's generator in the middle of it; another one ends that.
            with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream), \
                    torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
                torch.zeros((), device=self.device)
            raise
        nodes = ctypes.c_size_t()  # the kernels and copies in the graph; 0 if this driver doesn't tell
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
            driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes))
        self.nodes[kind] = nodes.value
        if nodes.value > MAX_NODES:
            raise _NotRepeatable(f"the {kind} has {nodes.value:,} nodes, and {MAX_NODES:,} are allowed")
        graph.instantiate()
        return graph, result

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Compute in the stream of all captures inside this context."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)


def _tensors(batch: MicroBatch) -> list[Tensor]:
    return batch.tensors() if isinstance(batch, Batch) else [each for _, each in tensors_in(batch)]


def _copied(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a copy of a batch, on the device."""
    if hasattr(batch, "to") and not isinstance(batch, Tensor):
        return copy.deepcopy(batch).to(device)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), batch)


def _figures(row: Tensor, parameters: Sequence[Parameter]) -> Peek:
    """Return the sums of a micro-step, and the norms of the gradients that it gave."""
    norms = torch._foreach_norm([each.grad for each in parameters if each.grad is not None])
    return Peek(torch.cat([row, torch.stack([norm.float() for norm in norms])]))


def _settings(optimizer: Optimizer) -> tuple[Hashable, ...]:
    """Return the numbers of an optimizer's groups, which its kernels get from Python, and what it does by turns."""
    numbers = tuple(value for group in optimizer.param_groups for name, value in group.items()
                    if name not in ("params", "lr") and isinstance(value, (int, float, tuple)))
    return id(optimizer), numbers, getattr(optimizer, "graph_key", tuple)()


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


@contextlib.contextmanager
def _refusing_waits() -> Iterator[None]:
    """Raise inside this context where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
