"""Keys that the codec task reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbkit.recipe.keys import Problem, key
from sbkit.system.schema import COUNT, NOT_NEGATIVE
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
    discriminators: Discriminators | None = key("networks for adversarial training, a "
                                                "sbkit.nn.codec.Discriminators", None)
    adversarial_from: int = key("the first step with adversarial training; 0: never", 0, COUNT)
    adversarial_weight: float = key("weight of the adversarial loss, relative to the spectral loss", 1.0, NOT_NEGATIVE)
    feature_weight: float = key("weight of the feature matching loss between discriminator states", 2.0, NOT_NEGATIVE)
    quantiser_weight: float = key("weight of ResidualVectors' own loss; FiniteScalars has none", 1.0, NOT_NEGATIVE)
    recogniser: str | None = key("a recogniser's bundle, for the WER of decoded audio in tests", None)

    def clashes(self) -> Iterator[Problem]:
        yield from super().clashes()
        there = self.discriminators is not None and len(self.discriminators) > 0
        if self.adversarial_from and not there:
            yield Problem("adversarial_from", f"it is {self.adversarial_from}, but there are no discriminators",
                          "write `discriminators: !new:sbkit.nn.codec.Discriminators` with `adversarial_from: !ref "
                          "<adversarial_from>` below it, and add it to the model, or adversarial_from: 0")
        if there and not self.adversarial_from:
            yield Problem("adversarial_from", "it is 0, so nothing would train the discriminators",
                          "write `adversarial_from: !ref <adversarial_from>` under discriminators, which then has none")
