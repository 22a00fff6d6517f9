"""The Conformer's convolution module and SpeechBrain's feed-forward layer without their transposes."""

from __future__ import annotations

from typing import Any

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
        out = self.conv(x.transpose(1, 2))
        return (out[..., : -self.padding] if self.causal else out).transpose(1, 2)


class PositionalwiseFeedForward(attention.PositionalwiseFeedForward):
    """[B, T, D] to [B, T, D], in place: the original permutes to [T, B, D] and back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)
