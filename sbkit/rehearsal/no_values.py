"""Disables checks of computed values, which mean nothing on a null card; the computations still run.

``python -m sbkit.rehearsal.no_values train.py ...`` runs a script that way.
"""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from sbkit.decode import greedy, joint
from sbkit.decode.spans import TokenSpans, collapse
from sbkit.infer.codec_engine import CodeEngine, SoundEngine
from sbkit.infer.voice_engine import VoiceEngine
from sbkit.nn.global_norm import GlobalNorm
from sbkit.nn.native import trial
from sbkit.nn.peek import Peek
from sbkit.nn.voice import voice
from sbkit.tasks.codec import task as codec
from sbkit.tasks.codec.results import CodecRow
from sbkit.train.distributed import equality, ranks


def install() -> None:
    """Read values from the card as zeros, hypotheses as empty, clips as one frame long, and ranks as equal.

    Weights that ranks take from rank 0 do not change; gathered ones are zeros.
    """
    read, compare = Peek.numpy, equality.assert_ranks_equal
    align, gather = greedy.align, DTensor.full_tensor
    measured, speak = voice.longest, voice.VoiceModel.forward
    broadcast = dist._broadcast_coalesced  # type: ignore[attr-defined]  # it has no public name

    def keep(group: ProcessGroup, tensors: list[Tensor], *given: Any) -> None:
        """Broadcast, then restore the weights, which kernels have packed and unpacked."""
        kept = [tensor.cpu() for tensor in tensors]
        broadcast(group, tensors, *given)
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)

    def gathered_zeros(tensor: DTensor, **given: Any) -> Tensor:
        """Gather a weight from all ranks as zeros; single numbers are step counts, which nothing reads."""
        gathered: Tensor = gather(tensor, **given)
        return torch.zeros(gathered.shape, dtype=gathered.dtype).to(gathered.device) if gathered.dim() else gathered

    def zeros(peek: Peek) -> np.ndarray:
        return np.zeros_like(read(peek))

    def compare_quietly(modules: nn.Module, when: str) -> None:
        with mock.patch.object(ranks, "raise_on_main", lambda error: None):
            compare(modules, when)

    def all_blank(labels: np.ndarray, confidence: np.ndarray, blank_id: int = 0) -> list[TokenSpans]:
        return collapse(np.full_like(labels, blank_id), np.ones_like(confidence), blank_id=blank_id)

    def aligned(log_probs: Tensor, *given: Any, **named: Any) -> list[TokenSpans]:
        """Align a text; what a recogniser's bundle computes on the CPU has values."""
        on_cpu = log_probs.device.type == "cpu"
        with mock.patch.object(greedy, "collapse", collapse if on_cpu else all_blank):
            return align(log_probs, *given, **named)

    def one_frame(name: str, text: str, samples: int, mel: float, codes: np.ndarray) -> CodecRow:
        return CodecRow(name, text, samples, mel, np.zeros((1, codes.shape[1]), np.int32))

    def longest(total: Tensor) -> int:
        return 1 if total.is_cuda else measured(total)

    @functools.wraps(speak)  # tracing needs the names of its arguments
    def spoken(model: voice.VoiceModel, text: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sound, samples, frames = speak(model, text, *given)
        return sound, torch.full(samples.shape, sound.shape[1]).to(sound.device) if text.is_cuda else samples, frames

    replaced: list[tuple[Any, str, Any]] = [
        (Peek, "numpy", zeros), (equality, "assert_ranks_equal", compare_quietly), (greedy, "collapse", all_blank),
        (greedy, "align", aligned), (GlobalNorm, "has_statistics", lambda norm: True),
        (trial, "results_agree", lambda *given: True), (codec, "CodecRow", one_frame), (voice, "longest", longest),
        (voice.VoiceModel, "forward", spoken),
        (dist, "_broadcast_coalesced", keep), (DTensor, "full_tensor", gathered_zeros),
        # These check the result of a graph's first run on an example.
        *((engine, "_warm_up", lambda engine, path: None) for engine in (CodeEngine, SoundEngine, VoiceEngine)),
        *((module, "refuse_nan", lambda confidence: None) for module in (greedy, joint))]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
