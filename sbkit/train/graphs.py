"""The micro-step and the update of training as CUDA graphs: captured once for each key, then replayed with one launch.

A small model's step has a thousand kernels, and the device idles while the host launches one after the other. A graph
launches all of them at once. But a replay runs no Python: it repeats kernels, with the addresses and numbers of the
capture. So a key has what Python decides (shapes, the task's ``graph_key``, what the optimizer does by turns), and what
changes from step to step is in tensors that stay where they are: the batch, learning rates, gradients. Random numbers
are drawn anew, since torch gives each replay the state of its generator.

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
import speechbrain as sb
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
from sbkit.train.batches import MicroBatch, Objectives, Outputs, tensors_in, utterance_ids
from sbkit.train.distributed import ranks
from sbkit.train.distributed.exchange import GradientExchange
from sbkit.train.distributed.parallel import communicates_in_forward
from sbkit.train.memory.oom import is_out_of_memory, release

logger = logging.getLogger(__name__)
T = TypeVar("T")
Rates = Sequence[Sequence[Tensor] | None]  # the tensors of learning rates of each optimizer, see ``step.write_rates``

#: The most graphs of micro-steps: each takes some MiB on the device besides the memory that all of them share.
MAX_GRAPHS = 128
#: The most nodes of a graph, of some KiB each. A recurrent layer has several for each of its time steps.
MAX_NODES = 20_000
#: What a replay's sums and gradients may differ by from a step's: kernels round, some in another order each time.
NEAR = 0.01


class MicroStep(NamedTuple):
    """What a micro-step leaves behind besides gradients; see ``Trainer.train_step``."""

    row: Tensor  # its sums and counts
    names: list[str]  # of its extras
    outputs: Outputs
    objectives: Objectives


@dataclass
class _Captured:
    """A graph, with the tensors that go in and come out at fixed addresses."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any  # a MicroStep, or what an update leaves for the host
    checks: Tensor | None = None  # what ``guard`` looks at after a micro-step ...
    tables: Sequence[guard.Checked] = ()  # ... and against what
    held: object = None  # what kernels read, and perhaps nobody else holds


class _NotRepeatable(Exception):
    """Says why replays of a step would not compute what the step does."""


class StepGraphs:
    """Captures and replays micro-steps and updates from the second step on.

    The first one makes optimizer states, and ranks agree in it on the gradients that they exchange.

    compute : a whole micro-step, from a batch to gradients
    update : what follows the last one, from the step's sums
    """

    def __init__(self, brain: sb.Brain, device: torch.device, compute: Callable[[MicroBatch], MicroStep],
                 update: Callable[[Sequence[Optimizer], Tensor, Rates], Tensor]):
        self.brain, self.device, self._compute, self._update = brain, device, compute, update
        self._gradients: list[tuple[Parameter, Tensor]] = []
        self._stream: torch.cuda.Stream | None = None
        self._warned = False
        self.nodes: dict[str, int] = {}
        """The nodes of the graphs that were captured last: of a "micro-step", and of an "update"."""
        self.reset()

    def reset(self, exchange: GradientExchange | None = None, sharded: bool = False) -> None:
        """Forget all graphs: other parameters train from now on, or ranks exchange their gradients in another way."""
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._exchange, self._sharded = exchange, sharded
        self._graphs: dict[Hashable, _Captured | None] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share
        self._gradients, self._on, self._steps = [], False, 0
        self.enabled = self.device.type == "cuda" and self.brain.keys.graphs is not False
        """Whether to call this at all."""

    def _begin(self) -> None:
        """Decide whether to capture."""
        brain, self._on = self.brain, True
        if self._sharded:
            self._stop("fsdp gathers weights in each step")
        elif self._exchange is not None and self._exchange.agree_each_time:
            self._stop("ranks agree in each step on the parameters that have gradients")
        elif not brain.captures_steps:
            self._stop(f"{type(brain).__name__} doesn't say that its steps can be replayed; `graphs: true` says so")
        elif ranks.world_size() > 1 and any(map(communicates_in_forward, brain.modules.modules())):
            self._stop("layers communicate with other ranks")

    def _stop(self, reason: str) -> None:
        """Capture nothing from now on, and free the memory of graphs."""
        self._on, self._pool, self._graphs = False, None, {}
        release(self.device)
        if ranks.is_main():
            logger.info("Steps are not captured as CUDA graphs: %s", reason)

    # ------------------------------------------------------------ replays

    def micro_step(self, batch: MicroBatch) -> MicroStep | None:
        """Compute a micro-batch by a graph, and return what is left behind; None if it has to be computed without."""
        planned = as_planned(batch)
        if not self._on or planned.weight == 0:  # a stand-in is small, and of a shape of its own
            return None
        if planned.beyond_shape:  # a graph of its own would hardly be replayed
            if not self._warned:
                logger.info("A micro-batch is larger than its shape, as recordings are longer than their rows say: "
                            "such ones are computed without a CUDA graph")
            self._warned = True
            return None
        given = _tensors(batch)
        key = self.brain.graph_key(), tuple((each.shape, each.dtype) for each in given)
        if key not in self._graphs and len(self._graphs) >= MAX_GRAPHS:
            self._stop(f"batches have more than {MAX_GRAPHS} shapes")
            return None
        if key not in self._graphs:
            self._graphs[key] = self._try("micro-step", lambda: self._capture_micro_step(batch))
        found = self._graphs.get(key)
        if found is None:
            return None
        self._attach_gradients()
        for own, new in zip(found.inputs, given, strict=True):
            own.copy_(new, non_blocking=True)
        found.graph.replay()
        if found.checks is not None:
            guard.check_later(found.checks, found.tables, utterance_ids(batch) or None)
        return found.result._replace(row=found.result.row.clone())  # which the next replay overwrites

    def update(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> Tensor | None:
        """Update by a graph, after which gradients are zeros; None if this has to be done without.

        rates : the tensors of learning rates; an optimizer without them waits for the host, or has tensors of its own
        """
        self._steps += 1
        if self._steps == 1:
            self._begin()
        elif self._on and not self._gradients and self._exchange is not None:
            # Also on a rank that had only stand-ins so far: an optimizer may communicate, so all capture it together.
            self._gradients = list(self._exchange.views().items())
        # Gradients of frozen optimizers stay; hooks are Python.
        alone = len(optimizers) < len(self.brain.optimizers_dict or optimizers) or any(
            vars(each).get(f"_optimizer_step_{when}_hooks") for each in optimizers for when in ("pre", "post"))
        if not (self._on and self._gradients) or alone or any(rate is None for rate in rates):
            return None
        key = "update", len(sums), self.brain.max_grad_norm, *map(_settings, optimizers), *(
            id(rate) for own in rates for rate in own or ())
        if key not in self._graphs:
            self._attach_gradients()
            self._graphs[key] = self._try("update", lambda: self._capture_update(optimizers, sums, rates))
        found = self._graphs.get(key)
        if found is None:
            return None
        self._attach_gradients()
        found.inputs[0].copy_(sums)
        found.graph.replay()
        for optimizer in optimizers:
            if hasattr(optimizer, "count_step"):
                optimizer.count_step()
        values: Tensor = found.result
        return values

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

    def _try(self, kind: str, capture: Callable[[], _Captured]) -> _Captured | None:
        """Capture; if that fails, log why and let what has this key run without a graph."""
        first = kind not in self.nodes
        try:
            found = capture()
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
        return found

    def _capture_micro_step(self, batch: MicroBatch) -> _Captured:
        """Try the micro-step twice, of which the second must change nothing that only Python knows; capture it.

        A first replay has to compute what the second try did: nothing wrong trains a model.
        """
        brain, reached = self.brain, {id(parameter) for parameter, _ in self._gradients}
        moves = hasattr(batch, "to") and not isinstance(batch, Tensor)
        static = copy.deepcopy(batch).to(self.device) if moves else \
            tree_map_only(Tensor, lambda each: each.to(self.device, copy=True), batch)
        inputs = _tensors(static)
        if not inputs:
            raise _NotRepeatable("batches hold no tensors to copy new ones to")
        parameters = [parameter for parameter in brain.modules.parameters() if parameter.requires_grad]
        with brain.restoring(), brain.no_sync(), self._on_own_stream(), guard.collecting():
            try:
                self._compute(static)  # a first call may fill caches
                for parameter in parameters:
                    parameter.grad = None
                before = _host_state(brain)
                with brain.restoring():
                    with _refusing_waits():
                        row = self._compute(static).row
                    after = _host_state(brain)
                    changed = [key[0] for key in dict.fromkeys([*before, *after])
                               if key not in before or key not in after or before[key][0] != after[key][0]]
                    if changed:
                        raise _NotRepeatable(f"a step changes {', '.join(changed[:3])}, and a replay would not")
                    now = [parameter for parameter in parameters if parameter.grad is not None]
                    if not now:
                        raise _NotRepeatable("the loss reaches no parameter of the modules")
                    tried = _figures(row, now)
                if not self._gradients:
                    views = {each: torch.zeros_like(each) for each in now} if self._exchange is None else \
                        self._exchange.views()
                    if any(parameter not in views for parameter in now):
                        raise _NotRepeatable("batches reach different parameters")
                    self._gradients = list(views.items())
                # Ranks give zeros for what they don't reach; alone, an optimizer would leave that out.
                elif {id(each) for each in now} - reached or (self._exchange is None and len(now) < len(reached)):
                    raise _NotRepeatable("batches reach different parameters")
            except Exception as error:
                # Beside the graphs' memory there is none for this trial; the capture uses that memory.
                if not (is_out_of_memory(error) and reached):
                    raise
                tried = None
            for parameter, own in self._gradients:
                parameter.grad = own
            with guard.collecting() as checked:
                def work() -> tuple[MicroStep, Tensor | None]:
                    found = self._compute(static)
                    results = [each.result for each in checked if each.result is not None]
                    return found, torch.stack(results) if results else None

                graph, (result, checks) = self._capture("micro-step", work)
            if tried is not None:
                try:
                    self._compare(graph, result.row, now, tried)
                except Exception as error:
                    if not is_out_of_memory(error):  # for a moment there are two sets of gradients
                        raise
            # Graphs of autograd must not outlive this; SpeechBrain's own hook reads nothing.
            if type(brain).on_fit_batch_end is sb.Brain.on_fit_batch_end:
                result = result._replace(outputs=None, objectives=None)
            result = tree_map_only(Tensor, Tensor.detach, result)
            held = static, [dict(vars(owner)) for _, owner in _owners(brain)]
            return _Captured(graph, inputs, result, checks, [each._replace(result=None) for each in checked], held)

    def _compare(self, graph: torch.cuda.CUDAGraph, row: Tensor, parameters: Sequence[Parameter], tried: Peek) -> None:
        """Replay a new graph on the batch and the random numbers of the try before it, and compare the two."""
        gradients = [own for _, own in self._gradients]
        kept = [own.clone() for own in gradients]  # of earlier micro-batches
        torch._foreach_zero_(gradients)
        graph.replay()
        found, expected = _figures(row, parameters).numpy(), tried.numpy()
        torch._foreach_copy_(gradients, kept)
        # Beside others, a part of the loss or a gradient may be nothing but rounding. In fp16 some may be infinite.
        finite = np.where(np.isfinite(expected), expected, 0.0)
        scale = np.concatenate([np.full(len(row), max(abs(finite[0]), abs(finite[1]))), np.full(
            len(parameters), np.linalg.norm(finite[len(row):]))])
        apart = ~np.isclose(found, expected, rtol=NEAR, atol=0, equal_nan=True)
        apart &= ~(np.isfinite(found) & np.isfinite(expected)) | (abs(found - finite) > NEAR * scale)
        if apart.any():
            first = int(apart.argmax())
            raise _NotRepeatable(f"a replay computes another {'loss' if first < len(row) else 'gradient'} than the "
                                 f"step: {found[first]:g}, not {expected[first]:g}")

    def _capture_update(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> _Captured:
        own, groups = sums.clone(), [group for each in optimizers for group in each.param_groups]
        before = [group.get("capturable") for group in groups]
        for group in groups:  # fused kernels are, but torch asks for the flag
            if "capturable" in group:
                group["capturable"] = True

        def work() -> Tensor:
            values = self._update(optimizers, own, rates)
            torch._foreach_zero_([gradient for _, gradient in self._gradients])
            return values

        try:
            with self._on_own_stream():
                graph, values = self._capture("update", work)
                return _Captured(graph, [own], values, held=rates)
        finally:
            for group, flag in zip(groups, before, strict=True):
                if flag is not None:
                    group["capturable"] = flag

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


def _figures(row: Tensor, parameters: Sequence[Parameter]) -> Peek:
    """Return the sums of a micro-step, and the norms of the gradients that it gave."""
    norms = torch._foreach_norm([each.grad for each in parameters if each.grad is not None])
    return Peek(torch.cat([row, torch.stack([norm.float() for norm in norms])]))


def _settings(optimizer: Optimizer) -> tuple[Hashable, ...]:
    """Return the numbers of an optimizer's groups, which its kernels get from Python, and what it does by turns."""
    numbers = tuple(value for group in optimizer.param_groups for name, value in group.items()
                    if name not in ("params", "lr") and isinstance(value, (int, float, tuple)))
    return id(optimizer), numbers, getattr(optimizer, "graph_key", tuple)()


def _owners(brain: sb.Brain) -> Iterator[tuple[str, object]]:
    """Yield whatever a step might leave a value in, with its name."""
    yield from ((type(brain).__name__, brain), ("hparams", brain.hparams))
    yield from dict.fromkeys((type(module).__name__, module) for root in brain.layer_roots for module in root.modules())


def _host_state(brain: sb.Brain) -> dict[tuple[str, int], Any]:
    """Return what Python knows of a Brain, of its layers and of random numbers, to compare with another moment's."""
    state: dict[tuple[str, int], Any] = {(f"{name}'s random numbers on the host", 0): (value.tolist(), value)
                                         for name, value in rng.capture("cpu").items()}
    for kind, owner in _owners(brain):
        for name, value in vars(owner).items():
            for inner, each in value.items() if name == "_buffers" else [(name, value)]:
                plain = each is None or isinstance(each, (bool, int, float, str))
                size = len(each) if isinstance(each, (list, dict, set)) else 0
                state[f"{kind}.{inner}", id(owner)] = (each if plain else (id(each), size), each)
    return state


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
