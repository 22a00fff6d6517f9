"""Keys that the codec task reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbkit.recipe.choices import COUNT, Range
from sbkit.recipe.keys import Problem, key
from sbkit.tasks.keys import TaskKeys

if TYPE_CHECKING:
    from sbkit.nn.codec import CodecDecoder, CodecEncoder, Discriminators, LogMel, Quantiser, SpectralLoss, WaveHead


@dataclass(kw_only=True)
class CodecKeys(TaskKeys):
    """Keys of the codec's parts and of its loss."""

    compute_features: LogMel = key("waveforms [B, S] and sample counts [B] to features and code frames, a "
                                   "sbkit.nn.codec.LogMel")
    encoder: CodecEncoder = key("features to a vector for each code frame, a sbkit.nn.codec.CodecEncoder")
    quantiser: Quantiser = key("those vectors to codes and back, a sbkit.nn.codec.FiniteScalars or ResidualVectors")
    decoder: CodecDecoder = key("quantised vectors to states, a sbkit.nn.codec.CodecDecoder")
    head: WaveHead = key("states to waveforms, a sbkit.nn.codec.WaveHead")
    spectral_loss: SpectralLoss = key("the distance of two waveforms, a sbkit.nn.codec.SpectralLoss")
    discriminators: Discriminators | None = key("networks that the codec is trained against, a "
                                                "sbkit.nn.codec.Discriminators", None)
    adversarial_from: int = key("the step from which it is trained against them; 0: never", 0, COUNT)
    adversarial_weight: float = key("weight of passing for a recording, beside the spectral loss", 1.0, Range(0))
    feature_weight: float = key("weight of how far the discriminators' states are from a recording's", 2.0, Range(0))
    quantiser_weight: float = key("weight of the penalty of ResidualVectors; FiniteScalars has none", 1.0, Range(0))
    recogniser: str | None = key("a bundle of a recogniser: tests give its words for what the codec makes", None)

    def clashes(self) -> Iterator[Problem]:
        there = self.discriminators is not None and len(self.discriminators) > 0
        if self.adversarial_from and not there:
            yield Problem("adversarial_from", f"it is {self.adversarial_from}, but there are no discriminators",
                          "write `discriminators: !new:sbkit.nn.codec.Discriminators` with `adversarial_from: !ref "
                          "<adversarial_from>` below it, and have it in the model, or adversarial_from: 0")
        if there and not self.adversarial_from:
            yield Problem("adversarial_from", "it is 0, so nothing would train the discriminators",
                          "write `adversarial_from: !ref <adversarial_from>` under discriminators: then it has none")
