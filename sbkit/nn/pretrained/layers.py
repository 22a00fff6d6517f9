"""Layers of pretrained encoders that are faster than transformers' own, need less memory, or can have adapters."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def replace_layers(network: nn.Module) -> None:
    """Replace transformers' layers by these; they are recognised by the names of their submodules.

    The new layers have the submodules of the old ones under the same names.
    """
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            for layer in (FeedForward, GatedAttention, RelativeAttention):
                if not isinstance(child, layer) and all(hasattr(child, part) for part in layer.parts):
                    setattr(module, name, layer(child))


class _Replacement(nn.Module):
    """A layer with the submodules of another one."""

    parts: tuple[str, ...] = ()

    def __init__(self, original: nn.Module):
        super().__init__()
        for name, part in original.named_children():
            self.add_module(name, part)
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def __getattr__(self, name: str) -> Any:  # the parts are of classes that aren't public
        return super().__getattr__(name)


class FeedForward(_Replacement):
    """Two linear layers with an activation between them, whose output is recomputed in backward.

    It is four times as wide as the model, so it would be a quarter of the memory kept by a layer.
    """

    parts = ("intermediate_dense", "intermediate_act_fn", "intermediate_dropout", "output_dense", "output_dropout")

    def forward(self, states: Tensor) -> Tensor:
        """States [B, T, D] to [B, T, D]."""
        wide = self.intermediate_dense(states)
        # The second layer would keep its input if it trains; with adapters it is another class, and has randomness.
        keeps = type(self.output_dense) is nn.Linear and self.output_dense.weight.requires_grad
        if not (self.training and torch.is_grad_enabled() and keeps):
            return cast(Tensor, self.output_dropout(self._narrowed(wide)))
        random = getattr(self.intermediate_dropout, "p", 1.0) > 0
        out = checkpoint(self._narrowed, wide, use_reentrant=False, preserve_rng_state=random)
        return cast(Tensor, self.output_dropout(out))

    def _narrowed(self, wide: Tensor) -> Tensor:
        return cast(Tensor, self.output_dense(self.intermediate_dropout(self.intermediate_act_fn(wide))))


class GatedAttention(_Replacement):
    """WavLM's attention, with a gated bias by distance, that calls its linear layers.

    Transformers' own passes their weights to a function of torch, which ignores adapters.
    """

    parts = ("q_proj", "k_proj", "v_proj", "out_proj", "gru_rel_pos_linear", "gru_rel_pos_const", "max_distance")

    def __init__(self, original: Any):  # a class of transformers' that isn't public
        super().__init__(original)
        self.heads = (original.num_heads, original.head_dim)
        self.dropout: float = original.dropout
        self.buckets, self.max_distance = original.num_buckets // 2, original.max_distance

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor | None = None,
                **rest: object) -> tuple[Tensor, None, Tensor]:
        """States [B, T, D] to the same, with the bias by distance [H, T, T], which is shared by all layers."""
        states = hidden_states
        if position_bias is None:  # half of the buckets have one distance each, the others grow
            time = torch.arange(states.shape[1], device=states.device)
            exact = self.buckets // 2
            distance = time[None, :] - time[:, None]
            far = distance.abs()
            wide = exact + (torch.log(far.float() / exact) / math.log(self.max_distance / exact)
                            * (self.buckets - exact)).long()
            bucket = torch.where(far < exact, far, wide.clamp(max=self.buckets - 1)) + (distance > 0) * self.buckets
            position_bias = cast(Tensor, self.rel_attn_embed(bucket)).permute(2, 0, 1)
        gates = self.gru_rel_pos_linear(states.unflatten(-1, self.heads).transpose(1, 2))
        update, reset = torch.sigmoid(gates.unflatten(-1, (2, 4)).sum(-1)).chunk(2, dim=-1)
        gate = update * (reset * self.gru_rel_pos_const - 1.0) + 2.0
        query, key, value = (layer(states).unflatten(-1, self.heads).transpose(1, 2)
                             for layer in (self.q_proj, self.k_proj, self.v_proj))
        bias = (gate * position_bias).to(query.dtype)
        bias = bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias,
                                                      dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None, position_bias


class RelativeAttention(_Replacement):
    """w2v-BERT's attention, whose bias by distance, if it has one, is computed once per query and distance.

    Forward and backward in bf16 on a CPU take 0.57 of transformers' time (2 clips of 10 s, 768 wide); in fp32, with
    clips of 16 s, they take 0.9 of it, and 96 MiB are kept for backward instead of 257.
    """

    parts = ("linear_q", "linear_k", "linear_v", "linear_out")

    def __init__(self, original: Any):  # a class of transformers' that isn't public
        super().__init__(original)
        self.heads = (original.num_heads, original.head_size)
        self.left: int | None = getattr(original, "left_max_position_embeddings", None)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **rest: object) -> tuple[Tensor, None]:
        """States [B, T, D] to the same; ``attention_mask`` [B, 1, 1, T] is True for existing frames."""
        query, key, value = (layer(hidden_states).unflatten(-1, self.heads).transpose(1, 2)
                             for layer in (self.linear_q, self.linear_k, self.linear_v))
        scale = self.heads[1] ** -0.5
        bias = attention_mask
        if self.left is not None:
            scores = torch.matmul(query, self.distance_embedding.weight.to(query.dtype).t()) * scale
            bias = by_distance(scores, self.left).masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale,
                                                      dropout_p=self.dropout.p if self.training else 0.0)
        return self.linear_out(out.transpose(1, 2).flatten(2)), None


def by_distance(scores: Tensor, left: int) -> Tensor:
    """Turn scores of queries for distances from -left on, [B, H, T, N], into scores for keys: [B, H, T, T].

    Keys that are farther away get the score of the farthest distance on their side.
    """
    size = scores.shape[2]
    if torch.compiler.is_exporting():  # the code below can't be exported, but its gradient is deterministic
        time = torch.arange(size, device=scores.device)
        index = (time[None, :] - time[:, None]).clamp(-left, scores.shape[3] - 1 - left) + left
        return scores.gather(3, index.expand(*scores.shape[:2], size, size))
    shape = (*scores.shape[:3], size)
    whole = torch.cat([scores[..., :1].expand(shape), scores, scores[..., -1:].expand(shape)], dim=3)
    near = whole[..., left + 1:left + 2 * size]  # from -(T - 1) to T - 1
    shifted = functional.pad(near, (1, 0)).flatten(2).unflatten(2, (2 * size, size))[:, :, 1:]
    return shifted.flatten(2).unflatten(2, (size, 2 * size - 1))[..., :size]
