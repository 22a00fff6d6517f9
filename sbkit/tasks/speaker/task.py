"""The task of speaker verification: an embedding of each recording, to decide whether two are of the same speaker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from speechbrain.core import Stage
from torch import Tensor, nn
from torch.nn import functional

from sbkit.data.batch import Batch
from sbkit.data.columns import Declared, LabelColumn
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.export.features import TracedFeatures, express
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.tf32 import without_tf32
from sbkit.score import verification
from sbkit.score.estimate import MetricEstimate, estimate
from sbkit.score.results import Player, Results, SoundSample, Table
from sbkit.score.verification import Rates, Trials
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.speaker.keys import SpeakerKeys
from sbkit.tasks.task import Metric, Task
from sbkit.train.loss import Loss

if TYPE_CHECKING:
    from sbkit.export.exported import Exported

logger = logging.getLogger(__name__)

#: Trials of each kind in the table of the worst.
WORST = 6
_TRIALS_AT_ONCE = 100_000  # so that their embeddings fit into memory


class SpeakerRow(NamedTuple):
    """A recording's speaker and its embedding [D]."""

    id: str
    speaker: str
    embedding: np.ndarray


class ScoredTrials(NamedTuple):
    """Trials with their scores [N]."""

    trials: Trials
    scores: np.ndarray
    rates: Rates

    @property
    def stats(self) -> dict[str, float]:
        """The rates by name."""
        return {"EER": self.rates.eer, "minDCF": self.rates.min_dcf}

    def resampled(self, times: np.ndarray) -> ScoredTrials:
        """Return the trials with each recording repeated ``times`` [R], but none with itself."""
        trial_times = times[self.trials.first] * times[self.trials.second]
        return self._replace(rates=verification.rates(self.scores, self.trials.same, times=trial_times))

    def worst(self) -> list[int]:
        """Return the trials furthest on the wrong side of the threshold: of the same speaker, and of different ones."""
        rejected = np.flatnonzero(self.trials.same)[np.argsort(self.scores[self.trials.same])[:WORST]]
        accepted = np.flatnonzero(~self.trials.same)[np.argsort(-self.scores[~self.trials.same])[:WORST]]
        wrong = [*rejected[self.scores[rejected] < self.rates.threshold],
                 *accepted[self.scores[accepted] >= self.rates.threshold]]
        return [int(trial) for trial in wrong]


def scored(rows: Sequence[SpeakerRow], path: str | None = None) -> ScoredTrials:
    """Score the trials of a list, or all pairs of recordings."""
    if path is None:
        trials = verification.all_pairs([row.speaker for row in rows])
    else:
        trials, _ = verification.from_list(verification.read_list(path), [row.id for row in rows])
    embeddings = np.stack([row.embedding for row in rows]) if rows else np.zeros((0, 1), np.float32)
    parts = 1 + len(trials.first) // _TRIALS_AT_ONCE
    products = [np.zeros(0, np.float32)]
    for first, second in zip(np.array_split(trials.first, parts), np.array_split(trials.second, parts), strict=True):
        products.append(np.einsum("nd,nd->n", embeddings[first], embeddings[second]))
    scores = np.concatenate(products)
    return ScoredTrials(trials, scores, verification.rates(scores, trials.same))


@dataclass
class VerificationResults(Results):
    """Rows of a test and the rates of its trials."""

    scored: ScoredTrials = field(kw_only=True)
    rows: Sequence[SpeakerRow] = ()

    @classmethod
    def of(cls, scored: ScoredTrials, rows: Sequence[SpeakerRow], unread: Mapping[str, str]) -> VerificationResults:
        """Make the results of a test."""
        results = cls(scored.stats, len(rows), dict(unread), scored=scored, rows=rows)
        trials, threshold = scored.trials, scored.rates.threshold
        kinds = []
        for name, chosen in (("same", trials.same), ("different", ~trials.same)):
            scores = scored.scores[chosen]
            wrong = scores < threshold if name == "same" else scores >= threshold
            mean, errors = "", ""
            if len(scores):
                mean, errors = f"{scores.mean():.3f}", f"{wrong.mean():.2%}"
            kinds.append([name, len(scores), mean, errors])
        worst = [[results._kind(trial), f"{scored.scores[trial]:.3f}", rows[trials.first[trial]].id,
                  rows[trials.second[trial]].id] for trial in scored.worst()]
        results.tables = [
            Table("Trials", ["speakers", "trials", "mean score", "errors"], kinds,
                  f"from a score of {threshold:.3f} on, a trial counts as the same speaker; there, both kinds of "
                  "errors are equally frequent"),
            Table("The worst trials", ["error", "score", "first", "second"], worst)]
        return results

    def headline(self) -> str:
        same = self.scored.trials.same
        return f"{super().headline()}, {len(same):,} trials, {int(same.sum()):,} of them with the same speaker"

    def _formatted(self, name: str) -> str:
        return super()._formatted(name) + " %" * (name == "EER")

    def lines(self) -> list[str]:
        return [self.tables[0].remark]

    def columns(self) -> list[tuple[str, Any]]:
        return [*super().columns(), ("threshold", f"{self.scored.rates.threshold:.3f}")]

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "threshold": self.scored.rates.threshold, "trials": len(self.scored.trials.same)}

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Write the numbers, and the worst trials for the report's players."""
        place = {name: i for i, name in enumerate(manifest.ids)}
        self.players = []
        for trial in self.scored.worst():
            sounds = []
            for side in (self.scored.trials.first, self.scored.trials.second):
                row = self.rows[side[trial]]
                recording = manifest.row(place[row.id])
                sounds.append(SoundSample(row.id, recording.wav, recording.start, recording.duration))
            self.players.append(Player(self._kind(trial), f"score {self.scored.scores[trial]:.3f}", sounds))
        super().write(folder, manifest, of)

    def _kind(self, trial: int) -> str:
        return "same speaker, rejected" if self.scored.trials.same[trial] else "different speakers, accepted"


class Embedder(nn.Module):
    """Waveforms [B, S] and sample counts [B] to embeddings of length 1, [B, D]."""

    def __init__(self, features: nn.Module, model: nn.Module):
        super().__init__()
        self.features, self.model = features, model

    def centred_features(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features minus each utterance's mean, 0 for padding, and frame counts."""
        with without_tf32():
            feats, frames = self.features(signals, lengths)
        inside = lengths_to_mask(frames, feats.shape[1])[..., None]
        mean = feats.masked_fill(~inside, 0.0).sum(1, keepdim=True) / frames[:, None, None]
        return (feats - mean).masked_fill(~inside, 0.0), frames

    def embed(self, feats: Tensor, frames: Tensor) -> Tensor:
        """Compute embeddings from the outputs of ``centred_features``."""
        return functional.normalize(self.model(feats, frames).float(), dim=-1)

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        return self.embed(*self.centred_features(signals, lengths))


class Verification(Task):
    """The Brain of ``hparams/speaker.yaml``.

    - The loss classifies the training set's speakers, with a margin between them. Dev and test should have other
      speakers; their loss only counts speakers of the training set, and is 0 if there are none.
    - Two recordings are scored by the cosine of their embeddings. The best checkpoint is the one with the lowest equal
      error rate over all pairs of dev recordings.
    """

    capturable: ClassVar[bool] = True
    Keys: ClassVar[type[TaskKeys]] = SpeakerKeys
    parts = ("compute_features", "spec_augment", "embedding_model", "classifier", "modules")
    columns: ClassVar[Declared] = {"speaker": LabelColumn("speakers")}
    metric = Metric("EER")
    sized_by_corpus = ("n_speakers",)
    keys: SpeakerKeys

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.embedder = Embedder(TracedFeatures(self.keys.compute_features, self._hop), self.keys.embedding_model)

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
        """Warn about trials whose recordings the test set lacks; raise if it has none of the list's."""
        if split != "test" or keys.trials is None:
            return
        trials, missing = verification.from_list(verification.read_list(keys.trials), manifest.ids)
        if not len(trials.same):
            raise SbkitError("trials-not-in-test",
                             f"trials: {keys.trials} names no recording of the test set, whose ids "
                             f"are like {manifest.ids[0]}", file=keys.trials, key="trials",
                             hint="name another list, or null: all pairs of its recordings")
        if missing:
            logger.warning("The test set lacks a recording of %d of the %d trials of %s, which are left out", missing,
                           missing + len(trials.same), keys.trials)

    # ------------------------------------------------------------ training

    def compute_forward(self, batch: Batch, stage: Stage) -> tuple[Tensor, Tensor]:
        """Waveforms [B, S] to embeddings [B, D], and their cosines with each speaker of the training set [B, N]."""
        feats, frames = self.embedder.centred_features(batch.signals, batch.signal_lengths)
        if stage == Stage.TRAIN and self.keys.spec_augment is not None:
            feats = self.keys.spec_augment(feats, frames)
        embeddings = self.embedder.embed(feats, frames)
        return embeddings, self.keys.classifier(embeddings[:, None])[:, 0]

    def compute_objectives(self, outputs: tuple[Tensor, Tensor], batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, a sum over recordings of known speakers, and their number."""
        embeddings, cosines = outputs
        speakers = batch.labels["speaker"]
        if stage != Stage.TRAIN and batch.weight:
            self.rows += map(SpeakerRow, batch.ids, batch.columns["speaker"], embeddings.float().cpu().numpy())
        known = speakers >= 0
        targets = speakers[:, None] == torch.arange(cosines.shape[1], device=cosines.device)
        scores = self.keys.compute_cost(cosines, targets.float())
        total = functional.cross_entropy(scores, speakers, ignore_index=-1, reduction="sum")
        right = ((cosines.argmax(1) == speakers) & known).sum()
        return Loss(total, known.sum(), {"accuracy": (right, known.sum())})

    # ------------------------------------------------------------ validation and test

    def stats(self, rows: Sequence[SpeakerRow]) -> dict[str, float]:
        """Compute the equal error rate, per cent, and minDCF of all pairs."""
        return scored(rows).stats

    def results(self, rows: Sequence[SpeakerRow], loss: float, unread: Mapping[str, str]) -> VerificationResults:
        del loss  # only of the training set's speakers, which a test has none of
        return VerificationResults.of(scored(rows, self.keys.trials), rows, unread)

    def estimate(self, rows: Sequence[SpeakerRow]) -> MetricEstimate | None:
        """Estimate the uncertainty of the equal error rate, by a bootstrap over recordings."""
        trials = scored(rows, self.keys.trials)
        place = {row.id: number for number, row in enumerate(rows)}

        def resampled(sample: Sequence[SpeakerRow]) -> dict[str, float]:
            times = np.bincount([place[row.id] for row in sample], minlength=len(rows))
            return trials.resampled(times).stats

        return estimate(self.metric, rows, resampled)

    # ------------------------------------------------------------ export

    def exported(self, run: Path) -> Exported:
        from sbkit.export.exported import Exported

        graph = Embedder(express(self.keys.compute_features, self._hop), self.keys.embedding_model)
        return Exported(graph, {"embedding": ("batch",)}, self.keys.sample_rate,
                        from_forward=lambda outputs: outputs[0])
