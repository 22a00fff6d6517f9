"""Chunks of frames that limit the context of a model in training, so that it can also run live."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn

from sbkit.errors import SbkitError

#: Makes these random numbers differ from those of the plan, which have the same seed.
_STREAM = int.from_bytes(b"chunks", "little")


@dataclass
class ChunkConfig(DynChunkTrainConfig):
    """SpeechBrain's chunk size and number of left chunks, and the lookahead."""

    ahead: int = 0
    """The last frames of a chunk, which the others see, and which are computed again with the next chunk."""


class Chunks:
    """Draws the context of frames for each optimizer step: a chunk and a left context, or the whole utterance.

    A frame sees its own chunk, to the end, and a limited number of frames before that, so a model that is fed a chunk
    at a time needs a state of constant size. One model learns several sizes, and whole utterances.

    sizes : of a chunk, in encoder frames; each is drawn equally often
    left_context : frames before a chunk, in encoder frames, multiples of every size; each is drawn equally often
    whole : the share of steps that see whole utterances
    validate : the size for validation, with the most left context; ``null``: whole utterances
    lookahead : on a stream: the last frames of a chunk, which are computed again with the next one, where they
        see the frames after them; 0: none. It doesn't change training

    >>> Chunks(sizes=[8], whole=0.0).at(seed=1, step=0)
    DynChunkTrainConfig(chunk_size=8, left_context_size=8)
    """

    def __init__(self, sizes: Sequence[int] = (8, 16, 32), left_context: Sequence[int] = (64,), whole: float = 0.4,
                 validate: int | None = 16, lookahead: int = 0):
        for name, values in (("sizes", sizes), ("left_context", left_context)):
            if not isinstance(values, (list, tuple)) or not values or any(
                    isinstance(value, bool) or not isinstance(value, int) or value <= 0 for value in values):
                raise ValueError(f"{name} is {values!r}, not a list of whole numbers above 0")
        if isinstance(whole, bool) or not isinstance(whole, (int, float)) or not 0 <= whole < 1:
            raise ValueError(f"whole is {whole!r}, not a share of steps from 0 to below 1")
        if validate is not None and validate not in sizes:
            raise ValueError(f"validate is {validate!r}, not one of sizes ({_listed(sizes)}) or null")
        for context in left_context:
            unfit = [size for size in sizes if context % size]
            if unfit:
                step = math.lcm(*sizes)
                raise ValueError(f"left_context is {context}, not a multiple of each of sizes ({_listed(unfit)}): "
                                 f"multiples of {step} are, such as {step * max(1, round(context / step))}")
        if isinstance(lookahead, bool) or not isinstance(lookahead, int) or not 0 <= lookahead < min(sizes):
            raise ValueError(f"lookahead is {lookahead!r}, not a whole number from 0 to below the smallest of sizes "
                             f"({min(sizes)})")
        self.sizes = sorted(set(sizes))
        self.left = sorted(set(left_context))
        self.whole = whole
        self.validate = validate
        self.ahead = lookahead

    def at(self, seed: int, step: int) -> DynChunkTrainConfig | None:
        """Draw the context of a step, None for whole utterances; the same on all ranks and after resuming."""
        rng = np.random.Generator(np.random.PCG64([seed % 2**64, step, _STREAM]))
        if rng.random() < self.whole:
            return None
        size = int(rng.choice(self.sizes))
        left = int(rng.choice(self.left))
        return DynChunkTrainConfig(size, left // size)

    def costliest(self) -> DynChunkTrainConfig:
        """Return the context that takes the most memory: the smallest chunks, which convolutions pad one by one."""
        return DynChunkTrainConfig(self.sizes[0], self.left[-1] // self.sizes[0])

    def config(self, size: int, left: int | None = None) -> ChunkConfig:
        """Return the context of evaluation with chunks of this size; raises if the model wasn't trained for it.

        left : frames before a chunk; None: the most it was trained for
        """
        left = self.left[-1] if left is None else left
        for what, value, trained in (("chunks", size, self.sizes), ("a left context", left, self.left)):
            if value not in trained:
                raise SbkitError("untrained-chunk",
                                 f"the model wasn't trained for {what} of {value} frames", value=value,
                                 hint=f"it was trained for {_listed(trained)}")
        return ChunkConfig(size, left // size, self.ahead)

    def in_milliseconds(self, frame_seconds: float) -> dict[int, int]:
        """Map each size in milliseconds to the size in encoder frames."""
        return {round(1000 * frame_seconds * size): size for size in self.sizes}

    def validation(self) -> ChunkConfig | None:
        """Return the context of validation, None for whole utterances."""
        return None if self.validate is None else self.config(self.validate)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


@contextmanager
def mask_last_chunk_padding(layers: nn.Module, frames: Tensor, config: DynChunkTrainConfig) -> Iterator[None]:
    """Context in which SpeechBrain's encoder masks padding only in the last chunk of an utterance.

    No other frame sees chunks that are only padding. If their frames were masked, they would have nothing to attend to,
    which gives NaN.

    layers : the module that is called with ``src_key_padding_mask`` [B, T], True for padding
    frames : [B], real frames of each utterance
    """
    size = config.chunk_size
    ends = torch.div(frames + size - 1, size, rounding_mode="floor") * size

    def in_last_chunk(_module: nn.Module, args: tuple[object, ...],
                      kwargs: dict[str, Tensor]) -> tuple[tuple[object, ...], dict[str, Tensor]]:
        time = torch.arange(kwargs["src"].shape[1], device=frames.device)
        mask = (time >= frames[:, None]) & (time < ends[:, None])
        return args, {**kwargs, "src_key_padding_mask": mask}

    hook = layers.register_forward_pre_hook(in_last_chunk, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
