"""w2v-BERT 2.0: a Conformer over pairs of frames of Kaldi's features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.wav2vec2_bert.configuration_wav2vec2_bert import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertModel, Wav2Vec2BertSelfAttention

from sbkit.errors import SbkitError
from sbkit.nn.kaldi import FilterBank
from sbkit.nn.lengths import N, lengths_to_mask
from sbkit.nn.pretrained.options import EncoderOptions
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.spans import mask
from sbkit.nn.pretrained.waveforms import at_least

_BANDS, _STACKED = 80, 2
_EPSILON = 1e-7  # of transformers' feature extractor
_KALDI = 2.0 ** 15  # Kaldi's samples are 16-bit integers


class RelativeAttention(Wav2Vec2BertSelfAttention):
    """Attention with torch's fused kernels and a bias by distance, which is computed once per query and distance."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None,
                relative_position_embeddings: Tensor | None = None, **rest: Any) -> tuple[Tensor, None]:
        """States [B, T, D] to the same; ``attention_mask`` [B, 1, 1, T] is True for existing frames."""
        states, heads = hidden_states, (self.num_heads, self.head_size)
        query, key, value = (layer(states).unflatten(-1, heads).transpose(1, 2)
                             for layer in (self.linear_q, self.linear_k, self.linear_v))
        scores = torch.matmul(query, self.distance_embedding.weight.to(query.dtype).t()) * self.scaling
        bias = by_distance(scores, self.left_max_position_embeddings)
        if attention_mask is not None:
            bias = bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scaling,
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

_DEFINING = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
             "feature_projection_input_dim", "position_embeddings_type", "left_max_position_embeddings",
             "right_max_position_embeddings", "conv_depthwise_kernel_size", "layer_norm_eps")


class W2vBert(nn.Module):
    """w2v-BERT 2.0: waveforms [B, S] and sample counts [B] to states [B, T, D], a frame every 20 ms.

    An utterance's states do not depend on its batch: features are normalised over its own frames, and convolutions are
    causal, so they never reach the padding after it.
    """

    prefixes: tuple[str, ...] = ("wav2vec2_bert.",)
    reinitialised: tuple[str, ...] = ("masked_spec_embed",)
    normalizes = True  # subtracting the mean of log energies removes the loudness

    def __init__(self, settings: Settings, options: EncoderOptions):
        super().__init__()
        config = options.config(Wav2Vec2BertConfig, settings)
        if config.position_embeddings_type != "relative_key" or config.feature_projection_input_dim != \
                _BANDS * _STACKED:
            raise SbkitError(f"{settings.source} is another w2v-BERT than 2.0 (position_embeddings_type "
                             f"{config.position_embeddings_type}, {config.feature_projection_input_dim} features)",
                             hint="use facebook/w2v-bert-2.0 or a model trained from it")
        model = Wav2Vec2BertModel(config)
        self.features = FilterBank(n_mels=_BANDS, scale=_KALDI)
        self.feature_projection, self.encoder = model.feature_projection, model.encoder
        self.encoder.layers = nn.ModuleList(options.lowest(self.encoder.layers))
        for layer in self.encoder.layers:
            layer.self_attn.__class__ = RelativeAttention
        self.least = self.features.size + (_STACKED - 1) * self.features.hop
        """The smallest number of samples that makes a state."""
        self.width: int = config.hidden_size
        self.time, self.feature = options.spans(settings)
        if self.time.share:
            self.masked_spec_embed = nn.Parameter(torch.empty(self.width).uniform_())

    @classmethod
    def definition(cls, settings: Settings) -> dict[str, Any]:
        """Return what of the settings decides what the weights mean."""
        return EncoderOptions().defining(Wav2Vec2BertConfig, settings, _DEFINING)

    @property
    def front(self) -> list[nn.Parameter]:
        """The parameters of convolutions in front, of which there are none."""
        return []

    @property
    def stack(self) -> nn.ModuleList:
        """The layers of the transformer, lowest first."""
        return self.encoder.layers

    def frames(self, samples: N) -> N:
        """Return the number of states for a number of samples."""
        samples = samples.clamp(min=self.least) if isinstance(samples, Tensor) else max(samples, self.least)
        return self.features.frames(samples) // _STACKED

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        states, counts = self.hear(signals, samples)
        states = self.feature_projection(states)[0]
        if self.training:
            states = mask(states, counts, self.time, self.feature, getattr(self, "masked_spec_embed", None))
        inside = lengths_to_mask(counts, states.shape[1])
        states = self.encoder.dropout(states.masked_fill(~inside[..., None], 0.0))
        for layer in self.encoder.layers:
            states = layer(states, attention_mask=inside[:, None, None], conv_attention_mask=inside)
        return states

    def hear(self, signals: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Waveforms [B, S] and sample counts [B] to normalised features [B, T, 160] and frame counts [B]."""
        signals, hop = at_least(signals, self.least), self.features.hop
        states = (signals.shape[1] - self.least) // (_STACKED * hop) + 1
        # An odd last frame gives no state, but counts in an utterance's mean and variance.
        feats = self.features(functional.pad(signals, (0, hop)), count=states * _STACKED + 1)
        count = self.features.frames(samples.clamp(min=self.least))[:, None, None]
        inside = lengths_to_mask(count[:, 0, 0], feats.shape[1])[..., None]
        centred = feats - feats.masked_fill(~inside, 0.0).sum(1, keepdim=True) / count
        variance = centred.masked_fill(~inside, 0.0).square().sum(1, keepdim=True) / (count - 1)
        feats = (centred * torch.rsqrt(variance + _EPSILON)).masked_fill(~inside, 0.0)
        return feats[:, :states * _STACKED].unflatten(1, (states, _STACKED)).flatten(2), count[:, 0, 0] // _STACKED
