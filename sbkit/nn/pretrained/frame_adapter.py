"""The layers that some models have between transformer and head (``add_adapter``), each of which takes frames together.

In a batch transformers' own would convolve over what is behind an utterance. Here that is zeros, as it is for an
utterance alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.nn.lengths import N, lengths_to_mask


class FrameAdapter(nn.Module):
    """States [B, T, D] of a transformer and frame counts [B] to states [B, T', D'].

    Arguments
    ---------
    original : transformers' own, whose parts keep their names: of wav2vec 2.0 and WavLM, or of w2v-BERT
    """

    def __init__(self, original: Any):  # each family has a class for it
        super().__init__()
        self.proj, self.proj_layer_norm, self.layers = original.proj, original.proj_layer_norm, original.layers
        if any(_shorter(_convolution(layer), 1) < 1 for layer in self.layers):
            raise SbkitError("the layers between encoder and head (add_adapter) take more frames at once than a short "
                             "utterance has", hint="take a model whose adapter_kernel_size is 3, as it usually is")

    def frames(self, count: N) -> N:
        """Return the number of states that it makes of a number of frames."""
        for layer in self.layers:
            count = _shorter(_convolution(layer), count)
        return count

    def forward(self, states: Tensor, counts: Tensor) -> Tensor:
        """[B, T, D], [B] -> [B, T', D']."""
        if self.proj is not None:
            states = self.proj_layer_norm(self.proj(states))
        for layer in self.layers:
            conv = _convolution(layer)
            if hasattr(layer, "conv"):
                states, counts = _gated(conv, states, counts), _shorter(conv, counts)
                continue
            residual = _gated(conv, layer.residual_layer_norm(states), counts)
            states = _gated(layer.self_attn_conv, layer.self_attn_layer_norm(states), counts)
            counts = _shorter(conv, counts)
            inside = lengths_to_mask(counts, states.shape[1])[:, None, None]
            states = residual + layer.self_attn_dropout(layer.self_attn(states, attention_mask=inside)[0])
            states = states + layer.ffn(layer.ffn_layer_norm(states))
        return states


def _convolution(layer: Any) -> nn.Conv1d:  # as above
    return layer.conv if hasattr(layer, "conv") else layer.residual_conv


def _shorter(conv: nn.Conv1d, count: N) -> N:
    return (count + 2 * int(conv.padding[0]) - conv.kernel_size[0]) // conv.stride[0] + 1


def _gated(conv: nn.Conv1d, states: Tensor, counts: Tensor) -> Tensor:
    """Convolve an utterance's own states, and gate the result."""
    states = states.masked_fill(~lengths_to_mask(counts, states.shape[1])[..., None], 0.0)
    return functional.glu(conv(states.transpose(1, 2)), dim=1).transpose(1, 2)
