"""wav2vec 2.0 (with XLS-R and MMS) and HuBERT: convolutions over waveforms, then a transformer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.hubert.configuration_hubert import HubertConfig
from transformers.models.hubert.modeling_hubert import HubertModel
from transformers.models.wav2vec2.configuration_wav2vec2 import Wav2Vec2Config
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Model

from sbkit.nn.lengths import N, lengths_to_mask
from sbkit.nn.pretrained.options import EncoderOptions
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.spans import mask
from sbkit.nn.pretrained.waveforms import Strides, at_least, convolved, normalized

#: What of the configs of these families, and of WavLM's, decides what the weights mean.
_DEFINING = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "feat_extract_norm",
             "do_stable_layer_norm", "hidden_act", "feat_extract_activation", "conv_dim", "conv_kernel", "conv_stride",
             "conv_bias", "num_conv_pos_embeddings", "num_conv_pos_embedding_groups", "layer_norm_eps",
             "adapter_attn_dim", "conv_pos_batch_norm", "feat_proj_layer_norm", "num_buckets", "max_bucket_distance")


class Wav2Vec2(nn.Module):
    """wav2vec 2.0: waveforms [B, S] and sample counts [B] to states [B, T, D], a frame every 20 ms.

    An utterance's states do not depend on its batch. Models whose first layer normalises over time
    (``feat_extract_norm: group``) were pretrained without an attention mask, on clips of equal length. Here
    normalisation and attention use an utterance's own frames, so the result is what such a model gives for it alone.
    """

    prefixes: tuple[str, ...] = ("wav2vec2.",)
    reinitialised: tuple[str, ...] = ("masked_spec_embed",)
    Config: Any = Wav2Vec2Config  # subclasses have their own family's, which does not derive from it
    Model: Any = Wav2Vec2Model  # likewise

    def __init__(self, settings: Settings, options: EncoderOptions):
        super().__init__()
        config = options.config(self.Config, settings)
        model = self.Model(config)
        self.feature_extractor, self.feature_projection = model.feature_extractor, model.feature_projection
        self.encoder = model.encoder
        self.encoder.layers = nn.ModuleList(options.lowest(self.encoder.layers))
        self.strides = Strides(config.conv_kernel, config.conv_stride)
        self.width: int = config.hidden_size
        self.normalizes = _normalizes(settings, config.feat_extract_norm)
        """Whether waveforms are made equally loud."""
        self.norm_first: bool = config.do_stable_layer_norm
        self.time, self.feature = options.spans(settings)
        if self.time.share:
            self.masked_spec_embed = nn.Parameter(torch.empty(self.width).uniform_())
        self.freezes_front = options.freeze_front
        if options.freeze_front:
            self.feature_extractor.requires_grad_(False)

    @classmethod
    def definition(cls, settings: Settings) -> dict[str, Any]:
        """Return what of the settings decides what the weights mean."""
        said = EncoderOptions().defining(cls.Config, settings, _DEFINING)
        return {**said, "do_normalize": _normalizes(settings, said["feat_extract_norm"])}

    @property
    def front(self) -> list[nn.Parameter]:
        """The parameters of the convolutions."""
        return list(self.feature_extractor.parameters())

    @property
    def stack(self) -> nn.ModuleList:
        """The layers of the transformer, lowest first."""
        return self.encoder.layers

    def frames(self, samples: N) -> N:
        """Return the number of states for a number of samples."""
        return self.strides(samples)

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        signals = at_least(signals, self.strides.least)
        if self.normalizes:
            signals = normalized(signals, samples)
        counts = self.strides.counts(samples)
        frozen = self.freezes_front and torch.is_grad_enabled()
        with torch.no_grad() if frozen else contextlib.nullcontext():
            states = convolved(self.feature_extractor.conv_layers, signals, counts)
        states = self.feature_projection(states)
        states = states[0] if isinstance(states, tuple) else states
        if self.training:
            states = mask(states, counts[-1], self.time, self.feature, getattr(self, "masked_spec_embed", None))
        return self.transform(states, lengths_to_mask(counts[-1], states.shape[1]))

    def transform(self, states: Tensor, inside: Tensor) -> Tensor:
        """Run the transformer; ``inside`` [B, T] is True for existing frames."""
        encoder = self.encoder
        states = states.masked_fill(~inside[..., None], 0.0)
        states = states + positions(encoder.pos_conv_embed, states, inside)
        states = encoder.dropout(states if self.norm_first else encoder.layer_norm(states))
        states = self.attend(states, inside)
        return encoder.layer_norm(states) if self.norm_first else states

    def attend(self, states: Tensor, inside: Tensor) -> Tensor:
        """Run all layers of the transformer."""
        for layer in self.encoder.layers:
            states = layer(states, attention_mask=inside[:, None, None])
        return states


def _normalizes(settings: Settings, norm: str) -> bool:
    return bool(settings.preprocessor.get("do_normalize", norm == "layer"))


class Hubert(Wav2Vec2):
    """HuBERT: the architecture of wav2vec 2.0, pretrained with another task."""

    prefixes = ("hubert.",)
    Config, Model = HubertConfig, HubertModel


def positions(embed: Any, states: Tensor, inside: Tensor) -> Tensor:  # ``embed``: each family has a class for it
    """Compute convolutional position embeddings of states [B, T, D]; the states' padding must be zero."""
    states = states.transpose(1, 2)
    norm = getattr(embed, "batch_norm", None)
    if norm is not None:  # always with pretraining's statistics: a batch's would include padding
        states = functional.batch_norm(states, norm.running_mean, norm.running_var, norm.weight, norm.bias,
                                       eps=norm.eps)
        states = states.masked_fill(~inside[:, None], 0.0)
    return embed.activation(embed.padding(embed.conv(states))).transpose(1, 2)
