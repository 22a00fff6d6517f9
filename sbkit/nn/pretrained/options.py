"""Options of a pretrained encoder in a recipe, and how they override its own config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from sbkit.errors import SbkitError, first_line
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.spans import MaskSpans

if TYPE_CHECKING:
    from transformers import PretrainedConfig

C = TypeVar("C", bound="PretrainedConfig")

_DROPOUTS = ("dropout", "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout",
             "conformer_conv_dropout")
_LEFT_OUT = ("dtype", "torch_dtype", "architectures", "attn_implementation", "_attn_implementation")


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

    def config(self, kind: type[C], settings: Settings) -> C:
        """Make transformers' config from the settings, with dropout from these options.

        Masking is turned off, since sbkit does it. Layer drop is turned off, since ranks and resumed runs
        would drop different layers. Attention is torch's own, which takes a mask of booleans; transformers' other kinds
        would add it to the scores.
        """
        values = {name: value for name, value in settings.config.items()
                  if name not in _LEFT_OUT}
        values |= {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
                   "add_adapter": False, "use_intermediate_ffn_before_adapter": False}
        if self.dropout is not None:
            values |= dict.fromkeys(_DROPOUTS, self.dropout)
        try:
            return kind.from_dict(values)
        except Exception as error:  # of any kind: its checks differ by family
            raise SbkitError(f"{settings.source}: transformers refuses its config.json: {first_line(error)}",
                             hint="is the file complete and unchanged?") from error

    def defining(self, kind: type[PretrainedConfig], settings: Settings, names: Sequence[str]) -> dict[str, Any]:
        """Return what the settings say under these names of a config, or what the config's class says without them."""
        config = self.config(kind, settings).to_dict()
        return {name: list(config[name]) if isinstance(config[name], tuple) else config[name] for name in names
                if name in config}

    def spans(self, settings: Settings) -> tuple[MaskSpans, MaskSpans]:
        """Return how much to mask over time and over features."""
        return (MaskSpans.of(settings.config, "time", self.mask_time_prob, self.mask_time_length),
                MaskSpans.of(settings.config, "feature", self.mask_feature_prob, self.mask_feature_length))

    def lowest(self, layers: nn.ModuleList) -> Iterator[nn.Module]:
        """Return the lowest layers, as many as ``layers`` says."""
        count = self.layers
        if count is not None and not 1 <= count <= len(layers):
            raise SbkitError(f"layers is {count}, but the encoder has {len(layers)}",
                             hint=f"use 1 to {len(layers)}, or null for all")
        return iter(layers[:count])
