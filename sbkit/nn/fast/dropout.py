"""Dropout on a CPU in a fifth of torch's time, with random words from two tables and integer masks.

An element is dropped if a random 16-bit word is below a bound. In this file:

===========  ==========================================================================================================
word         a 16-bit integer, from -32768 to 32767, each as likely as any other; an activation takes one an element
levels       how many of the 65536 words drop their element: p * 65536, rounded. ``drop`` is such a number; 0 means that
             torch's own dropout is needed
lowest       the lowest word that keeps its element: levels - 32768, so that as many words as levels are below it
factor       what kept elements are multiplied by, so that means stay: 65536 / (65536 - levels)
one, other   slices of two fixed tables of words, which begin at drawn offsets
odd          a drawn odd number; the words of an activation are one + odd * other, modulo 65536
mask         of each element 0 to drop it, or 1; of integers if the elements have 16 bits, see ``select``
share        p of a layer in its current mode: 0 if it doesn't train
===========  ==========================================================================================================

For example p = 0.1: levels = 6554, lowest = -26214, factor = 1.1111.

Multiplying by an odd number maps the 65536 words one-to-one, so a sum with such a multiple is as even as the words of
the table. By an even number only half of the words would be reached.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sbkit.nn.fast.autocast import Context

_WORDS = 1 << 16  # how many different words there are
_COARSE = 1 / 256  # for p closer than this to 0 or 1, levels are too coarse (some percent off)
_STARTS = 1 << 16  # possible offsets of a slice in each table


def levels(p: float, like: Tensor | None = None) -> int:
    """Return how many words drop their element; 0 if ``p`` or the tensor ``like`` need torch's own dropout."""
    if not _COARSE <= p <= 1 - _COARSE:
        return 0
    if like is not None and (type(like) is not Tensor or like.device.type != "cpu" or like.dtype == torch.float64
                             or torch.compiler.is_compiling()):
        return 0
    return round(p * _WORDS)


def lowest(drop: int) -> int:
    """Return the lowest word that keeps its element if ``drop`` levels are dropped."""
    return drop - _WORDS // 2


def factor(drop: int) -> float:
    """Return the scale that preserves the mean if ``drop`` levels are dropped."""
    return _WORDS / (_WORDS - drop)


_TABLES: dict[int, Tensor] = {}


def _random_words(seed: int, first: int, count: int) -> Tensor:
    """Take a part of a seed's fixed table of random words, which grows with the largest mask so far."""
    words = _TABLES.get(seed)
    if words is None or len(words) < count + _STARTS:
        generator = torch.Generator().manual_seed(seed)
        quadruples = (count + _STARTS) // 4  # a drawn integer of 64 bits holds four words
        reserve = quadruples // 4  # for larger batches
        drawn = torch.empty(quadruples + reserve + 1, dtype=torch.int64, device="cpu")
        words = drawn.random_(-(1 << 63), None, generator=generator).view(torch.int16)
        _TABLES[seed] = words
    return words[first : first + count]


class Words(NamedTuple):
    """Random words for one activation, to be computed as ``one`` plus ``odd`` times ``other``.

    Both offsets and the factor are drawn, which gives 2^46 different sums (16 bits for each offset, and 14 for an odd
    number below 32768). Two words of a sum, and two words at the same place of different sums, are as independent as
    the tables' generator allows. This takes a tenth of the time of drawing each word, and needs no memory to keep for
    backward.
    """

    one: Tensor
    other: Tensor
    odd: int

    def sums(self) -> Tensor:
        """Return the words; integers of 16 bits overflow as modulo 65536."""
        return torch.add(self.one, self.other, alpha=self.odd)


def draw(count: int) -> Words:
    """Draw random words, using one number from torch's CPU generator, so that a seed repeats them."""
    number = torch.empty((), dtype=torch.int64, device="cpu").random_()
    bits = int(number.numpy())  # not item(), which counts as a host sync
    first = bits % _STARTS
    second = (bits >> 16) % _STARTS
    odd = (bits >> 32) % (_WORDS // 2) | 1
    return Words(one=_random_words(1, first, count), other=_random_words(2, second, count), odd=odd)


def keep(words: Words, drop: int, like: Tensor) -> Tensor:
    """Make a mask for :func:`select`: 0 to drop, otherwise 1; of integers if ``like`` has 16-bit values."""
    sums = words.sums().view(like.shape)
    if like.itemsize == 2:
        return sums.ge_(lowest(drop))
    return torch.ge(sums, lowest(drop), out=torch.empty_like(like))


def select(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``x`` where ``mask`` is 1 and 0 elsewhere; integer products take a third of the time of bfloat16's."""
    if mask.dtype == x.dtype:
        return torch.mul(x, mask, out=out)
    out_as_integers = None if out is None else out.view(torch.int16)
    return torch.mul(x.view(torch.int16), mask, out=out_as_integers).view(x.dtype)


def _dropped(x: Tensor, words: Words, drop: int) -> Tensor:
    """Return x with dropout by ``words``, in the memory of the mask."""
    mask = keep(words, drop, x)
    if mask.dtype == x.dtype:
        return torch.addcmul(x.new_zeros(()), mask, x, value=factor(drop), out=mask)
    return select(x, mask, out=mask.view(x.dtype)).mul_(factor(drop))


class _Dropped(torch.autograd.Function):
    """Dropout that keeps no mask for backward, but recomputes it from its words."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, drop: int) -> Tensor:
        ctx.words = draw(x.numel())
        ctx.drop = drop
        return _dropped(x.contiguous(), ctx.words, drop)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return _dropped(grad.contiguous(), ctx.words, ctx.drop), None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Apply dropout, with the arguments of ``torch.nn.functional.dropout``."""
    if not training or p == 0:
        return x
    drop = levels(p, x)
    return _Dropped.apply(x, drop) if drop else nn.functional.dropout(x, p, training)


def share(layer: nn.Dropout) -> float | None:
    """Return the share that ``layer`` drops in its current mode; None if it uses torch's own dropout."""
    if not layer.training or layer.p == 0:
        return 0.0
    return layer.p if levels(layer.p) and not layer.inplace else None


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` with cheaper random numbers on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.inplace else dropout(x, self.p, self.training)
