"""The number of operations for a second of audio in training, counted on fake tensors without a real step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sbkit.recipe import gpu_step
from sbkit.recipe.keys import Task
from sbkit.recipe.trace import on_fake_tensors


class FlopCounter(TorchDispatchMode):
    """Counts floating point operations by the formulas of torch's FlopCounterMode.

    It takes half the time, because it doesn't track the layer of each operation.
    """

    def __init__(self, weights: Sequence[torch.Tensor] = ()) -> None:
        """``weights``: tensors that exist before the count begins."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.operations = 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: OpOverload, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **kwargs, out_val=out)
        return out


def typical_seconds(durations: np.ndarray) -> float:
    """The length of an utterance whose cost per second is the average cost per second of the corpus; durations: [N].

    The cost has a part that grows with the length and, in attention, one that grows with its square. So this is the
    mean over seconds of audio, not over utterances.
    """
    durations = durations.astype(np.float64)
    return float((durations**2).sum() / durations.sum())


def operations_per_second(brain: Task, seconds: float) -> float:
    """Floating point operations per second of audio in an utterance of ``seconds``, for forward and backward.

    Parts that don't contribute to the loss (an attention decoder with CTC alone) aren't counted, nor is the backward of
    frozen parts.
    """
    with sdpa_kernel(SDPBackend.MATH):  # the counter has no formula for a CPU's fused attention
        utterances = brain.keys.batching.min_batch_utterances  # BatchNorm needs two
        return run(brain, utterances, seconds, FlopCounter).operations / (utterances * seconds)


A = TypeVar("A", bound="FlopCounter")


def run(brain: Task, utterances: int, seconds: float, counts: type[A], gpu: bool = False) -> A:
    """Run forward, loss and backward of a training micro-batch on fake tensors; return the counter.

    The Brain is unchanged afterwards, on any device: fake tensors have no memory, and other state that a forward
    changes is restored.

    gpu : run as on a GPU, whatever device the modules are on; gradients of weights aren't counted then
    """
    backward = gpu_step.backward if gpu else _backward

    def counted(mode: FakeTensorMode) -> A:
        if gpu:
            gpu_step.move(brain)
        weights = [mode.from_tensor(tensor) for tensor in (*brain.modules.parameters(), *brain.modules.buffers())]
        batch = brain.stand_in(utterances, seconds).to(brain.device)
        with brain.trainer.keeping_computed(), torch.enable_grad(), counts(weights) as counter:
            backward(lambda: brain.trainer.loss_of(batch))  # outputs are held until the end, as in training
        return counter

    with gpu_step.without_driver() if gpu else contextlib.nullcontext(), gpu_step.without_fused_layers():
        return on_fake_tensors(brain, counted)


def _backward(compute: Callable[[], torch.Tensor]) -> None:
    compute().backward()
