"""Quantisers: vectors to codes and back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.guard import guard_indices


class Quantised(NamedTuple):
    """Quantised vectors of a batch."""

    vectors: Tensor  # [B, T, D], with straight-through gradients
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
        """Bits per frame."""
        return sum(math.log2(entries) for entries in self.sizes)

    def embed(self, codes: Tensor) -> Tensor:
        """Return the vectors [B, T, D] of codes [B, T, Q]; raises for invalid codes.

        An exported graph can't raise, so its callers check codes first.
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
        """Return the vectors [B, T, D] of valid codes."""

    # ------------------------------------------------------------ for models that predict codes

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of choices for each of a frame's slots: by default the entries of each book."""
        return self.sizes

    def chosen(self, codes: Tensor) -> Tensor:
        """Convert codes [B, T, Q] to choices [B, T, slots]."""
        return codes

    def joined(self, chosen: Tensor) -> Tensor:
        """Convert choices [B, T, slots] to codes [B, T, Q]."""
        return chosen


class Book(nn.Module):
    """A codebook of unit vectors in a small space, with projections to that space and back."""

    def __init__(self, size: int, entries: int, code_size: int):
        super().__init__()
        self.narrow, self.wide = nn.Linear(size, code_size), nn.Linear(code_size, size)
        self.table = nn.Parameter(torch.randn(entries, code_size))

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] to quantised vectors [B, T, D], codes [B, T], and codebook and commitment losses [B, T, 2]."""
        query = functional.normalize(self.narrow(vectors), dim=-1)
        codes = (query.detach() @ functional.normalize(self.table.detach(), dim=-1).t()).argmax(-1)
        nearest = self.unit_vectors(codes)
        losses = torch.stack([(nearest - query.detach()).square(), (query - nearest.detach()).square()], -1).mean(-2)
        return self.wide(query + (nearest - query).detach()), codes, losses

    def unit_vectors(self, codes: Tensor) -> Tensor:
        """Return the unit vectors of codes."""
        return functional.normalize(functional.embedding(codes, self.table), dim=-1)

    def lookup(self, codes: Tensor) -> Tensor:
        return self.wide(self.unit_vectors(codes))


class ResidualVectors(Quantiser):
    """Residual vector quantisation. The codebooks are parameters, trained by gradients like any others, so checkpoints
    have all of their state, and all ranks have the same.

    size : D
    codebooks : codes for each frame
    entries : vectors of a book
    code_size : dimensions of these vectors; in a small space, more of them are used
    commitment : weight of the commitment loss; that of the codebook loss is 1
    """

    def __init__(self, size: int, codebooks: int = 2, entries: int = 1024, code_size: int = 8,
                 commitment: float = 0.25):
        super().__init__()
        self.size, self.sizes, self.commitment = size, (entries,) * codebooks, commitment
        self.books: Sequence[Book] = nn.ModuleList(  # type: ignore[assignment]  # which doesn't say what it holds
            [Book(size, entries, code_size) for _ in range(codebooks)])

    def forward(self, vectors: Tensor) -> Quantised:
        residual = vectors.float()
        codes = []
        penalty = 0.0
        for book in self.books:
            quantised, code, losses = book(residual)
            residual = residual - quantised
            penalty = penalty + losses
            codes.append(code)
        assert isinstance(penalty, Tensor), "there is a book"
        return Quantised(vectors - residual, torch.stack(codes, -1),
                         penalty[..., 0] + self.commitment * penalty[..., 1])

    def lookup(self, codes: Tensor) -> Tensor:
        return torch.stack([book.lookup(codes[..., i]) for i, book in enumerate(self.books)]).sum(0)


class FiniteScalars(Quantiser):
    """Finite scalar quantisation: rounds numbers to levels between -1 and 1. Codes are valid by construction.

    levels : of each number of a book: [8, 5, 5, 5] has 1,000 codes
    codebooks : codes for each frame
    noise : share of utterances that get noise as strong as rounding, instead of rounding, in training, so that the
        decoder has a gradient between two levels
    """

    level: Tensor
    step: Tensor

    def __init__(self, levels: Sequence[int] = (8, 5, 5, 5), codebooks: int = 1, noise: float = 0.0):
        super().__init__()
        if not levels or min(levels) < 2 or codebooks < 1:
            raise ValueError(f"levels are {list(levels)} and codebooks {codebooks}: use 1 codebook or more, and 2 "
                             "levels or more")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise is {noise}, not a share between 0 and 1")
        self.levels, self.books, self.noise = tuple(levels), codebooks, noise
        self.size, self.sizes = codebooks * len(levels), (math.prod(levels),) * codebooks
        steps = [math.prod(levels[:i]) for i in range(len(levels))]
        self.register_buffer("level", torch.tensor(levels), persistent=False)
        self.register_buffer("step", torch.tensor(steps), persistent=False)

    def forward(self, vectors: Tensor) -> Quantised:
        top = (self.level - 1).repeat(self.books).float()
        place = (vectors.float().tanh() + 1) / 2 * top  # 0 to top
        index = place.detach().round()
        rounded = place + (index - place.detach())
        if self.training and self.noise:
            drawn = torch.rand(len(vectors), 1, 1, device=vectors.device) < self.noise
            rounded = torch.where(drawn, place + torch.rand_like(place) - 0.5, rounded)
        codes = (index.long().unflatten(2, (self.books, -1)) * self.step).sum(-1)
        return Quantised(2 * rounded / top - 1, codes, place.new_zeros(place.shape[:2]))

    def lookup(self, codes: Tensor) -> Tensor:
        index = codes[..., None] // self.step % self.level  # [B, T, Q, levels]
        return (2 * index / (self.level - 1) - 1).flatten(2)

    @property
    def choices(self) -> tuple[int, ...]:
        return self.levels * self.books

    def chosen(self, codes: Tensor) -> Tensor:
        return (codes[..., None] // self.step % self.level).flatten(2)

    def joined(self, chosen: Tensor) -> Tensor:
        return (chosen.unflatten(2, (self.books, -1)) * self.step).sum(-1)

    def extra_repr(self) -> str:
        return f"levels={self.levels}, books={self.books}, noise={self.noise}"
