"""Counts the operations of a training step on fake tensors, on the CPU or as on a GPU, on a machine that may have none.

As on a GPU, forward has the GPU's autocast and attention.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from speechbrain.utils.autocast import TorchAutocast
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count
from torch.utils.hooks import RemovableHandle

from sbkit.nn import recurrent
from sbkit.recipe.keys import Task
from sbkit.recipe.speed import Speed
from sbkit.recipe.trace import on_fake_tensors, without_driver

DEVICE = torch.device("cuda:0")
#: Layers of a class with less of the operations aren't named.
SMALLEST_SHARE = 0.005
#: A row of a mask of attention begins at a multiple of this many values.
ALIGNED = 16
#: Operations that compute nothing, besides views.
_NO_KERNEL = "prim::", "aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach", "aten::lift_fresh"


A = TypeVar("A", bound="FlopCounter")


class Kernel(NamedTuple):
    """What a kernel does."""

    operations: int
    moved: int
    """The bytes that it reads and writes."""


class FlopCounter(TorchDispatchMode):
    """Counts floating point operations by the formulas of torch's FlopCounterMode, except those of a convolution's
    backward: torch's formula ignores groups, and overstates the weight gradient of a depthwise layer of 512 channels
    512 times.

    It takes half the time, because it follows layers in forward only.
    """

    def __init__(self, weights: Sequence[torch.Tensor] = ()) -> None:
        """``weights``: tensors that exist before the count begins."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.operations = 0
        self.kernels: list[Kernel] = []
        self.by_layer: Counter[nn.Module | None] = Counter()
        """Operations in forward by the innermost layer, with None for those in sbkit's layers."""
        self._running: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __enter__(self: A) -> A:
        running = self._running

        def end(*_: object) -> None:
            running.pop()

        self._hooks += [register_module_forward_pre_hook(lambda layer, _: running.append(layer)),
                        register_module_forward_hook(end, always_call=True)]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no types
        return self

    def __exit__(self, *error: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: OpOverload, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operations = self._operations_of(func, args, kwargs, out)
        self.operations += operations
        if operations and self._running:
            self.by_layer[self._layer_to_name()] += operations
        if not func.is_view and not func.name().startswith(_NO_KERNEL):
            tensors = (value for value in tree_leaves((args, kwargs, out)) if isinstance(value, Tensor))
            self.kernels.append(Kernel(operations, sum(map(_bytes_of, tensors))))
        return out

    def _operations_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> int:
        """The floating point operations of a call; 0 for what has no formula."""
        if func._overloadpacket is torch.ops.aten.convolution_backward:
            gradient, inputs, weight = args[:3]
            is_transposed = args[7]
            wanted_gradients = args[10][:2]  # of inputs and of weights: each has the products of the forward
            of_forward: int = conv_flop_count(inputs.shape, weight.shape, gradient.shape, is_transposed)
            return sum(wanted_gradients) * of_forward
        formula = self._formulas.get(func._overloadpacket)
        return 0 if formula is None else formula(*args, **kwargs, out_val=out)

    def _layer_to_name(self) -> nn.Module | None:
        """The innermost layer that runs; None within sbkit's own layers, which need no name.

        Those for recurrent layers run torch's.
        """
        modules = [type(layer).__module__ for layer in self._running]
        is_ours = any(module.startswith("sbkit.") and module != recurrent.__name__ for module in modules)
        return None if is_ours else self._running[-1]


def _bytes_of(tensor: Tensor) -> int:
    """The bytes that a kernel reads or writes of a tensor; an expanded dimension has its bytes once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sizes if stride or not size)


def least_seconds(kernels: Sequence[Kernel], limits: Speed) -> float:
    """The least time of kernels on a device: none is faster than its operations and its bytes allow."""
    return sum(max(operations / limits.operations, moved / limits.bytes) for operations, moved in kernels)


def typical_seconds(durations: np.ndarray) -> float:
    """The length of an utterance whose cost per second is the average cost per second of the corpus; durations: [N].

    The cost has a part that grows with the length and, in attention, one that grows with its square. So this is the
    mean over seconds of audio, not over utterances.
    """
    durations = durations.astype(np.float64)
    return float((durations**2).sum() / durations.sum())


def operations_per_second(brain: Task, seconds: float, shares: list[str] | None = None) -> float:
    """Floating point operations per second of audio in an utterance of ``seconds``, for forward and backward.

    Parts that don't contribute to the loss (an attention decoder with CTC alone) aren't counted, nor is the backward of
    frozen parts.

    shares : gets a line on the layers that compute them
    """
    with sdpa_kernel(SDPBackend.MATH):  # the counter has no formula for a CPU's fused attention
        utterances = brain.keys.batching.min_batch_utterances  # BatchNorm needs two
        counter = run(brain, utterances, seconds, FlopCounter)
    if shares is not None:
        shares.append(layer_shares(brain, counter))
    return counter.operations / (utterances * seconds)


def layer_shares(brain: Task, counter: FlopCounter) -> str:
    """Describe which share of a forward's operations sbkit's layers compute, and which layers compute the rest."""
    names = _names_of_layers(brain)
    places_by_class: dict[str, Counter[str]] = {}
    for layer, operations in counter.by_layer.items():
        if layer is not None:
            places = places_by_class.setdefault(type(layer).__name__, Counter())
            places[names.get(layer, "a layer")] += operations

    total = max(1, counter.by_layer.total())
    others = []
    for kind, places in sorted(places_by_class.items(), key=lambda item: -item[1].total()):
        share = places.total() / total
        if share >= SMALLEST_SHARE:
            [(largest, _)] = places.most_common(1)
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            others.append(f"{largest}{more} ({kind}) {100 * share:.0f} %")
    ours = f"sbkit's layers compute {100 * counter.by_layer[None] / total:.0f} % of a forward's FLOPs"
    return f"{ours}, and layers of SpeechBrain, torch or your own: {', '.join(others)}" if others else ours


def _names_of_layers(brain: Task) -> dict[nn.Module, str]:
    """The names of layers by the recipe's keys; a part's own key is a better name than its place in a list."""
    parts = [(key, part) for key, part in vars(brain.hparams).items() if isinstance(part, nn.Module)]
    parts.sort(key=lambda item: isinstance(item[1], (nn.ModuleList, nn.ModuleDict)))
    names: dict[nn.Module, str] = {}
    for key, part in parts:
        for name, layer in part.named_modules(prefix=key):
            names.setdefault(layer, name)
    return names


def run(brain: Task, utterances: int, seconds: float, counts: type[A], gpu: bool = False) -> A:
    """Run forward, loss and backward of a training micro-batch on fake tensors; return the counter.

    The Brain is unchanged afterwards, on any device: fake tensors have no memory, and other state that a forward
    changes is restored.

    gpu : run as on a GPU, whatever device the modules are on; gradients of weights aren't counted then
    """
    def counted(mode: FakeTensorMode) -> A:
        if gpu:
            _move(brain)
        weights = [mode.from_tensor(tensor) for tensor in (*brain.modules.parameters(), *brain.modules.buffers())]
        batch = brain.dummy_batch(utterances, seconds).to(brain.device)
        with torch.enable_grad(), counts(weights) as counter:
            computed: list[Any] = []  # outputs are held until the end, as in training

            def total() -> Tensor:
                computed.append(brain.trainer.parallel.loss_of(batch))
                return computed[0].loss.total

            if gpu:
                backward(total)
            else:
                total().backward()
        return counter

    with without_driver() if gpu else contextlib.nullcontext():
        return on_fake_tensors(brain, counted)


# ---------------------------------------------------------------- as on a GPU


def _move(brain: Task) -> None:
    """Move the modules of a Brain to fake GPU tensors."""
    parts = [brain.modules, *(value for value in vars(brain.hparams).values() if isinstance(value, nn.Module))]
    moved: dict[int, Tensor] = {}  # two layers still share a weight afterwards
    for layer in (layer for part in parts for layer in part.modules()):
        for tensors in (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    on_gpu = torch.empty_like(tensor, device=DEVICE)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(on_gpu, tensor.requires_grad) if is_parameter else on_gpu
                tensors[name] = moved[id(tensor)]
    brain.device = DEVICE
    brain.device_type = DEVICE.type
    if brain.precision != "fp32":
        brain.training_ctx = TorchAutocast(DEVICE.type, dtype=torch.bfloat16)


class FusedAttention(TorchFunctionMode):
    """Replaces attention by a GPU's fused kernel, which stores no weights of each pair of frames."""

    def __torch_function__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),  # any of torch's
                           kwargs: Mapping[str, Any] | None = None) -> object:
        replaced = _attend if func is functional.scaled_dot_product_attention else func
        return replaced(*args, **(kwargs or {}))


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    if query.dim() != 4 or enable_gqa:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                       scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled(DEVICE.type):
        dtype = torch.get_autocast_dtype(DEVICE.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        frames = key.shape[2]
        padded = functional.pad(attn_mask.to(query.dtype), (0, -frames % ALIGNED))  # so its rows can be read at once
        attn_mask = padded[..., :frames].expand(*query.shape[:3], frames)
    with torch.autocast(DEVICE.type, enabled=False):
        attended: Tensor
        attended, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    return attended


def backward(compute: Callable[[], Tensor]) -> None:
    """Compute a loss and run backward from it, from node to node in the order of autograd's engine.

    The engine needs a driver for a GPU's gradients. Gradients of weights are dropped here, and one that adds to another
    counts as added in place.
    """
    saved_tensors: list[list[Tensor]] = []  # those that the current node has used; emptying one frees its tensor

    def save(tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def use(saved: list[Tensor]) -> Tensor:
        saved_tensors.append(saved)
        return saved[0]

    # Without a graph task of the engine, activation checkpointing would recompute for each tensor that it saved.
    one_task = getattr(checkpoint, "GraphExecGroup", contextlib.nullcontext)
    with FusedAttention(), saved_tensors_hooks(save, use):
        loss = compute()
        assert loss.grad_fn is not None, "a loss depends on weights"
        queue = _NodeQueue(loss.grad_fn, torch.ones_like(loss))
        with torch.no_grad(), one_task():
            while queue:
                node, gradients = queue.pop()
                passed_on = _gradients(node, gradients)
                del gradients
                for saved in saved_tensors:
                    saved.clear()
                saved_tensors.clear()
                while passed_on:  # one after the other is freed
                    child, slot, gradient = passed_on.pop()
                    queue.add(child, slot, gradient)
                    del gradient


class _NodeQueue:
    """The nodes of autograd that wait for their turn, with the gradients of their outputs: the last of forward first.
    """

    def __init__(self, root: Node, gradient: Tensor) -> None:
        self._order = itertools.count()
        self._heap = [(-root._sequence_nr(), next(self._order), root)]
        self._pending: dict[Node, list[Tensor | None]] = {root: [gradient]}

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, node: Node, slot: int, gradient: Tensor) -> None:
        """Add a gradient of the output with this index; one that adds to another counts as added in place."""
        inputs = node._input_metadata
        if node not in self._pending:
            self._pending[node] = [None] * len(inputs)
            heapq.heappush(self._heap, (-node._sequence_nr(), next(self._order), node))
        if self._pending[node][slot] is None:
            wanted = inputs[slot]  # the shape and type that the node takes, as the engine gives it
            if gradient.shape != wanted.shape:
                gradient = gradient.sum_to_size(wanted.shape)
            self._pending[node][slot] = gradient.to(wanted.dtype)

    def pop(self) -> tuple[Node, list[Tensor | None]]:
        """The node whose turn it is, and the gradients of its outputs."""
        *_, node = heapq.heappop(self._heap)
        return node, self._pending.pop(node)


def _gradients(node: Node, of_outputs: list[Tensor | None]) -> list[tuple[Node, int, Tensor]]:
    """Run the backward of a node; return nodes that get a gradient, the index of their output, and the gradient."""
    edges = list(node.next_functions)
    of_inputs: Any  # a gradient, or several
    if isinstance(node, BackwardCFunction):  # which has an edge for each input that needs a gradient
        filled = [torch.zeros(output.shape, dtype=output.dtype, device=output.device) if gradient is None else gradient
                  for gradient, output in zip(of_outputs, node._input_metadata, strict=True)]
        of_inputs = _as_tuple(node.apply(*filled))
        of_inputs = [gradient for gradient, needed in zip(of_inputs, node.needs_input_grad, strict=False) if needed]
        edges = [edge for edge in edges if edge[0] is not None]
    else:
        of_inputs = _as_tuple(node(*of_outputs))  # type: ignore[operator]  # torch's type isn't callable
    return [(child, slot, gradient) for (child, slot), gradient in zip(edges, of_inputs, strict=False)
            if child is not None and gradient is not None and not hasattr(child, "variable")]


def _as_tuple(gradients: Any) -> tuple[Any, ...]:  # one, or several
    return gradients if isinstance(gradients, tuple) else (gradients,)
