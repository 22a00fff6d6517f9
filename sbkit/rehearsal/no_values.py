"""Disables checks of computed values, which mean nothing on a fake GPU; the computations still run.

``python -m sbkit.rehearsal.no_values train.py ...`` runs a script that way. ``PATCHES`` says what is replaced, and why.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
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

#: What some replacements still call.
_read_peek = Peek.numpy
_assert_ranks_equal = equality.assert_ranks_equal
_align = greedy.align
_longest = voice.longest
_speak = voice.VoiceModel.forward
_broadcast = dist._broadcast_coalesced  # type: ignore[attr-defined]  # it has no public name
_gather = DTensor.full_tensor


# ---------------------------------------------------------------------- training


def zeros_of_peek(peek: Peek) -> np.ndarray:
    return np.zeros_like(_read_peek(peek))


def always(*_: object) -> bool:
    return True


def do_nothing(*_: object) -> None:
    pass


def compare_ranks_quietly(modules: nn.Module, when: str) -> None:
    """Exchange the hashes, and raise nothing if they differ."""
    with mock.patch.object(ranks, "raise_on_main", do_nothing):
        _assert_ranks_equal(modules, when)


def broadcast_and_restore(group: ProcessGroup, tensors: list[Tensor], *buffer_size_and_source: int) -> None:
    """Broadcast, then restore the weights, which kernels have packed and unpacked."""
    weights = [tensor.cpu() for tensor in tensors]
    _broadcast(group, tensors, *buffer_size_and_source)
    for tensor, weight in zip(tensors, weights, strict=True):
        tensor.copy_(weight)


def gather_zeros(tensor: DTensor, **options: Any) -> Tensor:
    """Gather a weight from all ranks as zeros; single numbers are step counts, which nothing reads."""
    gathered: Tensor = _gather(tensor, **options)
    if not gathered.dim():
        return gathered
    return torch.zeros(gathered.shape, dtype=gathered.dtype).to(gathered.device)


# ---------------------------------------------------------------------- hypotheses and sounds


def all_blank(labels: np.ndarray, confidence: np.ndarray, blank_id: int = 0) -> list[TokenSpans]:
    return collapse(np.full_like(labels, blank_id), np.ones_like(confidence), blank_id=blank_id)


def align_blanks(log_probs: Tensor, *arguments: Any, **named_arguments: Any) -> list[TokenSpans]:
    """Align a text; what a recogniser's bundle computes on the CPU has values."""
    on_cpu = log_probs.device.type == "cpu"
    with mock.patch.object(greedy, "collapse", collapse if on_cpu else all_blank):
        return _align(log_probs, *arguments, **named_arguments)


def one_frame(name: str, text: str, samples: int, mel: float, codes: np.ndarray) -> CodecRow:
    return CodecRow(name, text, samples, mel, np.zeros((1, codes.shape[1]), np.int32))


def one_frame_on_cards(total: Tensor) -> int:
    return 1 if total.is_cuda else _longest(total)


@functools.wraps(_speak)  # tracing needs the names of its arguments
def speak_whole_sound(model: voice.VoiceModel, text: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Speak texts, all of which have the length of the longest on a card."""
    sound, samples, frames = _speak(model, text, *others)
    if text.is_cuda:
        samples = torch.full(samples.shape, sound.shape[1]).to(sound.device)
    return sound, samples, frames


# ---------------------------------------------------------------------- the table


class Patch(NamedTuple):
    """A name that is replaced in a module or a class."""

    owner: ModuleType | type
    name: str
    replacement: Callable[..., Any]
    why: str
    torch: str | None = None
    """The versions of torch that have it, for a name of torch's; to allow others is to look at it again."""


TORCH = ">=2.10,<2.12"
PATCHES = (
    Patch(Peek, "numpy", zeros_of_peek, "values that the host reads, such as losses, are zeros, which are finite"),
    Patch(equality, "assert_ranks_equal", compare_ranks_quietly, "weights of ranks differ in random bits"),
    Patch(dist, "_broadcast_coalesced", broadcast_and_restore,
          "DistributedDataParallel takes rank 0's weights through buffers that hold nothing; it has no hook for that",
          TORCH),
    Patch(DTensor, "full_tensor", gather_zeros, "a checkpoint of sharded weights needs finite ones", TORCH),
    Patch(GlobalNorm, "has_statistics", always, "NaN, which marks that there are none, can't be told from noise"),
    Patch(trial, "results_agree", always, "kernels can't be tried against torch's: both give noise"),
    Patch(greedy, "collapse", all_blank, "labels are noise, so hypotheses are empty"),
    Patch(greedy, "align", align_blanks, "the same for alignments, except on the CPU"),
    Patch(greedy, "refuse_nan", do_nothing, "scores may be NaN"),
    Patch(joint, "refuse_nan", do_nothing, "scores may be NaN"),
    Patch(codec, "CodecRow", one_frame, "codes are noise, which is in no codebook"),
    Patch(CodeEngine, "_warm_up", do_nothing, "it checks the codes of an example"),
    Patch(SoundEngine, "_warm_up", do_nothing, "it checks the sound of an example"),
    Patch(VoiceEngine, "_warm_up", do_nothing, "it checks the sound of an example"),
    Patch(voice, "longest", one_frame_on_cards, "a predicted length is noise: it could need all memory"),
    Patch(voice.VoiceModel, "forward", speak_whole_sound, "predicted lengths don't fit the sound"),
)


def install() -> None:
    """Read values from the card as zeros, hypotheses as empty, clips as one frame long, and ranks as equal.

    Weights that ranks take from rank 0 do not change; gathered ones are zeros.
    """
    for patch in PATCHES:
        assert hasattr(patch.owner, patch.name), f"{patch.owner} has no {patch.name} any more, but: {patch.why}"
        setattr(patch.owner, patch.name, patch.replacement)


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
