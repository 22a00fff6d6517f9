"""The interface of quantisers: vectors to codes and back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sbkit.nn.guard import guard_indices


class Quantised(NamedTuple):
    """Quantised vectors of a batch."""

    vectors: Tensor  # [B, T, D], through which gradients pass as if nothing had been rounded
    codes: Tensor  # [B, T, Q] int64
    penalty: Tensor  # [B, T], to be added to the loss


class Quantiser(nn.Module, ABC):
    """Vectors [B, T, D] to one code of each book and frame, and codes to vectors.

    A derived class sets ``size``, which is D, and ``sizes``, the entries of each book.
    """

    size: int
    sizes: tuple[int, ...]

    @property
    def bits(self) -> float:
        """Bits of a frame."""
        return sum(math.log2(entries) for entries in self.sizes)

    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantised vectors [B, T, D] and their codes [B, T, Q]."""
        found = self(vectors)
        return found.vectors, found.codes

    def embed(self, codes: Tensor) -> Tensor:
        """Return the vectors [B, T, D] of codes [B, T, Q]; refuse codes that are in no book.

        An exported graph has no way to refuse: there, whoever calls it checks them first.
        """
        if not torch.compiler.is_compiling():
            codes = torch.stack([guard_indices(codes[..., book], entries, name=f"codebook {book}")
                                 for book, entries in enumerate(self.sizes)], dim=-1)
        return self.lookup(codes)

    @abstractmethod
    def forward(self, vectors: Tensor) -> Quantised:
        """Quantise vectors [B, T, D]."""

    @abstractmethod
    def lookup(self, codes: Tensor) -> Tensor:
        """Return the vectors [B, T, D] of codes that are in their books."""

    # ------------------------------------------------------------ what a model chooses that makes codes

    @property
    def choices(self) -> tuple[int, ...]:
        """How many there are to choose from in each of a frame's slots: by default the entries of each book."""
        return self.sizes

    def chosen(self, codes: Tensor) -> Tensor:
        """Return the choices [B, T, slots] that codes [B, T, Q] stand for."""
        return codes

    def joined(self, chosen: Tensor) -> Tensor:
        """Return the codes [B, T, Q] of choices [B, T, slots]."""
        return chosen
