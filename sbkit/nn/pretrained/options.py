"""What a recipe may say of a pretrained encoder, and what its own config says where the recipe doesn't."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from sbkit.errors import SbkitError
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.spans import Spans

_DROPOUTS = ("dropout", "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout",
             "conformer_conv_dropout")


@dataclass(frozen=True)
class Options:
    """As :class:`sbkit.nn.pretrained.Encoder` takes them."""

    freeze_front: bool = True
    layers: int | None = None
    dropout: float | None = None
    mask_time_prob: float | None = None
    mask_time_length: int | None = None
    mask_feature_prob: float | None = None
    mask_feature_length: int | None = None
    whole_window: bool = False

    def config(self, kind: Any, settings: Settings) -> Any:
        """The settings as transformers' own config, without what is done here or not at all.

        No layer is left out at random: ranks would leave out others, and so would a run that is resumed.
        """
        said = {name: value for name, value in settings.config.items()
                if name not in ("dtype", "torch_dtype", "architectures")}
        said |= {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
                 "add_adapter": False, "use_intermediate_ffn_before_adapter": False}
        if self.dropout is not None:
            said |= dict.fromkeys(_DROPOUTS, self.dropout)
        try:
            return kind.from_dict(said)
        except Exception as error:  # whatever it says to its values
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SbkitError(f"{settings.source}: transformers refuses its config.json: {first}") from error

    def spans(self, settings: Settings) -> tuple[Spans, Spans]:
        """Over time and over features."""
        return (Spans.of(settings.config, "time", self.mask_time_prob, self.mask_time_length),
                Spans.of(settings.config, "feature", self.mask_feature_prob, self.mask_feature_length))

    def lowest(self, layers: nn.ModuleList) -> Iterator[nn.Module]:
        """As many layers as are asked for."""
        most = self.layers
        if most is not None and not 1 <= most <= len(layers):
            raise SbkitError(f"layers is {most}, and the encoder has {len(layers)}", hint="null takes all of them")
        return iter(layers[:most])
