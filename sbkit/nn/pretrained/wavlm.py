"""WavLM: wav2vec 2.0 with a gated bias by distance in its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.wavlm.configuration_wavlm import WavLMConfig
from transformers.models.wavlm.modeling_wavlm import WavLMAttention, WavLMModel

from sbkit.nn.pretrained.options import EncoderOptions
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.wav2vec2 import Wav2Vec2


class GatedAttention(WavLMAttention):
    """Attention with torch's fused kernels and a gated bias by distance; returns no attention weights."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None,
                index: int = 0, **rest: Any) -> Any:  # the original's type has another bias than it returns
        """States [B, T, D] to the same, with the bias by distance [H, T, T], which is shared by all layers."""
        states, heads = hidden_states, (self.num_heads, self.head_dim)
        if position_bias is None:
            position_bias = self.compute_bias(states.shape[1], states.shape[1])
        gates = self.gru_rel_pos_linear(states.unflatten(-1, heads).transpose(1, 2))
        one, other = torch.sigmoid(gates.unflatten(-1, (2, 4)).sum(-1)).chunk(2, dim=-1)
        gate = one * (other * self.gru_rel_pos_const - 1.0) + 2.0
        query, key, value = (layer(states).unflatten(-1, heads).transpose(1, 2)
                             for layer in (self.q_proj, self.k_proj, self.v_proj))
        bias = (gate * position_bias).to(query.dtype)
        if attention_mask is not None:
            bias = bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias,
                                                      dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None, position_bias


class WavLM(Wav2Vec2):
    """WavLM: waveforms [B, S] and sample counts [B] to states [B, T, D]."""

    prefixes = ("wavlm.",)
    Config, Model = WavLMConfig, WavLMModel

    def __init__(self, settings: Settings, options: EncoderOptions):
        super().__init__(settings, options)
        for layer in self.encoder.layers:
            layer.attention.__class__ = GatedAttention

    def attend(self, states: Tensor, inside: Tensor) -> Tensor:
        bias = None
        for layer in self.encoder.layers:
            states, bias = layer(states, attention_mask=inside[:, None, None], position_bias=bias)
        return states
