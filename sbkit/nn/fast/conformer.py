"""The Conformer's layer, its convolution module and SpeechBrain's feed-forward layer in fewer passes."""

from __future__ import annotations

from typing import Any

import torch
from speechbrain.lobes.models.transformer import Conformer
from speechbrain.nnet import attention
from torch import Tensor
from torch.nn import functional


class ConvolutionModule(Conformer.ConvolutionModule):
    """[B, T, D] to [B, T, D]; padding frames are zero before the depthwise convolution.

    The original zeroes them behind it, so what a batch is padded with leaks into the last frames of
    its shorter utterances. Here each utterance comes out as the original gives it alone.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None, dynchunktrain_config: Any = None) -> Tensor:
        if dynchunktrain_config is not None:
            return super().forward(x, mask, dynchunktrain_config)
        pointwise = self.bottleneck[0]
        out = functional.linear(self.layer_norm(x), pointwise.weight.squeeze(-1), pointwise.bias)
        out = functional.glu(out, dim=-1)
        if mask is not None:
            out = out.masked_fill(mask, 0.0)
        out = self._depthwise(out)
        out = self.after_conv(out)
        return out if mask is None else out.masked_fill(mask, 0.0)

    def _depthwise(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            # oneDNN knows depthwise kernels for images whose channels are last: a third of the time.
            conv = self.conv
            out = functional.conv2d(x.transpose(1, 2)[..., None], conv.weight[..., None], conv.bias, 1,
                                    (*conv.padding, 0), (*conv.dilation, 1), conv.groups)[..., 0]
        else:
            out = self.conv(x.transpose(1, 2))
        return (out[..., : -self.padding] if self.causal else out).transpose(1, 2)


class ConformerEncoderLayer(Conformer.ConformerEncoderLayer):
    """[B, T, D] to [B, T, D]; halving and adding are one pass."""

    def forward(
        self, x: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        pos_embs: Tensor | None = None, dynchunktrain_config: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        mask = None if src_key_padding_mask is None else src_key_padding_mask.unsqueeze(-1)
        x = torch.add(x, self.ffn_module1(x), alpha=0.5)
        normed = self.norm1(x)
        attended, weights = self.mha_layer(normed, normed, normed, attn_mask=src_mask,
                                           key_padding_mask=src_key_padding_mask, pos_embs=pos_embs)
        x = attended + x
        x = x + self.convolution_module(x, mask, dynchunktrain_config=dynchunktrain_config)
        return self.norm2(torch.add(x, self.ffn_module2(x), alpha=0.5)), weights


class PositionalwiseFeedForward(attention.PositionalwiseFeedForward):
    """[B, T, D] to [B, T, D], in place: the original permutes to [T, B, D] and back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)
