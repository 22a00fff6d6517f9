"""Keys that the task of speakers reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbkit.recipe.choices import NAMES, POSITIVE, SIZE
from sbkit.recipe.keys import key
from sbkit.tasks.keys import TaskKeys

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(kw_only=True)
class SpeakerKeys(TaskKeys):
    """Keys of the model, of its loss and of the trials that it is tested on."""

    compute_features: nn.Module = key("waveforms [B, S] to features [B, T, F], such as a sbkit.nn.kaldi.FilterBank or "
                                      "SpeechBrain's Fbank; each utterance's mean is subtracted from them")
    hop_length: float = key("milliseconds between two frames that compute_features makes", 10, POSITIVE)
    spec_augment: Callable[[Tensor, Tensor], Tensor] | None = key(
        "what masks features [B, T, F] in training, given the frames of each utterance [B] too, such as "
        "sbkit.nn.spec_augment.SpecAugment", None)
    embedding_model: nn.Module = key("features [B, T, F] and frame counts [B] to a vector for each utterance [B, D], "
                                     "such as a sbkit.nn.speaker.ECAPA or XVector")
    classifier: nn.Module = key("these vectors [B, 1, D] to cosines with each speaker [B, 1, N], SpeechBrain's "
                                "Classifier of ECAPA_TDNN")
    compute_cost: Callable[[Tensor, Tensor], Tensor] = key(
        "cosines [B, N] and what they should be [B, N] to scores, whose softmax is the loss: SpeechBrain's "
        "AdditiveAngularMargin")
    speakers: Sequence[str] | None = key("the speakers of the training set; null: all that it has", None, NAMES)
    n_speakers: int = key("their number; it follows from the corpus", allowed=SIZE)
    trials: str | None = key("a file of trials of the test in VoxCeleb's format, `1 ID ID` or `0 ID ID`; null: all "
                             "pairs of its recordings", None)
