"""Orthogonalises matrices by Newton-Schulz's iteration, each on one rank for all."""

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
#: The iterations that ``iterate_squares`` computes at a time. Rounding errors in a gram grow with each iteration of its
#: run, and shrink again with the next gram: in bfloat16, momenta of the flagship came out within 0.02 to 0.16 of
#: exact results (relative), with single iterations too; after (2, 3) they were up to twice as far from them, and all
#: five at a time diverge.
_RUNS = (3, 2)
#: How many times as long as wide a matrix must be for ``iterate_squares`` to be faster.
_LONG = 3
#: A matrix without a larger element goes to 0.
TINY = 1e-30


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

    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    matrices_before = 0  # ranks take turns over the matrices of all sizes, so that they have equally many
    results = list(tensors)
    for (height, width), shapes in shapes_of.items():
        stacks = []  # of each shape (N, height, width)
        for shape in shapes:
            stack = torch.stack([tensors[index] for index in indices_of[shape]]).flatten(2)
            stacks.append(stack.mT if shape[0] > height else stack)
        matrices = torch.cat(stacks) if len(stacks) > 1 else stacks[0].contiguous()

        of_this_rank = slice((rank - matrices_before) % world_size, None, world_size)
        matrices_before += len(matrices)
        orthogonal = newton_schulz(matrices[of_this_rank])
        if world_size > 1:
            shared = torch.zeros_like(matrices)
            shared[of_this_rank] = orthogonal
            orthogonal = ranks.sum_across(shared)
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


def iterate_squares(x: torch.Tensor) -> torch.Tensor:
    """Return what ``newton_schulz`` does for matrices (N, height, width), wide or tall, whose norms are at most 1.

    It takes fewer operations for long matrices. An iteration multiplies a matrix X by a polynomial of its gram G, which
    is symmetric: X becomes P(G) X, and G becomes P(G) G P(G). So a run of iterations multiplies small squares, and then
    X once, by the product of their polynomials.
    """
    a, b, c = _COEFFICIENTS
    height, width = x.shape[1:]
    is_tall = height > width
    runs = _RUNS if max(height, width) >= _LONG * min(height, width) else [1] * _ITERATIONS
    for iterations in runs:
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)
        # This is P(G) - a I, whose values are small; with a on its diagonal they would be rounded once more.
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if iterations == 1:
            x = torch.baddbmm(x, x, polynomial, beta=a) if is_tall else torch.baddbmm(x, polynomial, x, beta=a)
            continue
        product = polynomial + a * torch.eye(gram.shape[-1], dtype=x.dtype)
        for _ in range(iterations - 1):
            half = torch.baddbmm(gram, polynomial, gram, beta=a)
            gram = torch.baddbmm(half, half, polynomial, beta=a)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            product = torch.baddbmm(product, polynomial, product, beta=a)
        x = torch.bmm(x, product) if is_tall else torch.bmm(product, x)
    return x


def dtype_of_products(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device is fast at that, as the iteration corrects its own errors; else float32."""
    return torch.bfloat16 if native_precision(device) == "bf16" else torch.float32


class Stacks:
    """The matrices that a step orthogonalises, those of a shape as one stack that this rank computes its share of.

    shapes : of each matrix, height and width; None for one that isn't due
    dtype : in which they are multiplied
    """

    def __init__(self, shapes: Sequence[tuple[int, int] | None], dtype: torch.dtype):
        self.shapes = shapes
        self.dtype = dtype
        self.parts: list[torch.Tensor | None] = [None] * len(shapes)
        """Of each matrix that this rank computes, its place in a stack."""
        self.factors = [0.0 if shape is None else math.sqrt(max(shape)) for shape in shapes]
        """What brings the root mean square of each orthogonalised matrix to 1."""
        self._stacks: list[tuple[Sequence[int], torch.Tensor]] = []
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.result_dtype = dtype if self._world_size == 1 else torch.float32
        """That of the results: ranks may multiply in different ones."""

        indices_of: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(shapes):
            if shape is not None:
                indices_of.setdefault(shape, []).append(index)
        matrices_before = 0  # ranks take turns over the matrices of all shapes, so that they have equally many
        for shape, indices in indices_of.items():
            own = indices[(rank - matrices_before) % self._world_size::self._world_size]
            matrices_before += len(indices)
            if own:
                stack = torch.empty(len(own), *shape, dtype=dtype)
                self._stacks.append((own, stack))
                for index, part in zip(own, stack.unbind(), strict=True):
                    self.parts[index] = part

    def orthogonalised(self) -> list[torch.Tensor | None]:
        """Return all matrices, which have a norm of 1, orthogonalised; None for one that isn't due."""
        results: list[torch.Tensor | None] = [None] * len(self.parts)
        for own, stack in self._stacks:
            for index, result in zip(own, iterate_squares(stack).unbind(), strict=True):
                results[index] = result
        is_shared = self._world_size > 1 and any(self.shapes)
        return self._shared(results) if is_shared else results

    def _shared(self, results: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return those of all ranks."""
        lengths = [0 if shape is None else math.prod(shape) for shape in self.shapes]
        flat = torch.zeros(sum(lengths), dtype=self.result_dtype)
        for place, result in zip(flat.split(lengths), results, strict=True):
            if result is not None:
                place.copy_(result.flatten())
        parts = ranks.sum_across(flat).split(lengths)
        return [part if shape is not None else None for shape, part in zip(self.shapes, parts, strict=True)]
