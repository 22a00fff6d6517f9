"""Dropout on a CPU for a fifth of torch's time: random words out of two tables, masks that select by integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_LEVELS = 1 << 16
_COARSE = 1 / 256  # nearer to 0 or 1 than this, the nearest level may be some percent off
_STARTS = 1 << 16  # places where a mask's words may begin in each table


def levels(p: float, like: Tensor | None = None) -> int:
    """How many of the levels are dropped; 0 where torch's own dropout is to be used, for ``p`` or what ``like`` is."""
    if not _COARSE <= p <= 1 - _COARSE:
        return 0
    if like is not None and (type(like) is not Tensor or like.device.type != "cpu" or like.dtype == torch.float64
                             or torch.compiler.is_compiling()):
        return 0
    return round(p * _LEVELS)


class _Table:
    """Random words, always the same; it grows to the largest mask so far, and what it held stays at its place."""

    def __init__(self, seed: int):
        self.seed, self.words = seed, torch.empty(0, dtype=torch.int16)

    def stretch(self, first: int, count: int) -> Tensor:
        words = self.words
        if len(words) < count + _STARTS:
            generator = torch.Generator().manual_seed(self.seed)
            more = (count + _STARTS) // 4  # words come by four; a quarter more than needed, since batches differ
            drawn = torch.empty(more + more // 4 + 1, dtype=torch.int64, device="cpu")
            self.words = words = drawn.random_(-(1 << 63), None, generator=generator).view(torch.int16)
        return words[first : first + count]


_TABLES = _Table(1), _Table(2)


class Words(NamedTuple):
    """Random words of 16 bits that are yet to be summed: a stretch of one table plus an odd multiple of another's.

    Where both begin and the multiple are drawn, so there are 2^46 such sums; any two words of one, and those at one
    place of any two, are independent but for what the tables' own generator leaves. It costs a tenth of drawing each,
    and nothing to keep.
    """

    one: Tensor
    other: Tensor
    odd: int

    def sums(self) -> Tensor:
        return torch.add(self.one, self.other, alpha=self.odd)


def draw(count: int) -> Words:
    """So many random words, by one number from torch's CPU generator: a seed repeats them."""
    one = torch.empty((), dtype=torch.int64, device="cpu").random_()
    drawn = int(one.numpy())  # no item(): nothing waits for a device
    first, second, odd = drawn % _STARTS, (drawn >> 16) % _STARTS, (drawn >> 32) % (_LEVELS // 2) | 1
    return Words(_TABLES[0].stretch(first, count), _TABLES[1].stretch(second, count), odd)


def lowest(drop: int) -> int:
    """The lowest word that keeps its element."""
    return drop - _LEVELS // 2


def factor(drop: int) -> float:
    """What keeps the mean where ``drop`` levels are dropped."""
    return _LEVELS / (_LEVELS - drop)


def keep(words: Words, drop: int, like: Tensor) -> Tensor:
    """A mask for :func:`select`: 0 where it drops, else 1; in integers for values of 16 bits."""
    sums = words.sums().view(like.shape)
    return sums.ge_(lowest(drop)) if like.itemsize == 2 else torch.ge(sums, lowest(drop), out=torch.empty_like(like))


def select(x: Tensor, kept: Tensor, out: Tensor | None = None) -> Tensor:
    """``x`` where ``kept`` is 1, 0 where it is 0; times 0 or 1 as integers is a third of the time of bfloat16."""
    if kept.dtype == x.dtype:
        return torch.mul(x, kept, out=out)
    whole = None if out is None else out.view(torch.int16)
    return torch.mul(x.view(torch.int16), kept, out=whole).view(x.dtype)


def _dropped(x: Tensor, words: Words, drop: int) -> Tensor:
    kept = keep(words, drop, x)
    if kept.dtype == x.dtype:
        return torch.addcmul(x.new_zeros(()), kept, x, value=factor(drop), out=kept)
    return select(x, kept, out=kept.view(x.dtype)).mul_(factor(drop))


class _Dropped(torch.autograd.Function):
    """No mask is kept for the backward: its words are summed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drop: int) -> Tensor:
        ctx.words, ctx.drop = draw(x.numel()), drop
        return _dropped(x.contiguous(), ctx.words, drop)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _dropped(grad.contiguous(), ctx.words, ctx.drop), None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """As ``torch.nn.functional.dropout``."""
    if not training or p == 0:
        return x
    drop = levels(p, x)
    return _Dropped.apply(x, drop) if drop else nn.functional.dropout(x, p, training)


def share(layer: nn.Dropout) -> float | None:
    """What ``layer`` drops now; None where its masks are torch's own."""
    if not layer.training or layer.p == 0:
        return 0.0
    return layer.p if levels(layer.p) and not layer.inplace else None


class Dropout(nn.Dropout):
    """``torch.nn.Dropout``, drawn cheaply on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.inplace else dropout(x, self.p, self.training)
