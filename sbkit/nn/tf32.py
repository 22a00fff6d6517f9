"""TF32: whether a GPU rounds the inputs of fp32 products and convolutions to 10 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def allow_tf32(allowed: bool) -> None:
    """Allow TF32 or not, for products and for convolutions.

    torch allows it by itself for convolutions; SpeechBrain allows it for both where ``speechbrain.core`` is imported.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Within it, compute in fp32: for features, whose quiet bands TF32 would round away.

    A compiler can't trace the switch; what it compiles keeps what holds around it.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allow_tf32(False)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
