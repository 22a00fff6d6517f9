"""Forward and backward on fake GPU tensors, on a machine that may have no GPU, to count what they cost there.

Forward has the GPU's autocast and attention. Autograd's engine needs a driver for a GPU's gradients, so backward goes
from node to node here, in the engine's order.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from speechbrain.utils.autocast import TorchAutocast
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from sbkit.recipe.keys import Task

DEVICE = torch.device("cuda:0")
#: A row of a mask of attention begins at a multiple of this many values.
ALIGNED = 16


def move(brain: Task) -> None:
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


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Within it, torch.autocast isn't switched off because there is no GPU, and nothing asks a driver."""
    with mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False), \
            mock.patch.object(torch.cuda, "is_bf16_supported", lambda *given: True), without_fused_layers():
        yield


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Within it, an LSTM consists of matrix products, which are counted.

    cuDNN would lay out its weights, which needs real tensors, and oneDNN's LSTM is one operation without a formula.
    """
    enabled, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mkldnn.set_flags(enabled)


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


class SavedTensors(saved_tensors_hooks):
    """Holds tensors that forward saves for backward, and frees them when backward has used them."""

    def __init__(self) -> None:
        self.used: list[list[Tensor]] = []
        super().__init__(lambda tensor: [tensor], self._use)

    def _use(self, saved: list[Tensor]) -> Tensor:
        self.used.append(saved)
        return saved[0]

    def free_used(self) -> None:
        for saved in self.used:
            saved.clear()
        self.used.clear()


def backward(compute: Callable[[], Tensor]) -> None:
    """Compute a loss and run backward from it.

    Gradients of weights are dropped, and one that adds to another counts as added in place.
    """
    saved = SavedTensors()
    with FusedAttention(), saved:
        _walk(compute(), saved)


def _walk(loss: Tensor, saved: SavedTensors) -> None:
    assert loss.grad_fn is not None, "a loss depends on weights"
    order = itertools.count()
    queue = [(-loss.grad_fn._sequence_nr(), next(order), loss.grad_fn)]
    pending: dict[Node, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
    # Without a graph task of the engine, activation checkpointing would recompute for each tensor that it saved.
    with torch.no_grad(), getattr(checkpoint, "GraphExecGroup", contextlib.nullcontext)():
        while queue:
            node = heapq.heappop(queue)[-1]
            left = _gradients(node, pending.pop(node))
            saved.free_used()
            while left:
                child, slot, gradient = left.pop()
                inputs = child._input_metadata
                if child not in pending:
                    pending[child] = [None] * len(inputs)
                    heapq.heappush(queue, (-child._sequence_nr(), next(order), child))
                if pending[child][slot] is None:
                    pending[child][slot] = _shaped(gradient, inputs[slot])
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


def _shaped(gradient: Tensor, like: Any) -> Tensor:  # torch's InputMetadata, which has no type
    """Give a gradient the shape and type that a node takes, as the engine does."""
    return (gradient if gradient.shape == like.shape else gradient.sum_to_size(like.shape)).to(like.dtype)
