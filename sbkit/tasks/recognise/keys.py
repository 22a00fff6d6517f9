"""Keys of recognisers with features, front end and encoder, of their special tokens and of their search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbkit.recipe.keys import Problem, key
from sbkit.system.schema import COUNT, POSITIVE, SIZE
from sbkit.tasks.keys import RecogniserKeys

if TYPE_CHECKING:
    from torch import nn

    from sbkit.nn.chunks import Chunks

#: Keys for the encoder.
ENCODERS = ("Transformer", "encoder")
#: Keys of parts that take features.
_ON_FEATURES = ("normalize", "spec_augment", "CNN")


@dataclass(kw_only=True)
class EncoderKeys(RecogniserKeys):
    """Keys of a recogniser's parts up to its encoder, of its special tokens and of its search."""

    compute_features: nn.Module | None = key("waveforms [B, S] to features [B, T, F], such as SpeechBrain's Fbank; "
                                             "null: the encoder takes waveforms", None)
    normalize: nn.Module | None = key("the normalisation of features [B, T, F], called with relative lengths [B] "
                                      "too, such as SpeechBrain's InputNormalization", None)
    CNN: nn.Module | None = key("the front end, [B, T, F] to [B, T', ...], such as SpeechBrain's ConvolutionFrontEnd",
                                None)
    Transformer: nn.Module | None = key("the encoder (and decoder): a SpeechBrain transformer", None)
    encoder: nn.Module | None = key("the encoder, instead of Transformer: any module [B, T, F] to [B, T', D], "
                                    "called with the lengths [B] too if it takes them (relative ones, by name, for "
                                    "SpeechBrain's)", None)
    decoder: Any = key(  # or an object with their methods
        "the search for tests, a sbkit.decode.beam.BeamSearch, joint.JointSearch or "
        "transducer_beam.TransducerBeam; null: greedy", None)
    n_mels: int = key("features per frame of compute_features", 80, SIZE)
    hop_length: float = key("milliseconds between frames of compute_features", 10, POSITIVE)
    blank_index: int = key("the id of the blank", 0, COUNT)
    bos_index: int | None = key("the id of the start of a sentence", None, COUNT)
    eos_index: int | None = key("the id of the end of a sentence", None, COUNT)
    chunks: Chunks | None = key("a sbkit.nn.chunks.Chunks: the context of frames, for a model that also runs live; "
                                "null: the whole utterance", None)

    @property
    def encoder_key(self) -> str:
        """The key of the encoder."""
        return next((name for name in ENCODERS if self.class_of(name) is not type(None)), ENCODERS[0])

    @property
    def hop_samples(self) -> int:
        """Samples between two frames of features; 1 if the encoder takes waveforms."""
        return 1 if self.compute_features is None else round(self.sample_rate * self.hop_length / 1000)

    def clashes(self) -> Iterator[Problem]:
        yield from super().clashes()
        first, second = (getattr(self, name) for name in ENCODERS)
        if first is None and second is None:
            yield Problem(ENCODERS[0], "the recipe has no encoder", f"write one under {' or '.join(ENCODERS)}")
        elif first is not None and second is not None and first is not second:
            yield Problem(ENCODERS[1], f"{' and '.join(ENCODERS)} are both set, but a recogniser has one encoder",
                          f"write {ENCODERS[0]}: null, or leave {ENCODERS[1]} out")
        search = self.decoder
        if search is not None and (isinstance(search, type) or not (
                hasattr(search, "decode") and hasattr(search, "tokenizer"))):
            named = isinstance(search, type) or hasattr(search, "func")  # a partial
            given = search if isinstance(search, type) else getattr(search, "func", type(search))
            name = getattr(given, "__name__", type(given).__name__)
            yield Problem("decoder", f"it is {'only the name of' if named else 'of'} {name}; a search has a method "
                          "decode and a tokenizer",
                          "write !new: and its class, such as sbkit.decode.beam.BeamSearch (of a transducer, "
                          "transducer_beam.TransducerBeam), or null")
        for name in _ON_FEATURES if self.compute_features is None else ():
            if getattr(self, name) is not None:
                yield Problem(name, f"the encoder takes waveforms (compute_features: null), but {name} takes features",
                              f"write {name}: null")
