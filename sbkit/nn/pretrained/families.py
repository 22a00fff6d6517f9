"""The supported models of transformers, by the ``model_type`` in their config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sbkit.errors import SbkitError, first_line
from sbkit.nn.pretrained.feed_forward import lighten
from sbkit.nn.pretrained.options import Options
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


def build(settings: Settings, options: Options) -> Network:
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
