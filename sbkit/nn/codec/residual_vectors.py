"""Residual vector quantisation: each book has vectors for what the books before it left over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec.quantiser import Quantised, Quantiser


class Book(nn.Module):
    """A table of unit vectors, and layers to the small space in which the nearest of them is looked for, and back."""

    def __init__(self, size: int, entries: int, code_size: int):
        super().__init__()
        self.narrow, self.wide = nn.Linear(size, code_size), nn.Linear(code_size, size)
        self.table = nn.Parameter(torch.randn(entries, code_size))

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] to the quantised ones, codes [B, T], and how far both sides are apart [B, T, 2]."""
        asked = functional.normalize(self.narrow(vectors), dim=-1)
        codes = (asked.detach() @ functional.normalize(self.table.detach(), dim=-1).t()).argmax(-1)
        found = self.found(codes)
        apart = torch.stack([(found - asked.detach()).square(), (asked - found.detach()).square()], -1).mean(-2)
        return self.wide(asked + (found - asked).detach()), codes, apart

    def found(self, codes: Tensor) -> Tensor:
        """The unit vectors of codes."""
        return functional.normalize(functional.embedding(codes, self.table), dim=-1)

    def lookup(self, codes: Tensor) -> Tensor:
        return self.wide(self.found(codes))


class ResidualVectors(Quantiser):
    """Looks each vector up in several books in turn. The tables are parameters, trained by gradients like any other:
    a checkpoint has all of their state, and all ranks have the same.

    Arguments
    ---------
    size : D
    books : codes for each frame
    entries : vectors of a book
    code_size : numbers of these vectors; in a small space, more of them are used
    commitment : weight of the penalty that keeps vectors near those of the books; that of the books has weight 1
    """

    def __init__(self, size: int, books: int = 2, entries: int = 1024, code_size: int = 8, commitment: float = 0.25):
        super().__init__()
        self.size, self.sizes, self.commitment = size, (entries,) * books, commitment
        self.books: Sequence[Book] = nn.ModuleList(  # type: ignore[assignment]  # which doesn't say what it holds
            [Book(size, entries, code_size) for _ in range(books)])

    def forward(self, vectors: Tensor) -> Quantised:
        left, codes, penalty = vectors.float(), [], 0.0
        for book in self.books:
            taken, code, apart = book(left)
            left, penalty = left - taken, penalty + apart
            codes.append(code)
        assert isinstance(penalty, Tensor), "there is a book"
        return Quantised(vectors - left, torch.stack(codes, -1), penalty[..., 0] + self.commitment * penalty[..., 1])

    def lookup(self, codes: Tensor) -> Tensor:
        return torch.stack([book.lookup(codes[..., i]) for i, book in enumerate(self.books)]).sum(0)
