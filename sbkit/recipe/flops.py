"""The arithmetic of a second of audio in training, counted on stand-ins so that no real step is touched."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sbkit.nn.accelerate import accelerate
from sbkit.nn.recognizer import Recognizer
from sbkit.recipe.shapes import NEEDED, PATH, encoder_key, stand_ins

TOKENS_PER_SECOND = 6


class Arithmetic(TorchDispatchMode):
    """Counts floating point operations by the formulas of torch's FlopCounterMode.

    That one also finds out which layer each operation belongs to, at half the price of the whole count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
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


def countable(hparams: Mapping[str, Any]) -> bool:
    """Whether a recipe names the parts of a recogniser as ours do."""
    return all(hparams.get(key) is not None for key in NEEDED) and encoder_key(hparams) is not None


def operations_per_second(hparams: Mapping[str, Any], seconds: float) -> float:
    """Floating point operations of a second of audio in an utterance of ``seconds``, forward and backward.

    What the step's loss doesn't reach (an attention decoder beside CTC alone) isn't counted, nor is what is frozen
    in the backward. The recipe's modules stay as they are: a copy is counted, whose weights have no memory.
    """
    own = SimpleNamespace(**hparams)
    parts = {"model": Recognizer.from_hparams(own), "seq_lin": getattr(own, "seq_lin", None)}
    modules = nn.ModuleList({id(m): m for key in PATH if isinstance(m := getattr(own, key, None), nn.Module)}.values())
    with stand_ins() as mode, torch.enable_grad():
        weightless = {id(t): mode.from_tensor(t) for t in [*modules.parameters(), *modules.buffers()]}
        with unset_fake_temporarily():  # tensors that are no parameters and no buffers: small ones
            twin = copy.deepcopy(parts, weightless)
        for part in (twin["model"].compute_features, twin["model"].frontend, twin["model"].encoder):
            if part is not None and getattr(own, "accelerate", True):
                accelerate(part)
        own.seq_lin = twin["seq_lin"]
        # the counter doesn't know a CPU's fused attention
        with Arithmetic() as counted, sdpa_kernel(SDPBackend.MATH):
            loss_on(own, twin["model"], 1, seconds).backward()
    return counted.operations / seconds


def loss_on(hparams: Any, model: Recognizer, utterances: int, seconds: float) -> torch.Tensor:
    """Something like the loss of so many utterances, with the tensors that the loss holds; within ``stand_ins()``."""
    rate = getattr(hparams, "sample_rate", 16000)
    samples = torch.full((utterances,), round(seconds * rate))
    signals = torch.empty(utterances, round(seconds * rate))
    tokens = torch.ones(utterances, max(1, round(TOKENS_PER_SECOND * seconds)), dtype=torch.long)
    views = 2 if getattr(hparams, "consistency", 0.0) else 1
    feats, frames = model.features(signals, samples, views=views)
    tokens = tokens.repeat(views, 1)
    loss = torch.zeros(())
    if getattr(hparams, "ctc_weight", 1.0) < 1.0 and getattr(hparams, "seq_lin", None) is not None:
        encoded, _, decoded = model.encode_and_decode(feats, frames, tokens)
        scores = hparams.seq_lin(decoded).float().flatten(0, 1)
        loss = functional.cross_entropy(scores, tokens.flatten(), label_smoothing=0.1)
    else:
        encoded, _ = model.encode(feats, frames)
    log_probs = model.ctc_lin(encoded).float().log_softmax(-1)
    lattice = torch.empty(*log_probs.shape[:2], 2 * tokens.shape[1] + 1)  # what CTC keeps for its backward
    return loss + log_probs.sum() + lattice.sum()
