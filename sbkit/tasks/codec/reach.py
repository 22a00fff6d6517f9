"""How far a codec looks: the frames that decide a frame's codes and its samples, by which long recordings are cut."""

from __future__ import annotations

import torch
from torch import Tensor

from sbkit.nn.codec.coder import Coder

#: Of noise, in which it is measured; a codec that looks to its ends may look at everything.
_FRAMES = 512
_LOUDNESS = 0.1


def reach(coder: Coder) -> int | None:
    """Return how many frames on each side of one have an effect on its codes or on its samples; None: maybe all.

    The gradient of what the middle frame gives is not zero at just those that have one.
    """
    draw, frames, middle = torch.Generator().manual_seed(0), torch.tensor([_FRAMES]), _FRAMES // 2
    signals = (_LOUDNESS * torch.randn(1, _FRAMES * coder.stride, generator=draw)).requires_grad_()
    vectors = coder.encoder(*coder.features(signals, frames * coder.stride))
    coded = _moved_by(vectors[0, middle], signals, draw)
    vectors = vectors.detach().requires_grad_()
    sound = coder.sound(vectors, frames)[0].unflatten(0, (_FRAMES, -1))
    touched = torch.cat([torch.nonzero(each) for each in (coded, _moved_by(sound[middle], vectors, draw))])
    first, last = int(touched.min()), int(touched.max())
    return None if first == 0 or last == _FRAMES - 1 else max(middle - first, last - middle)


def _moved_by(output: Tensor, given: Tensor, draw: torch.Generator) -> Tensor:
    """Whether each frame of what was given [1, frames * N, ...] has an effect on an output [N]: [frames]."""
    [gradient] = torch.autograd.grad((output * torch.randn(output.shape, generator=draw)).sum(), given)
    return gradient.reshape(_FRAMES, -1).ne(0).any(1)
