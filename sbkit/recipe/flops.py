"""The arithmetic of a second of audio in training, counted on stand-ins so that no real step is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sbkit.recipe.trace import stand_ins


class Arithmetic(TorchDispatchMode):
    """Counts floating point operations by the formulas of torch's FlopCounterMode.

    That one also finds out which layer each operation belongs to, at half the price of the whole count.
    """

    def __init__(self, weights: Sequence[torch.Tensor] = ()) -> None:
        """``weights``: what is there before."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.weights, self.operations = weights, 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **kwargs, out_val=out)
        return out


def typical_seconds(durations: np.ndarray) -> float:
    """The length whose second costs what the corpus's seconds cost on the average; durations: [N].

    A step's arithmetic has a part that grows with the length and, in attention, one with its square, so that this
    is the mean over seconds of audio, not over utterances.
    """
    durations = durations.astype(np.float64)
    return float((durations**2).sum() / durations.sum())


def operations_per_second(brain: Any, seconds: float) -> float:
    """Floating point operations of a second of audio in an utterance of ``seconds``, forward and backward.

    What the step's loss doesn't reach (an attention decoder beside CTC alone) isn't counted, nor is what is frozen
    in the backward.
    """
    with sdpa_kernel(SDPBackend.MATH):  # the counter doesn't know a CPU's fused attention
        return run(brain, 1, seconds, Arithmetic).operations / seconds


A = TypeVar("A", bound="Arithmetic")


def run(brain: Any, utterances: int, seconds: float, counts: type[A]) -> A:
    """Take a training micro-batch of the Brain's own through forward, loss and backward, on stand-ins; what counted.

    Nothing of it is touched, wherever its modules are: stand-ins have no memory, and what a forward writes elsewhere
    is put back.
    """
    with brain.untouched(), stand_ins() as mode, torch.enable_grad():
        weights = [mode.from_tensor(tensor) for tensor in (*brain.modules.parameters(), *brain.modules.buffers())]
        batch = brain.stand_in(utterances, seconds).to(brain.device)
        with counts(weights) as counted:
            brain.loss_of(batch).total.backward()
        return counted
