"""Self-attention with its norm as one autograd function; see ``fused`` for the steps that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sbkit.nn.fast.autocast import Context, without_autocast
from sbkit.nn.fast.fused import (
    Layer,
    add_branch,
    add_branch_backward,
    as_bytes,
    is_wanted,
    make_dropout,
    normalise,
    normalise_backward,
    once_differentiable,
    product_matrix,
    thread_sums,
    weight_gradient,
)
from sbkit.nn.native import library


@dataclass(frozen=True)
class RotaryPositions:
    """Cosines and sines of each frame's angles, [T, K] in fp32, with the first sine of each pair negated."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True)
class RelativePositions:
    """What scores positions relative to a frame, as in Transformer-XL.

    embeddings : [2 T - 1, D], of the distances from T - 1 frames before a frame to T - 1 frames after it, projected
    bias_u : [D], added to queries for the scores of keys
    bias_v : [D], added to queries for the scores of positions
    """

    embeddings: Tensor
    bias_u: Tensor
    bias_v: Tensor


@dataclass(frozen=True)
class _AttentionSettings:
    """What ``attention`` is given besides tensors with gradients."""

    heads: int
    scale: float
    eps: float
    dropout: float
    rotary: RotaryPositions | None
    skip: Tensor | None
    mask: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class _AttentionSizes:
    """B utterances of T frames, and H heads of K features."""

    utterances: int
    frames: int
    heads: int
    head_size: int

    @property
    def rows(self) -> int:
        """B T."""
        return self.utterances * self.frames

    @property
    def columns(self) -> int:
        """D = H K."""
        return self.heads * self.head_size

    def of_heads(self) -> dict[str, int]:
        """Return the arguments of kernels that split rows of features into heads, or join them."""
        return {"heads": self.heads, "frames": self.frames, "rows": self.rows, "size": self.head_size}

    def of_scores(self) -> dict[str, int]:
        """Return the arguments of kernels over rows of scores [B, H, T, T]."""
        return {"heads": self.heads, "rows": self.rows * self.heads, "columns": self.frames}


class _Attention(NamedTuple):
    """The inputs of ``AttentionPart``; its backward returns their gradients in another one."""

    x: Tensor | None
    gain: Tensor | None
    shift: Tensor | None
    w1: Tensor | None
    bias_u: Tensor | None
    bias_v: Tensor | None
    positions: Tensor | None
    w2: Tensor | None
    b2: Tensor | None
    settings: _AttentionSettings | None = None


class _AttentionSaved(NamedTuple):
    """What backward needs of forward, by the names there."""

    x: Tensor
    gain: Tensor
    shift: Tensor
    mean: Tensor
    rstd: Tensor
    normed: Tensor
    w1: Tensor
    query: Tensor
    query_v: Tensor | None
    position_keys: Tensor | None
    key: Tensor
    value: Tensor
    weights: Tensor
    attended: Tensor
    w2: Tensor


def attention(x: Tensor, *, norm: Layer, in_weight: Tensor, out_layer: Layer,
              positions: RotaryPositions | RelativePositions, heads: int, scale: float, dropout: float,
              skip: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x plus self-attention of its norm: [B, T, D] to [B, T, D].

    in_weight : [3 D, D], of the queries, keys and values of one head after the other
    out_layer : the linear layer behind the heads
    scale : of the scores
    dropout : the share of the attention weights that is dropped
    skip : [B, T], True for frames that are not attended to
    mask : [T, T], True in a frame's row for frames that it does not attend to
    """
    rotary = bias_u = bias_v = embeddings = None
    if isinstance(positions, RotaryPositions):
        rotary = positions
    else:
        bias_u = positions.bias_u
        bias_v = positions.bias_v
        embeddings = positions.embeddings
    settings = _AttentionSettings(heads=heads, scale=scale, eps=norm.eps, dropout=dropout, rotary=rotary, skip=skip,
                                  mask=mask, dtype=dtype)
    return AttentionPart.apply(*_Attention(
        x=x,
        gain=norm.weight,
        shift=norm.bias,
        w1=in_weight,
        bias_u=bias_u,
        bias_v=bias_v,
        positions=embeddings,
        w2=out_layer.weight,
        b2=out_layer.bias,
        settings=settings))


class AttentionPart(torch.autograd.Function):
    """x + linear(dropout(softmax(scores)) @ values), with queries, keys and values of norm(x).

    **Forward**, for one head of one utterance of T frames, with K features a head, by the rules and names of ``fused``:

        q, k, v  = this head's columns of norm(x) @ w1.T     [T, K] each
        S        = the scores, see below                     [T, T]
        A        = softmax of the rows of S                  [T, T]     ``weights``; 0 where skip or mask is True
        o        = (m * A) @ v                               [T, K]     ``dropped`` is m * A
        attended = o of all heads, side by side              [T, D]
        y        = x + attended @ w2.T + b2                  [T, D]

    **Scores with rotary positions.** R(i) rotates pairs of features by angles that grow with the number i of a frame:

        query[i] = scale * R(i) q[i]
        key[j]   = R(j) k[j]
        S[i, j]  = query[i] . key[j]

    **Scores with relative positions.** Frame j as seen from frame i is at the distance j - i, from 1 - T to T - 1. The
    row T - 1 + j - i of ``positions`` is the embedding of this distance; r below is this head's columns, transposed:

        query   = scale * (q + bias_u)                       [T, K]
        query_v = scale * (q + bias_v)                       [T, K]
        key     = k                                          [T, K]
        r       = ``position_keys``                          [K, 2 T - 1]
        P       = query_v @ r                                [T, 2 T - 1]     ``position_scores``
        S[i, j] = query[i] . key[j] + P[i, T - 1 + j - i]

    So P has a score for each distance, and frame i needs T neighbours in row i, the first of them in column T - 1 - i.
    For T = 3, which key takes which column:

        distance    -2     -1      0      1      2
        i = 0       none   none   j = 0  j = 1  j = 2
        i = 1       none  j = 0   j = 1  j = 2  none
        i = 2      j = 0  j = 1   j = 2  none   none

    The kernel of the softmax reads them there, so the scores of positions are never written by key, as [T, T].

    **Backward.** From d_branch, which is d_y in ``dtype``, and d_o, this head's columns of d_branch @ w2:

        d_v       = (m * A).T @ d_o
        d_A       = m * (d_o @ v.T)
        d_S[i, j] = A[i, j] * (d_A[i, j] - sum over l of d_A[i, l] * A[i, l])
        d_query   = d_S @ key
        d_key     = d_S.T @ query

    The kernel ``softmax_backward`` is given d_o @ v.T and replaces it by d_S; it also writes m * A once more. With
    rotary positions, where R(-i), the inverse of R(i), is also its transpose:

        d_q[i] = scale * R(-i) d_query[i]
        d_k[j] = R(-j) d_key[j]

    With relative positions it writes d_P too. A score S[i, j] took one element of P, so that is where its gradient
    goes. Elements that no key took get 0:

        d_P[i, T - 1 + j - i] = d_S[i, j]
        d_query_v             = d_P @ r.T
        d_r                   = query_v.T @ d_P, summed over utterances
        d_q                   = scale * (d_query + d_query_v)
        d_bias_u              = scale * d_query, summed over frames and utterances
        d_bias_v              = scale * d_query_v, summed over frames and utterances

    At last ``grad_wide`` has d_q, d_k and d_v of each head side by side, and d_x is d_y plus the norm's gradient for
    d_normed = grad_wide @ w1.

    **Layout.** Heads are [B H, T, K], and scores [B H, T, T]. ``query_v`` and ``position_scores`` are [H, B T, K] and
    [H, B T, 2 T - 1], since all utterances have the same r: one product a head, and d_r sums over utterances by itself.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, bias_u: Tensor | None,
                bias_v: Tensor | None, positions: Tensor | None, w2: Tensor, b2: Tensor,
                settings: _AttentionSettings) -> Tensor:
        dtype = settings.dtype
        heads = settings.heads
        sizes = _AttentionSizes(utterances=x.shape[0], frames=x.shape[1], heads=heads, head_size=x.shape[2] // heads)
        utterances = sizes.utterances
        frames = sizes.frames
        head_size = sizes.head_size
        threads = torch.get_num_threads()
        x = x.contiguous()
        w1 = w1.to(dtype)
        w2 = w2.to(dtype)

        normed = normalise(x, gain, shift, settings.eps, dtype)
        query, key, value = normed.values.new_empty(3, utterances * heads, frames, head_size)
        query_v = position_keys = position_scores = None
        if positions is None:
            assert settings.rotary is not None, "without relative positions there are rotary ones"
            library.call(
                "heads_forward", dtype,
                x=normed.values @ w1.t(),
                cosines=settings.rotary.cosines,
                sines=settings.rotary.sines,
                scale=settings.scale,
                query=query,
                key=key,
                value=value,
                **sizes.of_heads(),
                threads=threads,
            )
        else:
            query_v = normed.values.new_empty(heads, sizes.rows, head_size)
            library.call(
                "relative_forward", dtype,
                x=normed.values @ w1.t(),
                bias_u=bias_u,
                bias_v=bias_v,
                scale=settings.scale,
                query=query,
                query_v=query_v,
                key=key,
                value=value,
                **sizes.of_heads(),
                threads=threads,
            )
            position_keys = positions.to(dtype).view(-1, heads, head_size).permute(1, 2, 0).contiguous()
            position_scores = query_v @ position_keys  # [H, B T, 2 T - 1]

        weights = query @ key.transpose(1, 2)  # scores, until the kernel replaces them by their softmax
        dropped = torch.empty_like(weights)
        ctx.drop = make_dropout(weights.numel(), settings.dropout)
        library.call(
            "softmax_forward", dtype,
            scores=weights,
            position_scores=position_scores,
            skip=as_bytes(settings.skip),
            pairs=as_bytes(settings.mask),
            dropout=ctx.drop,
            out=dropped,
            **sizes.of_scores(),
            threads=threads,
        )

        attended = product_matrix(x, sizes.rows, sizes.columns, dtype)
        by_head = (dropped @ value).view(utterances, heads, frames, head_size)
        attended[:sizes.rows].view(utterances, frames, heads, head_size).copy_(by_head.transpose(1, 2))
        out = add_branch(x, branch=attended @ w2.t(), bias=b2)
        ctx.settings = settings
        ctx.sizes = sizes
        ctx.save_for_backward(*_AttentionSaved(
            x=x, gain=gain, shift=shift, mean=normed.mean, rstd=normed.rstd, normed=normed.values, w1=w1, query=query,
            query_v=query_v, position_keys=position_keys, key=key, value=value, weights=weights, attended=attended,
            w2=w2))
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> _Attention:
        saved = _AttentionSaved(*ctx.saved_tensors)
        sizes: _AttentionSizes = ctx.sizes
        settings: _AttentionSettings = ctx.settings
        dtype = settings.dtype
        threads = torch.get_num_threads()
        grad = grad.contiguous()
        grad_branch, grad_b2 = add_branch_backward(grad, dtype)

        by_frame = (grad_branch @ saved.w2)[:sizes.rows]  # those beyond are the matrix' rows of 0
        by_frame = by_frame.view(sizes.utterances, sizes.frames, sizes.heads, sizes.head_size)
        grad_attended = by_frame.transpose(1, 2).reshape(-1, sizes.frames, sizes.head_size)
        grad_scores = grad_attended @ saved.value.transpose(1, 2)  # of m * A, until the kernel replaces it
        dropped = torch.empty_like(saved.weights)
        grad_position_scores = None
        if saved.query_v is not None:
            grad_position_scores = saved.query_v.new_empty(sizes.heads, sizes.rows, 2 * sizes.frames - 1)
        library.call(
            "softmax_backward", dtype,
            grad=grad_scores,
            weights=saved.weights,
            dropout=ctx.drop,
            out=dropped,
            position_scores=grad_position_scores,
            **sizes.of_scores(),
            threads=threads,
        )

        grad_query = grad_scores @ saved.key
        grad_key = grad_scores.transpose(1, 2) @ saved.query
        grad_value = dropped.transpose(1, 2) @ grad_attended
        grad_wide = product_matrix(grad, sizes.rows, 3 * sizes.columns, dtype)
        grad_bias_u = grad_bias_v = grad_positions = None
        if grad_position_scores is None:
            assert settings.rotary is not None, "without relative positions there are rotary ones"
            library.call(
                "heads_backward", dtype,
                query=grad_query,
                key=grad_key,
                value=grad_value,
                cosines=settings.rotary.cosines,
                sines=settings.rotary.sines,
                scale=settings.scale,
                to=grad_wide,
                **sizes.of_heads(),
                threads=threads,
            )
        else:
            assert saved.query_v is not None and saved.position_keys is not None
            bias_sums = thread_sums(grad, 2 * sizes.columns)
            library.call(
                "relative_backward", dtype,
                query=grad_query,
                query_v=grad_position_scores @ saved.position_keys.transpose(1, 2),
                key=grad_key,
                value=grad_value,
                scale=settings.scale,
                to=grad_wide,
                sums=bias_sums,
                **sizes.of_heads(),
                threads=len(bias_sums),
            )
            grad_bias_u, grad_bias_v = bias_sums[0].view(2, sizes.columns)
            grad_position_keys = saved.query_v.transpose(1, 2) @ grad_position_scores  # [H, K, 2 T - 1]
            grad_positions = grad_position_keys.permute(2, 0, 1).flatten(1)

        of_norm = normalise_backward(
            grad_wide @ saved.w1,
            x=saved.x,
            gain=saved.gain,
            shift=saved.shift,
            mean=saved.mean,
            rstd=saved.rstd,
            add=grad,
        )
        return _Attention(
            x=of_norm.x,
            gain=of_norm.gain,
            shift=of_norm.shift,
            w1=weight_gradient(grad_wide, saved.normed, is_wanted(ctx, _Attention._fields, "w1")),
            bias_u=grad_bias_u,
            bias_v=grad_bias_v,
            positions=grad_positions,
            w2=weight_gradient(grad_branch, saved.attended, is_wanted(ctx, _Attention._fields, "w2")),
            b2=grad_b2)
