"""SpeechBrain's ECAPA-TDNN and x-vector, with embeddings that don't depend on the batch, and that can be exported.

The layers, their parameters and checkpoint keys are SpeechBrain's, and so are the outputs for a single recording. In a
batch each convolution mirrors an utterance at its own end, where SpeechBrain's see padding, and statistics are of its
own frames. The noise of 1e-5 that SpeechBrain's x-vector adds to means is left out.
"""

from __future__ import annotations

import torch
from speechbrain.lobes.models import ECAPA_TDNN as lobes
from speechbrain.lobes.models.Xvector import Xvector
from speechbrain.nnet.CNN import Conv1d
from torch import Tensor, nn

from sbkit.nn.lengths import lengths_to_mask

_FLOOR = 1e-12  # of a variance
_EPSILON = 1e-5  # that SpeechBrain's x-vector adds to deviations


class ECAPA(lobes.ECAPA_TDNN):
    """ECAPA-TDNN: features [B, T, F] and frame counts [B] to an embedding of each utterance, [B, D].

    input_size : features of a frame
    output_size : D
    channels : of each layer; the last has three times as many
    attention_channels, se_channels : of the attentive pooling, and of squeeze-and-excitation
    res2net_scale : number of groups of a layer's channels
    dropout : of channels
    """

    def __init__(self, input_size: int, output_size: int = 192, channels: int = 512, attention_channels: int = 128,
                 se_channels: int = 128, res2net_scale: int = 8, dropout: float = 0.0):
        super().__init__(input_size, lin_neurons=output_size, channels=[channels] * 4 + [3 * channels],
                         attention_channels=attention_channels, se_channels=se_channels, res2net_scale=res2net_scale,
                         dropout=dropout)

    def forward(self, feats: Tensor, frames: Tensor) -> Tensor:
        mask = lengths_to_mask(frames, feats.shape[1])[:, None]
        first, *layers = self.blocks
        x = _block(first, feats.transpose(1, 2), frames)
        states = []
        for layer in layers:  # each: Res2Net, then squeeze-and-excitation
            residual = x if layer.shortcut is None else layer.shortcut(x)
            group, *parts = _block(layer.tdnn1, x, frames).chunk(layer.res2net_block.scale, 1)
            groups = [group]
            for number, (block, part) in enumerate(zip(layer.res2net_block.blocks, parts, strict=True)):
                groups.append(_block(block, part + groups[-1] if number else part, frames))
            x = _block(layer.tdnn2, torch.cat(groups, 1), frames)
            squeeze = layer.se_block
            mean = (x * mask).sum(2, keepdim=True) / mask.sum(2, keepdim=True)
            x = squeeze.sigmoid(squeeze.conv2(squeeze.relu(squeeze.conv1(mean)))) * x + residual
            states.append(x)
        # Attention-weighted means and deviations of channels: [B, C, T] -> [B, 2 C, 1].
        x = _block(self.mfa, torch.cat(states, 1), frames)
        pooling = self.asp
        with_context = x
        if pooling.global_context:
            whole = torch.cat(_statistics(x, mask / mask.sum(2, keepdim=True)), 1)
            with_context = torch.cat([x, whole[..., None].expand(-1, -1, x.shape[2])], 1)
        scores = pooling.conv(pooling.tanh(pooling.tdnn(with_context)))
        weights = scores.float().masked_fill(~mask, -torch.inf).softmax(2)
        return self.fc(self.asp_bn(torch.cat(_statistics(x, weights), 1)[..., None]))[..., 0]


class XVector(Xvector):
    """The x-vector: features [B, T, F] and frame counts [B] to an embedding of each utterance, [B, D].

    input_size : features of a frame
    output_size : D
    channels : of each layer; the last has three times as many
    """

    def __init__(self, input_size: int, output_size: int = 512, channels: int = 512):
        super().__init__(in_channels=input_size, tdnn_channels=[channels] * 4 + [3 * channels],
                         lin_neurons=output_size)

    def forward(self, feats: Tensor, frames: Tensor) -> Tensor:
        x = feats.transpose(1, 2)
        *layers, _, last = self.blocks
        for layer in layers:
            x = _convolved(layer, x, frames) if isinstance(layer, Conv1d) else getattr(layer, "norm", layer)(x)
        mask = lengths_to_mask(frames, x.shape[2])[:, None]
        count = frames[:, None].float()
        mean, deviation = _statistics(x, mask / count[..., None])
        unbiased = deviation * (count / (count - 1).clamp(min=1)).sqrt()
        return last(torch.cat([mean, unbiased + _EPSILON], 1))


def _block(block: lobes.TDNNBlock, x: Tensor, frames: Tensor) -> Tensor:
    """Run a TDNN block on [B, C, T]."""
    return block.dropout(block.norm(block.activation(_convolved(block.conv, x, frames))))


def _convolved(conv: Conv1d, x: Tensor, frames: Tensor) -> Tensor:
    """Convolve [B, C, T] with each utterance mirrored at its own ends, as SpeechBrain does for a single one."""
    inner: nn.Conv1d = conv.conv
    reach = inner.dilation[0] * (inner.kernel_size[0] - 1) // 2
    if not reach:
        return inner(x)
    behind = torch.arange(reach, device=x.device)
    ends = frames[:, None]
    mirror = torch.cat([torch.minimum(reach - behind, ends - 1), (ends - 2 - behind).clamp(min=0)], 1)
    before, after = x.gather(2, mirror[:, None].expand(-1, x.shape[1], -1)).split(reach, 2)
    place = (ends + reach + behind)[:, None].expand(-1, x.shape[1], -1)
    return inner(torch.cat([before, x, after], 2).scatter(2, place, after))


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute weighted means and deviations of [B, C, T] in fp32, [B, C] each; weights of frames add up to 1."""
    x = x.float()
    mean = (x * weights).sum(2)
    return mean, ((x - mean[..., None]).square() * weights).sum(2).clamp(min=_FLOOR).sqrt()
