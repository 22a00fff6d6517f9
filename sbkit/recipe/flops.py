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
from typing import Any, TypeVar

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
        self.kernels: list[tuple[int, int]] = []
        """The operations of each kernel, and the bytes that it reads and writes."""
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
        formula = self._formulas.get(func._overloadpacket)
        operations = 0
        if formula is not None:
            if func._overloadpacket is torch.ops.aten.convolution_backward:
                # Each gradient has the products of the forward.
                gradient, inputs, weight, transposed, wanted = *args[:3], args[7], args[10]
                operations = sum(wanted[:2]) * conv_flop_count(inputs.shape, weight.shape, gradient.shape, transposed)
            else:
                operations = formula(*args, **kwargs, out_val=out)
            self.operations += operations
            if self._running:
                own = any(type(layer).__module__.startswith("sbkit.") and type(layer).__module__ != recurrent.__name__
                          for layer in self._running)
                self.by_layer[None if own else self._running[-1]] += operations
        if not func.is_view and not func.name().startswith(_NO_KERNEL):
            touched = 0
            for value in tree_leaves((args, kwargs, out)):
                if isinstance(value, Tensor):  # an expanded dimension has its bytes once
                    touched += value.element_size() * math.prod(
                        size for size, stride in zip(value.shape, value.stride(), strict=True) if stride or not size)
            self.kernels.append((operations, touched))
        return out


def least_seconds(kernels: Sequence[tuple[int, int]], limits: Speed) -> float:
    """The least time of kernels on a device: none is faster than its operations and its bytes allow."""
    return sum(max(operations / limits.operations, size / limits.bytes) for operations, size in kernels)


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
    names: dict[nn.Module, str] = {}
    lists = nn.ModuleList, nn.ModuleDict  # last, because a part's own key is the better name
    for key, part in sorted(vars(brain.hparams).items(), key=lambda each: isinstance(each[1], lists)):
        for name, layer in part.named_modules(prefix=key) if isinstance(part, nn.Module) else ():
            names.setdefault(layer, name)
    kinds: dict[str, Counter[str]] = {}
    for layer, operations in counter.by_layer.items():
        if layer is not None:
            kinds.setdefault(type(layer).__name__, Counter())[names.get(layer, "a layer")] += operations
    total = max(1, counter.by_layer.total())
    rest = []
    for kind, places in sorted(kinds.items(), key=lambda each: -each[1].total()):
        if (share := places.total() / total) >= SMALLEST_SHARE:
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            rest.append(f"{places.most_common(1)[0][0]}{more} ({kind}) {share:.0%}".replace("%", " %"))
    own = f"sbkit's layers compute {counter.by_layer[None] / total:.0%} of a forward's FLOPs".replace("%", " %")
    return f"{own}; run as SpeechBrain, torch or you wrote them: {', '.join(rest)}" if rest else own


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
    other = [value for value in vars(brain.hparams).values() if isinstance(value, nn.Module)]
    moved: dict[int, Tensor] = {}  # two layers still share a weight afterwards
    for layer in (each for root in (brain.modules, *other) for each in root.modules()):
        for held in (layer._parameters, layer._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in moved:
                    on_gpu = torch.empty_like(tensor, device=DEVICE)
                    moved[id(tensor)] = nn.Parameter(on_gpu, tensor.requires_grad) \
                        if isinstance(tensor, nn.Parameter) else on_gpu
                held[name] = None if tensor is None else moved[id(tensor)]
    brain.device, brain.device_type = DEVICE, DEVICE.type
    if brain.precision != "fp32":
        brain.training_ctx = TorchAutocast(DEVICE.type, dtype=torch.bfloat16)


class FusedAttention(TorchFunctionMode):
    """Replaces attention by a GPU's fused kernel, which stores no weights of each pair of frames."""

    def __torch_function__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),  # any of torch's
                           kwargs: Mapping[str, Any] | None = None) -> object:
        return (_attend if func is functional.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    if query.dim() != 4 or enable_gqa:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                       scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled(DEVICE.type):
        query, key, value = (each.to(torch.get_autocast_dtype(DEVICE.type)) for each in (query, key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        frames = key.shape[2]
        padded = functional.pad(attn_mask.to(query.dtype), (0, -frames % ALIGNED))  # so its rows can be read at once
        attn_mask = padded[..., :frames].expand(*query.shape[:3], frames)
    with torch.autocast(DEVICE.type, enabled=False):
        found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    return found[0]


def backward(compute: Callable[[], Tensor]) -> None:
    """Compute a loss and run backward from it, from node to node in the order of autograd's engine.

    The engine needs a driver for a GPU's gradients. Gradients of weights are dropped here, and one that adds to another
    counts as added in place.
    """
    used: list[list[Tensor]] = []  # what forward saved, each in a list of its own that is emptied once it was used

    def use(saved: list[Tensor]) -> Tensor:
        used.append(saved)
        return saved[0]

    # Without a graph task of the engine, activation checkpointing would recompute for each tensor that it saved.
    one_task = getattr(checkpoint, "GraphExecGroup", contextlib.nullcontext)
    with FusedAttention(), saved_tensors_hooks(lambda tensor: [tensor], use):
        loss = compute()
        assert loss.grad_fn is not None, "a loss depends on weights"
        order = itertools.count()
        queue = [(-loss.grad_fn._sequence_nr(), next(order), loss.grad_fn)]
        pending: dict[Node, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
        with torch.no_grad(), one_task():
            while queue:
                node = heapq.heappop(queue)[-1]
                left = _gradients(node, pending.pop(node))
                for saved in used:  # by this node
                    saved.clear()
                used.clear()
                while left:
                    child, slot, gradient = left.pop()
                    inputs = child._input_metadata
                    if child not in pending:
                        pending[child] = [None] * len(inputs)
                        heapq.heappush(queue, (-child._sequence_nr(), next(order), child))
                    if pending[child][slot] is None:
                        wanted = inputs[slot]  # the shape and type that the node takes, as the engine gives it
                        pending[child][slot] = (gradient if gradient.shape == wanted.shape else
                                                gradient.sum_to_size(wanted.shape)).to(wanted.dtype)
                    del gradient


def _gradients(node: Node, given: list[Tensor | None]) -> list[tuple[Node, int, Tensor]]:
    """Run the backward of a node; return nodes that get a gradient, the index of their output, and the gradient."""
    edges = list(node.next_functions)
    found: Any  # a gradient, or several
    if isinstance(node, BackwardCFunction):  # which has an edge for each input that needs a gradient
        filled = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) if one is None else one
                  for one, each in zip(given, node._input_metadata, strict=True)]
        found = node.apply(*filled)
        found = found if isinstance(found, tuple) else (found,)
        found = [one for one, needed in zip(found, node.needs_input_grad, strict=False) if needed]
        edges = [edge for edge in edges if edge[0] is not None]
    else:
        found = node(*given)  # type: ignore[operator]  # torch's type isn't callable
        found = found if isinstance(found, tuple) else (found,)
    return [(child, slot, one) for (child, slot), one in zip(edges, found, strict=False)
            if child is not None and one is not None and not hasattr(child, "variable")]
