"""Orthogonalises matrices by Newton-Schulz's iteration, each on one rank for all.

There are two paths to the same results, of which ``Muon`` takes one for each step:

==========================  =========================================  ===============================================
what                        the path by torch                          the path by kernels
==========================  =========================================  ===============================================
entry                       ``orthogonalise(tensors)``                 ``Stacks(shapes, dtype)``, whose ``parts`` a
                                                                       kernel fills, and then ``orthogonalised()``
taken                       on GPUs, and on CPUs where kernels can't   on CPUs with kernels, see ``update_kernels.fit``
                            be loaded or don't take a tensor
stacks: computed at once    matrices of one size, wide or tall         matrices of one shape
norm of 1                   made here, by ``newton_schulz``            made by the kernel that fills ``parts``
iteration                   ``newton_schulz``                          ``iterate_squares``, with fewer operations for
                                                                       long matrices
root mean square of 1       made here                                  made by the kernel that moves the weights, with
                                                                       ``factors``
==========================  =========================================  ===============================================

Both compute the same polynomial of a matrix, so they must agree except for rounding: a run may change from one to the
other when it is resumed. These tests in ``tests/train/test_update_kernels.py`` compare them:
``test_runs_of_iterations_give_what_single_ones_do`` the iterations, ``test_steps_are_those_of_torch`` whole steps, and
``test_steps_with_products_in_bfloat16_are_as_far_from_exact_ones_as_those_of_torch`` their errors in bfloat16.

Both share the work over ranks by ``deal`` and ``complete``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sbkit.recipe.speed import native_precision
from sbkit.train.distributed import ranks

#: Coefficients of an iteration that takes singular values in [0.002, 1] to [0.65, 1.25] in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
#: How many of the iterations ``iterate_squares`` computes at a time, found by trying: rounding errors in a gram grow
#: with each iteration of its run, and shrink again with the next gram. In bfloat16, momenta of the flagship came out
#: within 0.02 to 0.16 of exact results (relative), as with single iterations; after (2, 3) they were up to twice as far
#: from them, and all five at a time diverge. The test that compares them with single iterations is
#: ``test_runs_in_bfloat16_stay_stable_however_small_singular_values_are``.
_RUNS = (3, 2)
#: How many times as long as wide a matrix must be for ``iterate_squares`` to be faster.
_LONG = 3
#: A matrix without a larger element goes to 0.
TINY = 1e-30


# ------------------------------------------------------------ sharing the work over ranks


def deal(counts: Sequence[int], rank: int, world_size: int) -> list[slice]:
    """Deal the matrices of all stacks out to ranks in turn, so that each has equally many; return this rank's of each.

    counts : the number of matrices of each stack

    >>> deal([3, 2], rank=0, world_size=2)  # matrices 0 and 2 of the first stack, and 1 of the second
    [slice(0, None, 2), slice(1, None, 2)]
    >>> deal([3, 2], rank=1, world_size=2)  # matrix 1 of the first stack, and 0 of the second
    [slice(1, None, 2), slice(0, None, 2)]
    """
    shares = []
    matrices_before = 0
    for count in counts:
        shares.append(slice((rank - matrices_before) % world_size, None, world_size))
        matrices_before += count
    return shares


def complete(results: Sequence[torch.Tensor], shares: Sequence[slice], counts: Sequence[int],
             dtype: torch.dtype) -> list[torch.Tensor]:
    """Return whole stacks [N, height, width] from the results of all ranks, with the same bits on each.

    All ranks call this together. A sum of one rank's results and the zeros of all others is exact.

    results : of each stack, this rank's matrices [n, height, width]
    shares, counts : what ``deal`` returned, and what it was given
    dtype : of the whole stacks
    """
    shapes = [(count, *result.shape[1:]) for count, result in zip(counts, results, strict=True)]
    lengths = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(lengths), dtype=dtype, device=results[0].device)  # one exchange for all stacks
    for place, shape, share, result in zip(flat.split(lengths), shapes, shares, results, strict=True):
        place.view(shape)[share] = result
    summed = ranks.sum_across(flat)
    return [place.view(shape) for place, shape in zip(summed.split(lengths), shapes, strict=True)]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# ------------------------------------------------------------ the path by torch


def orthogonalise(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors (height, ...) as orthogonalised matrices, scaled to a root mean square of 1, in the same shapes.

    Matrices of one size, wide or tall, are computed together. Each is computed by one rank, so that all ranks get the
    same bits even on different processors.
    """
    indices_of: dict[torch.Size, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices_of.setdefault(tensor.shape, []).append(index)
    shapes_of: dict[tuple[int, ...], list[torch.Size]] = {}
    for shape in indices_of:
        size = tuple(sorted((shape[0], shape[1:].numel())))
        shapes_of.setdefault(size, []).append(shape)
    counts = [sum(len(indices_of[shape]) for shape in shapes) for shapes in shapes_of.values()]
    shares = deal(counts, _rank(), _world_size())

    results = list(tensors)
    for ((height, width), shapes), count, share in zip(shapes_of.items(), counts, shares, strict=True):
        stacks = []  # of each shape (N, height, width)
        for shape in shapes:
            stack = torch.stack([tensors[index] for index in indices_of[shape]]).flatten(2)
            stacks.append(stack.mT if shape[0] > height else stack)
        matrices = torch.cat(stacks) if len(stacks) > 1 else stacks[0].contiguous()

        orthogonal = newton_schulz(matrices[share])
        if _world_size() > 1:  # one stack at a time, so that no more than one is in memory twice
            [orthogonal] = complete([orthogonal], [share], [count], matrices.dtype)
        orthogonal.mul_(math.sqrt(width))

        parts = orthogonal.split([len(indices_of[shape]) for shape in shapes])
        for shape, part in zip(shapes, parts, strict=True):
            if shape[0] > height:
                part = part.mT.contiguous()
            for index, result in zip(indices_of[shape], part.view(-1, *shape), strict=True):
                results[index] = result
    return results


def newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
    """Return wide matrices (N, height, width) with their singular vectors, and values near 1 for their singular values.

    With the gram G = X X^T, an iteration takes X to (a I + b G + c G^2) X, and so each of its singular values s to
    a s + b s^3 + c s^5, which for the coefficients a, b, c above comes near 1.
    """
    a, b, c = _COEFFICIENTS
    x = matrices / matrices.abs().amax((-2, -1), keepdim=True).clamp_min(TINY)  # so that no square underflows
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1)
    x = x.to(dtype_of_products(matrices.device))
    for _ in range(_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        # a x + (b gram + c gram^2) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def dtype_of_products(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device is fast at that, as the iteration corrects its own errors; else float32."""
    return torch.bfloat16 if native_precision(device) == "bf16" else torch.float32


# ------------------------------------------------------------ the path by kernels


def iterate_squares(x: torch.Tensor) -> torch.Tensor:
    """Return what ``newton_schulz`` does for matrices (N, height, width), wide or tall, whose norms are at most 1.

    It takes fewer operations for long matrices. An iteration multiplies a wide X by a polynomial of its gram
    G = X X^T,

        P(G) = a I + Q(G),   Q(G) = b G + c G^2,   X becomes P(G) X,

    and P(G) is symmetric and commutes with G. So the gram of the next X follows without this X:

        G becomes (P(G) X) (P(G) X)^T = P(G) G P(G)

    Hence a run of iterations only multiplies squares, G and the product of the polynomials P so far, and then X once by
    that product. Of a tall X everything is transposed: G = X^T X, and X becomes X P(G).
    """
    a, b, c = _COEFFICIENTS
    height, width = x.shape[1:]
    is_tall = height > width
    is_long = max(height, width) >= _LONG * min(height, width)
    for iterations in _RUNS if is_long else [1] * _ITERATIONS:
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)
        # Q(G), whose values are small; those of P(G) with a on its diagonal would be rounded once more.
        q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if iterations == 1:
            x = torch.baddbmm(x, x, q, beta=a) if is_tall else torch.baddbmm(x, q, x, beta=a)
            continue
        product = q + a * torch.eye(gram.shape[-1], dtype=x.dtype)
        for _ in range(iterations - 1):
            half = torch.baddbmm(gram, q, gram, beta=a)  # P(G) G
            gram = torch.baddbmm(half, half, q, beta=a)  # P(G) G P(G)
            q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            product = torch.baddbmm(product, q, product, beta=a)
        x = torch.bmm(x, product) if is_tall else torch.bmm(product, x)
    return x


class Stacks:
    """The matrices that a step orthogonalises, those of a shape as one stack that this rank computes its share of.

    shapes : of each matrix, height and width; None for one that isn't due
    dtype : in which they are multiplied
    """

    def __init__(self, shapes: Sequence[tuple[int, int] | None], dtype: torch.dtype):
        self.parts: list[torch.Tensor | None] = [None] * len(shapes)
        """Of each matrix that this rank computes, its place in a stack."""
        self.factors = [0.0 if shape is None else math.sqrt(max(shape)) for shape in shapes]
        """What brings the root mean square of each orthogonalised matrix to 1."""
        self.result_dtype = dtype if _world_size() == 1 else torch.float32
        """That of the results: ranks may multiply in different ones."""

        indices_of: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(shapes):
            if shape is not None:
                indices_of.setdefault(shape, []).append(index)
        self._indices = list(indices_of.values())  # of each stack, its matrices
        self._counts = [len(indices) for indices in self._indices]
        self._shares = deal(self._counts, _rank(), _world_size())
        self._stacks: list[torch.Tensor] = []  # this rank's share of each
        for (shape, indices), share in zip(indices_of.items(), self._shares, strict=True):
            own_indices = indices[share]
            stack = torch.empty(len(own_indices), *shape, dtype=dtype)
            self._stacks.append(stack)
            for index, part in zip(own_indices, stack.unbind(), strict=True):
                self.parts[index] = part

    def orthogonalised(self) -> list[torch.Tensor | None]:
        """Return all matrices, which have a norm of 1, orthogonalised; None for one that isn't due."""
        stacks = [iterate_squares(stack) if len(stack) else stack for stack in self._stacks]
        if stacks and _world_size() > 1:
            stacks = complete(stacks, self._shares, self._counts, self.result_dtype)
        results: list[torch.Tensor | None] = [None] * len(self.parts)
        for indices, stack in zip(self._indices, stacks, strict=True):
            for index, result in zip(indices, stack.unbind(), strict=True):
                results[index] = result
        return results
