"""The networks of pretrained encoders: modules made by transformers' public auto classes, with our own forward.

Transformers' own forward normalises over padding, so that an utterance depends on its batch, and syncs with the host to
ask whether a mask is full. The names of the modules are those of the published weights. A test over all families checks
that their calls are the same in all versions that setup.cfg allows.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError, first_line, shown
from sbkit.nn.kaldi import FilterBank
from sbkit.nn.lengths import N, centred, lengths_to_mask
from sbkit.nn.pretrained.source import Settings


@dataclass(frozen=True)
class MaskSpans:
    """How much of an axis to mask.

    share : share of the axis to mask; less is masked if spans overlap
    length : length of a span
    min_spans : smallest number of spans, if the axis is long enough
    """

    share: float
    length: int
    min_spans: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], axis: str, share: float | None, length: int | None) -> MaskSpans:
        """Use a recipe's values for an axis (``time`` or ``feature``), or the encoder's config if they are None."""
        if share is None:
            share = config.get(f"mask_{axis}_prob", 0.0) if config.get("apply_spec_augment", True) else 0.0
        length = config.get(f"mask_{axis}_length", 10) if length is None else length
        if not 0 <= share <= 1:
            raise SbkitError("bad-value", f"mask_{axis}_prob is {share}, and must be a number from 0 to 1",
                             key=f"mask_{axis}_prob", value=share)
        if length < 1:
            raise SbkitError("bad-value", f"mask_{axis}_length is {length}, and must be at least 1",
                             key=f"mask_{axis}_length", value=length)
        return cls(float(share), int(length), int(config.get(f"mask_{axis}_min_masks", 0)))

    def draw(self, counts: Tensor, size: int) -> Tensor:
        """Draw a mask [B, size], True in spans, for axes with ``counts`` [B] valid positions.

        It uses torch's generator of the device of ``counts``, without a host sync. Axes shorter than a span get none.
        """
        batch = len(counts)
        spans = (self.share * counts / self.length + torch.rand(batch, device=counts.device)).long()
        last = counts - self.length  # last position where a span may start
        spans = spans.clamp(min=self.min_spans).minimum((last + 1).clamp(min=0))
        max_spans = min(size, max(self.min_spans, int(self.share * size / self.length) + 1))
        drawn = torch.rand(batch, size, device=counts.device)
        drawn = drawn.masked_fill(torch.arange(size, device=counts.device) > last[:, None], -1.0)
        starts = drawn.topk(max_spans, dim=1).indices
        used = torch.arange(max_spans, device=counts.device) < spans[:, None]
        begins = torch.zeros(batch, size, device=counts.device).scatter(1, starts, used.float())
        return functional.max_pool1d(functional.pad(begins, (self.length - 1, 0))[:, None], self.length, 1)[:, 0] > 0


def mask(states: Tensor, counts: Tensor, time: MaskSpans, feature: MaskSpans, fill: Tensor | None = None) -> Tensor:
    """Mask spans of time and of features in states [B, T, F] with ``counts`` [B] valid frames.

    fill : [F], the value of masked frames; None: zeros. Masked features become zero
    """
    if time.share:
        hidden = time.draw(counts, states.shape[1])[..., None]
        states = torch.where(hidden, torch.zeros_like(states[0, 0]) if fill is None else fill.to(states.dtype), states)
    if feature.share:
        width = torch.full_like(counts, states.shape[2])
        states = states.masked_fill(feature.draw(width, states.shape[2])[:, None], 0.0)
    return states


_DROPOUTS = ("dropout", "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout",
             "conformer_conv_dropout", "dropout_positions")
_WIDTH, _COUNT, _REACH, _FACTOR = (1, 1 << 14), (1, 256), (1, 1 << 16), (0.0, 100.0)
_ACTIVATIONS = {"gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2",
                "silu", "swish", "tanh", "sigmoid", "mish", "leaky_relu"}
#: What of a config.json reaches transformers: the keys that define the function of the weights, and the values that
#: each may have: numbers from and to, texts, or a list of them. It may be a stranger's, so all else is left out.
_DEFINING: dict[str, Any] = {
    "hidden_size": _WIDTH, "num_hidden_layers": _COUNT, "num_attention_heads": _COUNT, "intermediate_size": _REACH,
    "feat_extract_norm": {"group", "layer"}, "do_stable_layer_norm": bool, "hidden_act": _ACTIVATIONS,
    "feat_extract_activation": _ACTIVATIONS, "conv_dim": [_WIDTH], "conv_kernel": [_COUNT], "conv_stride": [(1, 64)],
    "conv_bias": bool, "num_conv_pos_embeddings": (1, 1024), "num_conv_pos_embedding_groups": (1, 1024),
    "layer_norm_eps": (0.0, 1.0), "adapter_attn_dim": _WIDTH, "conv_pos_batch_norm": bool, "feat_proj_layer_norm": bool,
    "num_buckets": (2, 1 << 14), "max_bucket_distance": _REACH, "feature_projection_input_dim": _WIDTH,
    "position_embeddings_type": {"relative_key", "relative", "rotary"}, "left_max_position_embeddings": _REACH,
    "right_max_position_embeddings": (0, 1 << 16), "conv_depthwise_kernel_size": (1, 1024), "d_model": _WIDTH,
    "encoder_layers": _COUNT, "encoder_attention_heads": _COUNT, "encoder_ffn_dim": _REACH,
    "activation_function": _ACTIVATIONS, "num_mel_bins": (1, 1024), "max_source_positions": _REACH,
    "scale_embedding": bool, "conv_kernel_size": (1, 1024), "subsampling_factor": (1, 64),
    "subsampling_conv_channels": _WIDTH, "subsampling_conv_kernel_size": (1, 64), "subsampling_conv_stride": (1, 16),
    "scale_input": bool, "attention_bias": bool, "convolution_bias": bool, "feed_forward_residual_weights": [_FACTOR],
    "conv_residual_weights": [_FACTOR], "rope_parameters": {"rope_theta": (1.0, 1e9), "rope_type": {"default"}}}
#: The others that do: of training, of the layers above the transformer, or a limit.
ENCODER_VALUES: dict[str, Any] = {
    **_DEFINING, **dict.fromkeys(_DROPOUTS, (0.0, 1.0)), "add_adapter": bool,
    "use_intermediate_ffn_before_adapter": bool, "adapter_kernel_size": (1, 64), "adapter_stride": (1, 16),
    "num_adapter_layers": (1, 32), "output_hidden_size": _WIDTH, "adapter_act": _ACTIVATIONS,
    "max_position_embeddings": (1, 1 << 24), "num_key_value_heads": _COUNT}
_LONGEST = 32  # values in a list
_MAX_NUMBERS, _MAX_UNKNOWN = 1 << 32, 1 << 24  # in a model, and in tensors that its weights lack
_RATE = 16_000
_BANDS, _STACKED = 80, 2  # of w2v-BERT's features
_EPSILON = 1e-7  # of transformers' feature extractors
_KALDI = 2.0 ** 15  # Kaldi's samples are 16-bit integers


@dataclass(frozen=True)
class EncoderOptions:
    """The options of :class:`sbkit.nn.pretrained.Encoder`, as documented there."""

    freeze_front: bool = True
    layers: int | None = None
    dropout: float | None = None
    mask_time_prob: float | None = None
    mask_time_length: int | None = None
    mask_feature_prob: float | None = None
    mask_feature_length: int | None = None
    whole_window: bool = False
    add_adapter: bool = False


class Network(nn.Module, ABC):
    """Waveforms [B, S] and sample counts [B] to states [B, T, D], a frame every 20 ms; base of all families."""

    auto, inside = "AutoModel", ""
    """Transformers' class that makes its layers, and the prefix of their names in it."""
    prefixes: tuple[str, ...] = ()
    """Possible prefixes of its tensors' names in a larger model."""
    reinitialised: tuple[str, ...] = ("masked_spec_embed",)
    """Tensors that only training uses, which a source may lack."""
    front: tuple[str, ...] = ()
    """The names of the modules of the convolutional front end."""
    normalizes = False
    """Whether the loudness of inputs is normalised."""
    longest_seconds: float | None = None
    """The seconds of the longest utterance that it takes; None: there is no limit."""

    def __init__(self, settings: Settings, options: EncoderOptions, config: Any):  # each family has a class for it
        super().__init__()
        self.width: int = config.hidden_size
        self.time = MaskSpans.of(settings.config, "time", options.mask_time_prob, options.mask_time_length)
        self.feature = MaskSpans.of(settings.config, "feature", options.mask_feature_prob, options.mask_feature_length)
        self.freezes_front = options.freeze_front
        self.adapter: FrameAdapter | None = None
        """The layers above the transformer."""

    @property
    def stack(self) -> nn.ModuleList:
        """The layers of the transformer, lowest first."""
        holder: Any = getattr(self, "encoder", self)  # of a class of transformers
        return holder.layers

    def add_mask_and_adapter(self, model: Any, config: Any) -> None:  # each family has classes for both
        """Add the value of masked frames, if there are any, and the layers above the transformer, if the config has
        them."""
        if self.time.share:
            self.masked_spec_embed = nn.Parameter(torch.empty(self.width).uniform_())
        if getattr(model, "adapter", None) is not None:
            self.adapter, self.width = FrameAdapter(model.adapter), config.output_hidden_size

    def masked(self, states: Tensor, counts: Tensor) -> Tensor:
        if not self.training:
            return states
        return mask(states, counts, self.time, self.feature, getattr(self, "masked_spec_embed", None))

    def front_context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context without gradients if the convolutional front end is frozen."""
        return torch.no_grad() if self.freezes_front and torch.is_grad_enabled() else contextlib.nullcontext()

    @abstractmethod
    def frames(self, samples: N) -> N:
        """Return the number of states for a number of samples; at least 1."""


class Wav2Vec2(Network):
    """wav2vec 2.0 (with XLS-R and MMS), HuBERT and WavLM: convolutions over waveforms, then a transformer.

    Models whose first layer normalises over time (``feat_extract_norm: group``) were pretrained without an attention
    mask, on clips of equal length. Here normalisation and attention only use an utterance's own frames, so the result
    is the same as for the utterance alone.
    """

    prefixes, front = ("wav2vec2.", "hubert.", "wavlm."), ("feature_extractor",)

    def __init__(self, settings: Settings, options: EncoderOptions, config: Any):  # as in Network
        super().__init__(settings, options, config)
        self.strides = list(zip(config.conv_kernel, config.conv_stride, strict=True))
        self.min_samples = 1
        """The smallest number of samples with a state."""
        for kernel, stride in reversed(self.strides):
            self.min_samples = (self.min_samples - 1) * stride + kernel
        frame = max(self.min_samples, math.prod(config.conv_stride))
        if frame > _RATE:
            raise SbkitError("unsupported-pretrained", f"{settings.source}: its config.json has conv_kernel and "
                             f"conv_stride that make a frame of {frame / _RATE:,.0f} seconds", value=settings.source,
                             hint="download it again, or take another model")
        model = make(self.auto, config)
        self.feature_extractor, self.feature_projection = model.feature_extractor, model.feature_projection
        self.encoder = model.encoder
        self.encoder.layers = lowest(self.encoder.layers, options.layers)
        self.normalizes = bool(settings.preprocessor.get("do_normalize", config.feat_extract_norm == "layer"))
        self.norm_first: bool = config.do_stable_layer_norm
        self.add_mask_and_adapter(model, config)

    def frames(self, samples: N) -> N:
        count = self._counts(samples)[-1]
        return count if self.adapter is None else self.adapter.frames(count)

    def _counts(self, samples: N) -> list[N]:
        """Return the number of frames after each convolution."""
        count = at_least(samples, self.min_samples)
        counts = []
        for kernel, stride in self.strides:
            count = (count - kernel) // stride + 1
            counts.append(count)
        return counts

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        signals = padded(signals, self.min_samples)
        if self.normalizes:
            signals = normalized(signals, samples)
        counts = self._counts(samples)
        with self.front_context():
            states = _convolved(self.feature_extractor.conv_layers, signals, counts)
        states = self.feature_projection(states)
        states = self.masked(states[0] if isinstance(states, tuple) else states, counts[-1])
        inside = lengths_to_mask(counts[-1], states.shape[1])
        states = states.masked_fill(~inside[..., None], 0.0)
        encoder = self.encoder
        embed = encoder.pos_conv_embed
        positions = states.transpose(1, 2)
        norm = getattr(embed, "batch_norm", None)
        if norm is not None:
            # Always with pretraining's statistics: a batch's would include padding.
            positions = functional.batch_norm(positions, norm.running_mean, norm.running_var, norm.weight, norm.bias,
                                              eps=norm.eps)
            positions = positions.masked_fill(~inside[:, None], 0.0)
        if positions.is_cuda:  # cuDNN runs each group separately, in bf16 three times as slow as in fp32 (on an H200)
            with torch.autocast("cuda", enabled=False):
                positions = embed.conv(positions.float()).to(positions.dtype)
        else:
            positions = embed.conv(positions)
        states = states + embed.activation(embed.padding(positions)).transpose(1, 2)
        states = encoder.dropout(states if self.norm_first else encoder.layer_norm(states))
        arguments: dict[str, Tensor] = {}
        for layer in self.stack:
            states = layer(states, attention_mask=inside[:, None, None], **arguments)
            if isinstance(states, tuple):  # WavLM's layers pass on a bias by distance
                states, position_bias, *_ = states
                arguments = {"position_bias": position_bias}
        states = encoder.layer_norm(states) if self.norm_first else states
        return states if self.adapter is None else self.adapter(states, counts[-1])


class W2vBert(Network):
    """w2v-BERT 2.0: a Conformer over pairs of frames of Kaldi's features.

    Features are normalised over an utterance's own frames, which removes its loudness. Convolutions are causal, so they
    never reach the padding after it.
    """

    prefixes = ("wav2vec2_bert.",)
    normalizes = True

    def __init__(self, settings: Settings, options: EncoderOptions, config: Any):  # as in Network
        super().__init__(settings, options, config)
        if config.position_embeddings_type != "relative_key" or config.feature_projection_input_dim != \
                _BANDS * _STACKED:
            raise SbkitError("unsupported-pretrained", value=settings.source, message=
                             f"{settings.source} is another w2v-BERT than 2.0 (position_embeddings_type "
                             f"{config.position_embeddings_type}, {config.feature_projection_input_dim} features)",
                             hint="use facebook/w2v-bert-2.0 or a model trained from it")
        model = make(self.auto, config)
        self.features = FilterBank(n_mels=_BANDS, scale=_KALDI)
        self.feature_projection, self.encoder = model.feature_projection, model.encoder
        self.encoder.layers = lowest(self.encoder.layers, options.layers)
        self.min_samples = self.features.size + (_STACKED - 1) * self.features.hop
        """The smallest number of samples with a state."""
        self.add_mask_and_adapter(model, config)
        self.intermediate_ffn = model.intermediate_ffn

    def frames(self, samples: N) -> N:
        count = self.features.frames(at_least(samples, self.min_samples)) // _STACKED
        return count if self.adapter is None else self.adapter.frames(count)

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        states, counts = self.normalized_features(signals, samples)
        states = self.masked(self.feature_projection(states)[0], counts)
        inside = lengths_to_mask(counts, states.shape[1])
        states = self.encoder.dropout(states.masked_fill(~inside[..., None], 0.0))
        for layer in self.stack:
            states = layer(states, attention_mask=inside[:, None, None], conv_attention_mask=inside)
        if self.intermediate_ffn is not None:
            states = states + 0.5 * self.intermediate_ffn(states)
        return states if self.adapter is None else self.adapter(states, counts)

    def normalized_features(self, signals: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Waveforms [B, S] and sample counts [B] to normalised features [B, T, 160] and frame counts [B]."""
        signals = padded(signals, self.min_samples)
        hop = self.features.hop
        states = (signals.shape[1] - self.min_samples) // (_STACKED * hop) + 1
        # An odd last frame has no state, but is part of an utterance's mean and variance.
        feats = self.features(functional.pad(signals, (0, hop)), count=states * _STACKED + 1)
        count = self.features.frames(samples.clamp(min=self.min_samples))[:, None, None]
        inside = lengths_to_mask(count[:, 0, 0], feats.shape[1])[..., None]
        feats, squares = centred(feats, inside, count, 1)
        feats = (feats * torch.rsqrt(squares / (count - 1) + _EPSILON)).masked_fill(~inside, 0.0)
        return feats[:, :states * _STACKED].unflatten(1, (states, _STACKED)).flatten(2), count[:, 0, 0] // _STACKED


class FrameAdapter(nn.Module):
    """States [B, T, D] of a transformer and frame counts [B] to subsampled states [B, T', D'], by the layers that some
    models have between transformer and head (``add_adapter``).

    In a batch transformers' own would convolve over an utterance's padding. Here that is zero, as for an utterance
    alone.

    original : transformers' own, whose parts keep their names: of wav2vec 2.0 and WavLM, or of w2v-BERT
    """

    def __init__(self, original: Any):  # each family has a class for it
        super().__init__()
        self.proj, self.proj_layer_norm, self.layers = original.proj, original.proj_layer_norm, original.layers
        if any(shorter(_convolution(layer), 1) < 1 for layer in self.layers):
            raise SbkitError("unsupported-pretrained",
                             "the layers between encoder and head (add_adapter) take more frames "
                             "at once than a short utterance has",
                             hint="take a model whose adapter_kernel_size is 3, as it usually is")

    def frames(self, count: N) -> N:
        """Return the number of states for a number of frames."""
        for layer in self.layers:
            count = shorter(_convolution(layer), count)
        return count

    def forward(self, states: Tensor, counts: Tensor) -> Tensor:
        """[B, T, D], [B] -> [B, T', D']."""
        if self.proj is not None:
            states = self.proj_layer_norm(self.proj(states))
        for layer in self.layers:
            conv = _convolution(layer)
            if hasattr(layer, "conv"):
                states, counts = _gated(conv, states, counts), shorter(conv, counts)
                continue
            residual = _gated(conv, layer.residual_layer_norm(states), counts)
            states = _gated(layer.self_attn_conv, layer.self_attn_layer_norm(states), counts)
            counts = shorter(conv, counts)
            inside = lengths_to_mask(counts, states.shape[1])[:, None, None]
            states = residual + layer.self_attn_dropout(layer.self_attn(states, attention_mask=inside)[0])
            states = states + layer.ffn(layer.ffn_layer_norm(states))
        return states


def _convolution(layer: Any) -> nn.Conv1d:  # as above
    return layer.conv if hasattr(layer, "conv") else layer.residual_conv


def shorter(conv: nn.Conv1d | nn.Conv2d, count: N) -> N:
    """Return the number of frames after a strided convolution."""
    return (count + 2 * int(conv.padding[0]) - conv.kernel_size[0]) // conv.stride[0] + 1


def _gated(conv: nn.Conv1d, states: Tensor, counts: Tensor) -> Tensor:
    """Convolve states with padding set to zero, and apply a gated linear unit."""
    states = states.masked_fill(~lengths_to_mask(counts, states.shape[1])[..., None], 0.0)
    return functional.glu(conv(states.transpose(1, 2)), dim=1).transpose(1, 2)


def make(auto: str, config: Any) -> Any:  # each family has classes for both
    """Make a model with random weights by one of transformers' auto classes."""
    import transformers

    return getattr(transformers, auto).from_config(config)


def differences(here: Settings, there: Settings) -> list[str]:
    """Compare the definitions of two encoders; returns ``name: value there, value here``.

    Values that only affect training, such as dropout, or the head are not compared.
    """
    values_here = _defining_values(here)
    values_there = _defining_values(there)
    return [f"{name}: {values_there[name]} there, {value} here" for name, value in values_here.items()
            if name in values_there and values_there[name] != value]


def _defining_values(settings: Settings) -> dict[str, Any]:
    """Return the values of an encoder's config that define the function of its weights."""
    config = make_config(settings, EncoderOptions()).to_dict()
    values = {name: config[name] for name in ("model_type", *_DEFINING) if name in config}
    if "feat_extract_norm" in values:
        default = values["feat_extract_norm"] == "layer"
        values["do_normalize"] = bool(settings.preprocessor.get("do_normalize", default))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def make_config(settings: Settings, options: EncoderOptions) -> Any:  # each family has a class for it
    """Make transformers' config from the settings, with dropout from the options.

    Masking is turned off, since sbkit does it. Layer drop is turned off, since ranks and resumed runs would drop
    different layers. Attention is torch's own, which takes a boolean mask; transformers' other kinds would add it to
    the scores.
    """
    kind = settings.config.get("model_type")
    kinds = ("wav2vec2", "hubert", "wavlm", "wav2vec2-bert", "whisper", "parakeet_encoder", "lasr_encoder")
    if kind not in kinds:
        problem = f"is of an unknown kind ({shown(kind)})" if kind else "has no model_type in its config.json"
        raise SbkitError("unsupported-pretrained", f"the pretrained source {settings.source} {problem}",
                         value=settings.source, hint=f"sbkit knows {', '.join(kinds)}; XLS-R and MMS are wav2vec2")
    if settings.sample_rate != _RATE:
        raise SbkitError("unsupported-pretrained", f"the pretrained source {settings.source} takes "
                         f"{settings.sample_rate:,} samples per second, but these families take {_RATE:,}",
                         value=settings.source, hint="take a model that was trained at that rate")
    try:
        import transformers
    except ImportError as error:
        raise SbkitError("missing-package", f"a pretrained encoder needs transformers ({error})",
                         hint="pip install 'sbkit[ssl]'") from error
    where = f"the config.json of {settings.source}"
    values = {"model_type": kind, **plain_values(settings.config, ENCODER_VALUES, where)}
    values |= {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
               **({} if options.add_adapter else {"add_adapter": False, "use_intermediate_ffn_before_adapter": False})}
    if options.dropout is not None:
        values |= dict.fromkeys(_DROPOUTS, options.dropout)
    try:
        return transformers.AutoConfig.for_model(**values)
    except Exception as error:  # of any kind: its checks differ by family
        raise SbkitError("damaged-pretrained", f"{settings.source}: transformers refuses its config.json: "
                         f"{first_line(error)}", value=settings.source,
                         hint="is the file complete and unchanged?") from error


def plain_values(content: Mapping[str, Any], ranges: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a stranger's JSON that may reach transformers; raises if one of them is out of its range.

    ranges : the keys that may, as in ``ENCODER_VALUES``
    where : the file, for the error
    """
    values = {name: value for name, value in content.items() if name in ranges and value is not None}
    for name, value in values.items():
        if not _fits(value, ranges[name]):
            raise SbkitError("damaged-pretrained",
                             f"{where} has {name}: {shown(value)}, which no model that sbkit knows "
                             "has", key=name, value=value, hint="download it again, or take another model")
    return values


def _fits(value: object, what: Any) -> bool:  # as in _DEFINING
    if isinstance(what, dict):
        return isinstance(value, dict) and value.keys() <= what.keys() and \
            all(_fits(item, what[name]) for name, item in value.items())
    if isinstance(what, list):
        return isinstance(value, (list, tuple)) and len(value) <= _LONGEST and \
            all(_fits(item, what[0]) for item in value)
    if isinstance(what, set):
        return isinstance(value, str) and value in what
    if isinstance(what, type):
        return isinstance(value, what)
    low, high = what
    return type(value) in (int, type(low)) and low <= value <= high


def check_size(kind: type[Network], config: Any, source: str,  # each family has a class for it
               shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    """Raise if a config describes a larger model than its weights, before that takes memory.

    shapes : of the weights, by their names in the encoder; None: unknown
    """
    with torch.device("meta"):
        model = make(kind.auto, config)
    described = {name.removeprefix(kind.inside): tuple(value.shape) for name, value in model.state_dict().items()}
    unlike = {name: math.prod(shape) for name, shape in described.items()
              if shapes is None or shapes.get(name) != shape}
    if sum(unlike.values()) > (_MAX_NUMBERS if shapes is None else _MAX_UNKNOWN):
        name = max(unlike, key=unlike.__getitem__)
        raise SbkitError("pretrained-mismatch", value=source, message=
                         f"{source}: its config.json describes {sum(unlike.values()):,} numbers"
                         f"{'' if shapes is None else ' that its weights lack'}, such as {name}: "
                         f"{list(described[name])}",
                         hint="are its config.json and its weights of the same model?")


def lowest(layers: nn.ModuleList, count: int | None) -> nn.ModuleList:
    """Return the lowest layers."""
    if count is not None and not 1 <= count <= len(layers):
        raise SbkitError("bad-value",
                         f"layers is {count}, but the encoder has {len(layers)}", key="layers", value=count,
                         hint=f"use 1 to {len(layers)}, or null for all")
    return layers[:count]


# ------------------------------------------------- operations on each utterance's own samples and frames


def at_least(samples: N, smallest: int) -> N:
    return samples.clamp(min=smallest) if isinstance(samples, Tensor) else max(samples, smallest)


def padded(signals: Tensor, size: int) -> Tensor:
    """Pad waveforms [B, S] with zeros to at least ``size`` samples."""
    return functional.pad(signals, (0, size - signals.shape[1])) if signals.shape[1] < size else signals


def normalized(signals: Tensor, samples: Tensor) -> Tensor:
    """Normalise waveforms [B, S] to mean 0 and variance 1 over their own samples [B]; padding becomes zero."""
    inside = lengths_to_mask(samples, signals.shape[1])
    count = samples.clamp(min=1)[:, None]
    signals, squares = centred(signals.float(), inside, count, 1)
    return (signals * torch.rsqrt(squares / count + _EPSILON)).masked_fill(~inside, 0.0)


def _convolved(layers: Iterable[Any], signals: Tensor, counts: Sequence[Tensor]) -> Tensor:
    """Run waveforms [B, S] through convolutions, whose frame counts [B] are ``counts``: [B, T, C]."""
    states = signals[:, None]
    for layer, frames in zip(layers, counts, strict=True):
        states = layer.conv(states)
        norm = getattr(layer, "layer_norm", None)
        if isinstance(norm, nn.GroupNorm):  # one channel a group, here over each utterance's own frames
            count = frames[:, None, None]
            states, squares = centred(states.float(), lengths_to_mask(frames, states.shape[2])[:, None], count, 2)
            states = states * (torch.rsqrt(squares / count + norm.eps) * norm.weight[:, None]) + norm.bias[:, None]
        elif norm is not None:
            states = norm(states.transpose(1, 2)).transpose(1, 2)
        states = layer.activation(states)
    return states.transpose(1, 2)
