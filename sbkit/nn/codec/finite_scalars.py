"""Finite scalar quantisation: each number of a vector is rounded to one of a few levels; together they are a code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sbkit.nn.codec.quantiser import Quantised, Quantiser


class FiniteScalars(Quantiser):
    """Rounds numbers to levels between -1 and 1. Whatever comes in, a code is one of its book's, by construction.

    Arguments
    ---------
    levels : of each number of a book: [8, 5, 5, 5] has 1,000 codes
    books : codes for each frame
    noise : this share of the utterances gets noise as strong as rounding instead of it in training, so that the
        decoder's gradient tells where between two levels a number had better be
    """

    level: Tensor
    step: Tensor

    def __init__(self, levels: Sequence[int] = (8, 5, 5, 5), books: int = 1, noise: float = 0.0):
        super().__init__()
        if not levels or min(levels) < 2 or books < 1:
            raise ValueError(f"levels are {list(levels)} and books {books}: there must be a book, and two levels")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise is {noise}, not a share between 0 and 1")
        self.levels, self.books, self.noise = tuple(levels), books, noise
        self.size, self.sizes = books * len(levels), (math.prod(levels),) * books
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
