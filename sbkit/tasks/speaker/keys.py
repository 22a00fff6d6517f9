"""Keys that the task of speaker verification reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbkit.recipe.keys import key
from sbkit.system.schema import NAMES, POSITIVE, SIZE
from sbkit.tasks.keys import TaskKeys

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(kw_only=True)
class SpeakerKeys(TaskKeys):
    """Keys of the model, of its loss and of the trials that it is tested on."""

    compute_features: nn.Module = key("waveforms [B, S] to features [B, T, F], such as a sbkit.nn.kaldi.FilterBank or "
                                      "SpeechBrain's Fbank; each utterance's mean is subtracted from them")
    hop_length: float = key("milliseconds between frames of compute_features", 10, POSITIVE)
    spec_augment: Callable[[Tensor, Tensor], Tensor] | None = key(
        "the augmentation of features [B, T, F] in training, called with frame counts [B] too, such as "
        "sbkit.nn.spec_augment.SpecAugment", None)
    embedding_model: nn.Module = key("features [B, T, F] and frame counts [B] to embeddings [B, D], "
                                     "such as a sbkit.nn.speaker.ECAPA or XVector")
    classifier: nn.Module = key("embeddings [B, 1, D] to cosines with each speaker [B, 1, N], SpeechBrain's "
                                "Classifier of ECAPA_TDNN")
    compute_cost: Callable[[Tensor, Tensor], Tensor] = key(
        "cosines [B, N] and one-hot targets [B, N] to logits for the cross-entropy: SpeechBrain's "
        "AdditiveAngularMargin")
    speakers: Sequence[str] | None = key("the training set's speakers; null: all of them", None, NAMES)
    n_speakers: int = key("number of speakers; determined by the corpus", allowed=SIZE)
    trials: str | None = key("the test's trials, a file in VoxCeleb's format (`1 ID ID` or `0 ID ID`); null: all "
                             "pairs of test recordings", None)
