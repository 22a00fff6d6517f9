"""The supported models of transformers, by the ``model_type`` in their config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sbkit.errors import SbkitError, first_line
from sbkit.nn.pretrained.options import EncoderOptions
from sbkit.nn.pretrained.source import Settings

if TYPE_CHECKING:
    from sbkit.nn.pretrained.w2v_bert import W2vBert
    from sbkit.nn.pretrained.wav2vec2 import Wav2Vec2
    from sbkit.nn.pretrained.whisper import Whisper

    Network = Wav2Vec2 | W2vBert | Whisper


def _wav2vec2() -> type[Wav2Vec2]:
    from sbkit.nn.pretrained.wav2vec2 import Wav2Vec2

    return Wav2Vec2


def _hubert() -> type[Wav2Vec2]:
    from sbkit.nn.pretrained.wav2vec2 import Hubert

    return Hubert


def _wavlm() -> type[Wav2Vec2]:
    from sbkit.nn.pretrained.wavlm import WavLM

    return WavLM


def _w2v_bert() -> type[W2vBert]:
    from sbkit.nn.pretrained.w2v_bert import W2vBert

    return W2vBert


def _whisper() -> type[Whisper]:
    from sbkit.nn.pretrained.whisper import Whisper

    return Whisper


#: Functions, since importing a family's part of transformers takes seconds.
FAMILIES: dict[str, Callable[[], type[Network]]] = {"wav2vec2": _wav2vec2, "hubert": _hubert, "wavlm": _wavlm,
                                                    "wav2vec2-bert": _w2v_bert, "whisper": _whisper}


def build(settings: Settings, options: EncoderOptions) -> Network:
    """Build the encoder that the settings describe, with random weights."""
    family = _family(settings)
    try:
        network = family(settings, options)
    except SbkitError:
        raise
    except Exception as error:  # transformers checks some values of a config only when it builds the layers
        raise SbkitError(f"{settings.source}: its config.json describes no encoder: {first_line(error)}",
                         hint="fetch it again, or take an encoder that transformers can build") from error
    lighten(network)
    return network


def differences(here: Settings, there: Settings) -> list[str]:
    """Compare what decides what the weights of two encoders mean; returns ``name: value there, value here``.

    What only training uses, such as dropout, and what belongs to a head decides nothing.
    """
    kinds = [{"model_type": each.config.get("model_type"), **_family(each).definition(each)} for each in (here, there)]
    own, other = kinds
    return [f"{name}: {other[name]} there, {value} here" for name, value in own.items()
            if name in other and other[name] != value]


def _family(settings: Settings) -> type[Network]:
    kind = settings.config.get("model_type")
    if kind not in FAMILIES:
        problem = f"is of an unknown kind ({kind})" if kind else "has no model_type in its config.json"
        raise SbkitError(f"the encoder's source {settings.source} {problem}",
                         hint=f"sbkit knows {', '.join(FAMILIES)}; XLS-R and MMS are wav2vec2")
    try:
        return FAMILIES[kind]()
    except ImportError as error:
        raise SbkitError(f"a pretrained encoder needs transformers ({error})",
                         hint="pip install 'sbkit[ssl]'") from error


class Theirs(Protocol):
    """The parts that transformers' feed-forward modules have, whatever their family."""

    intermediate_dense: nn.Module
    intermediate_act_fn: nn.Module
    intermediate_dropout: nn.Module
    output_dense: nn.Module
    output_dropout: nn.Module


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, whose result is computed again in backward.

    It is four times as wide as the model, so it would be a quarter of what a layer keeps. Names and results are those
    of the module that it takes the place of.
    """

    def __init__(self, theirs: Theirs):
        super().__init__()
        self.intermediate_dense, self.intermediate_act_fn = theirs.intermediate_dense, theirs.intermediate_act_fn
        self.intermediate_dropout = theirs.intermediate_dropout
        self.output_dense, self.output_dropout = theirs.output_dense, theirs.output_dropout

    def forward(self, states: Tensor) -> Tensor:
        """States [B, T, D] to [B, T, D]."""
        wide = self.intermediate_dense(states)
        if not (self.training and torch.is_grad_enabled() and self._would_keep()):
            return self.output_dropout(self._narrowed(wide))
        random = getattr(self.intermediate_dropout, "p", 1.0) > 0
        out = checkpoint(self._narrowed, wide, use_reentrant=False, preserve_rng_state=random)
        return self.output_dropout(cast(Tensor, out))

    def _would_keep(self) -> bool:
        """Whether the second layer would keep its input (it trains), and nothing in it is random (no adapters)."""
        return type(self.output_dense) is nn.Linear and self.output_dense.weight.requires_grad

    def _narrowed(self, wide: Tensor) -> Tensor:
        out: Tensor = self.output_dense(self.intermediate_dropout(self.intermediate_act_fn(wide)))
        return out


def lighten(network: nn.Module) -> None:
    """Put a :class:`FeedForward` in the place of each of transformers' own."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, FeedForward) and all(hasattr(child, part) for part in Theirs.__annotations__):
                setattr(module, name, FeedForward(cast(Theirs, child)))
