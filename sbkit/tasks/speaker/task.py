"""The task of speakers: a vector for each recording, by which one tells whether two are of the same speaker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from speechbrain.core import Stage
from torch import Tensor, nn
from torch.nn import functional

from sbkit.data.batch import Batch
from sbkit.data.columns import Declared, LabelColumn
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.export.features import Traced, express
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.tf32 import without_tf32
from sbkit.score import verification
from sbkit.score.estimate import MetricEstimate, estimate
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.speaker.keys import SpeakerKeys
from sbkit.tasks.speaker.results import SpeakerRow, Verified, scored
from sbkit.tasks.task import Metric, Task
from sbkit.train.step import Loss

if TYPE_CHECKING:
    from sbkit.export.exported import Exported

logger = logging.getLogger(__name__)


class Embedder(nn.Module):
    """Waveforms [B, S] and sample counts [B] to vectors of length 1, [B, D].

    Arguments
    ---------
    features : these to features [B, T, F] and frame counts [B]
    model : those to vectors
    """

    def __init__(self, features: nn.Module, model: nn.Module):
        super().__init__()
        self.features, self.model = features, model

    def centred(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features without each utterance's mean, 0 beyond its end, and frame counts."""
        with without_tf32():
            feats, frames = self.features(signals, lengths)
        inside = lengths_to_mask(frames, feats.shape[1])[..., None]
        mean = feats.masked_fill(~inside, 0.0).sum(1, keepdim=True) / frames[:, None, None]
        return (feats - mean).masked_fill(~inside, 0.0), frames

    def vectors(self, feats: Tensor, frames: Tensor) -> Tensor:
        """Compute vectors from what ``centred`` gives."""
        return functional.normalize(self.model(feats, frames).float(), dim=-1)

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        return self.vectors(*self.centred(signals, lengths))


class Verification(Task):
    """The Brain of ``hparams/speaker.yaml``.

    - The loss tells the training set's speakers apart, with a margin between them. Those of dev and test should be
      others; their loss is of those among them that training knows, 0 if there is none.
    - Two recordings are scored by the cosine of their vectors. The best checkpoint is the one with the least equal
      error rate of all pairs of dev's.
    """

    Keys: ClassVar[type[TaskKeys]] = SpeakerKeys
    parts = ("compute_features", "spec_augment", "embedding_model", "classifier", "modules")
    columns: ClassVar[Declared] = {"speaker": LabelColumn("speakers")}
    metric = Metric("EER")
    keys: SpeakerKeys

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.embedder = Embedder(Traced(self.keys.compute_features, self._hop), self.keys.embedding_model)

    @property
    def _hop(self) -> int:
        return round(self.keys.sample_rate * self.keys.hop_length / 1000)

    @classmethod
    def prepare(cls, keys: SpeakerKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Count the speakers."""
        known = keys.speakers or manifests["train"].column("speaker")
        return super().prepare(keys, manifests, given) | {"n_speakers": len(set(known))}

    @classmethod
    def check_manifest(cls, keys: SpeakerKeys, split: str, manifest: Manifest) -> None:
        """Warn of trials whose recordings a test doesn't have; refuse a list of which it has none."""
        if split != "test" or keys.trials is None:
            return
        trials, missing = verification.listed(verification.read_list(keys.trials), manifest.ids)
        if not len(trials.same):
            raise SbkitError(f"trials: {keys.trials} names no recording of the test set, whose ids are like "
                             f"{manifest.ids[0]}", hint="name another list, or null: all pairs of its recordings")
        if missing:
            logger.warning("The test set lacks a recording of %d of the %d trials of %s, which are left out", missing,
                           missing + len(trials.same), keys.trials)

    # ------------------------------------------------------------ training

    def compute_forward(self, batch: Batch, stage: Stage) -> tuple[Tensor, Tensor]:
        """Waveforms [B, S] to vectors [B, D], and their cosines with each speaker of the training set [B, N]."""
        feats, frames = self.embedder.centred(batch.signals, batch.signal_lengths)
        if stage == Stage.TRAIN and self.keys.spec_augment is not None:
            feats = self.keys.spec_augment(feats, frames)
        vectors = self.embedder.vectors(feats, frames)
        return vectors, self.keys.classifier(vectors[:, None])[:, 0]

    def compute_objectives(self, outputs: tuple[Tensor, Tensor], batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, a sum over recordings of known speakers, and their number."""
        (vectors, cosines), speakers = outputs, batch.labels["speaker"]
        if stage != Stage.TRAIN and batch.weight:
            self.rows += map(SpeakerRow, batch.ids, batch.columns["speaker"], vectors.float().cpu().numpy())
        known = speakers >= 0
        wanted = speakers[:, None] == torch.arange(cosines.shape[1], device=cosines.device)
        scores = self.keys.compute_cost(cosines, wanted.float())
        total = functional.cross_entropy(scores, speakers, ignore_index=-1, reduction="sum")
        right = ((cosines.argmax(1) == speakers) & known).sum()
        return Loss(total, known.sum(), {"accuracy": (right, known.sum())})

    # ------------------------------------------------------------ validation and test

    def stats(self, rows: Sequence[SpeakerRow]) -> dict[str, float]:
        """Compute the equal error rate, per cent, and minDCF of all pairs."""
        return scored(rows).stats

    def results(self, rows: Sequence[SpeakerRow], loss: float, unread: Mapping[str, str]) -> Verified:
        del loss  # of speakers that training knows, which a test has none of
        return Verified.of(scored(rows, self.keys.trials), rows, unread)

    def estimate(self, rows: Sequence[SpeakerRow]) -> MetricEstimate | None:
        """How sure the equal error rate is, by drawing recordings anew."""
        whole, place = scored(rows, self.keys.trials), {row.id: number for number, row in enumerate(rows)}

        def drawn(again: Sequence[SpeakerRow]) -> dict[str, float]:
            return whole.drawn(np.bincount([place[row.id] for row in again], minlength=len(rows))).stats

        return estimate(self.metric, rows, drawn)

    # ------------------------------------------------------------ export

    def exported(self, run: Path) -> Exported:
        from sbkit.export.exported import Exported

        graph = Embedder(express(self.keys.compute_features, self._hop), self.keys.embedding_model)
        return Exported(graph, {"embedding": ("batch",)}, self.keys.sample_rate,
                        from_forward=lambda made: made[0])
