"""Speech recognition with a transducer (RNN-T), alone or with CTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from speechbrain.core import Stage
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.nn.ctc import ctc_loss
from sbkit.nn.transducer import transducer_loss
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node
from sbkit.runs.initial.source import TokenTables
from sbkit.score.metric import Metric
from sbkit.tasks.feature_statistics import FeatureStatistics
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.learning import LearningMonitor
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.contexts import FrameContexts
from sbkit.tasks.recognise.duration_limit import DurationLimit
from sbkit.tasks.recognise.labels import FrameTokens, safe_tokens, token_tables
from sbkit.tasks.recognise.parts import parts_fit
from sbkit.tasks.recognise.transcriber import Transcriber
from sbkit.tasks.task import Task
from sbkit.tasks.transducer.decoding import TransducerDecoding
from sbkit.tasks.transducer.keys import TransducerKeys
from sbkit.train.loss import Loss

if TYPE_CHECKING:
    from sbkit.tasks.transducer.exported import ExportedTransducer


class TransducerScores(NamedTuple):
    """The model's outputs for a batch."""

    states: Tensor  # [B, T, J] of the encoder, as they are joined
    frames: Tensor  # [B] int64
    joined: Tensor  # [B, T, U + 1, V] scores of what follows each frame and token
    ctc: Tensor | None  # [B, T, V] scores of the CTC head
    live: Sequence[tuple[Tensor, Tensor | None]] = ()  # those of ``LiveTest.scores``, in a test in chunks


class Transducer(Task):
    """The Brain of ``hparams/transducer.yaml``.

    ``ctc_weight: 0.3`` is the share of the loss of a CTC head on the same encoder, which makes it learn sooner and is
    only used in training. Both are sums over utterances, divided by the tokens of the whole optimizer step.
    """

    capturable: ClassVar[bool] = True
    Keys: ClassVar[type[TaskKeys]] = TransducerKeys
    parts = ("transducer", "modules")
    metric = Metric("WER")
    tokens = FrameTokens("ctc_lin")
    corpus_parts = (DurationLimit(), tokens, FeatureStatistics())
    sized_by_corpus = ("output_neurons",)
    writes_words = True
    counts_real_rows: ClassVar[bool] = True
    keys: TransducerKeys
    transcriber: Transcriber

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # A transducer's own loss doesn't stay at chance until something is learnt; that of a CTC head does.
        self.learning = LearningMonitor("ctc" if self.keys.ctc_lin is not None else None, self.keys, self.checkpointer)
        self.use_acoustic_model(AcousticModel.of(self.keys, self.keys.transducer.of_encoder, scores_tokens=False))

    def use_acoustic_model(self, acoustic_model: AcousticModel) -> None:
        """Train, test and export this model."""
        self.acoustic_model = acoustic_model
        self.contexts = FrameContexts(self.keys, acoustic_model)
        self.transcriber = Transcriber(acoustic_model, self.keys, TransducerDecoding(acoustic_model, self.keys))

    @classmethod
    def check_parts(cls, keys: TransducerKeys, built: Built, findings: Findings) -> bool:
        return parts_fit(keys, built, findings, _head_fits)

    @classmethod
    def check_labels(cls, keys: TransducerKeys, manifests: Mapping[str, Manifest], findings: Findings,
                     nodes: Mapping[str, Node]) -> Section:
        return cls.tokens.check_labels(keys, manifests, findings, nodes, ctc=keys.ctc_lin is not None, alone=False)

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        return self.acoustic_model.describe(self.keys.sample_rate)

    def token_tables(self) -> TokenTables:
        return token_tables(self.keys, [self.keys.transducer, self.keys.ctc_lin])

    # ------------------------------------------------------------ training

    def compute_forward(self, batch: Batch, stage: Stage) -> TransducerScores:
        """Compute scores [B, T, U + 1, V] of waveforms [B, S] and the tokens of their texts [B, U]."""
        model = self.acoustic_model
        head = self.keys.transducer
        feats, feat_frames = model.features(batch.signals, batch.signal_lengths, training=stage == Stage.TRAIN,
                                            real=batch.real)
        context = self.contexts.visible(batch, stage, self.optimizer_step, self.transcriber.test_context)
        encoded, frames = model.encode(feats, feat_frames, context)
        states, ctc = self.transcriber.decoding.scores(encoded)
        predicted = head.predict(head.with_start(safe_tokens(batch, self.keys)))
        joined = head.join(states[:, :, None], predicted[:, None])
        live = self.transcriber.live_scores(feats, feat_frames, (states, ctc), stage)
        return TransducerScores(states, frames, joined, ctc, live)

    def compute_objectives(self, scores: TransducerScores, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, summed over the batch, and the number of its tokens."""
        losses = transducer_loss(scores.joined, batch.tokens, scores.frames, batch.token_lengths,
                                 self.keys.blank_index, batch.ids)
        total = torch.where(batch.real, losses, 0.0).sum()
        # As for CTC, a row without words counts as one token.
        count = (batch.token_lengths.clamp(min=1) * batch.real).sum()
        extras = None
        if scores.ctc is not None:
            ctc = ctc_loss(scores.ctc, batch.tokens, scores.frames, batch.token_lengths, self.keys.blank_index,
                           ids=batch.ids, real=batch.real)
            total = torch.lerp(total, ctc.total, self.keys.ctc_weight)
            spoken = (ctc.losses * (batch.token_lengths > 0)).sum()
            extras = {"ctc": (spoken, (batch.token_lengths * ctc.feasible).sum())}
        if stage == Stage.TRAIN:
            return Loss(total, count, extras)
        inputs = self.transcriber.decoding.search_input((scores.states, scores.ctc))
        self.rows += self.transcriber.rows(inputs, scores.frames, batch, stage, scores.live)
        return Loss(total, count)

    def graph_key(self) -> tuple[int, int] | None:
        return self.contexts.graph_key(self.optimizer_step)

    def exported(self, run: Path) -> ExportedTransducer:
        from sbkit.tasks.transducer.exported import ExportedTransducer

        return ExportedTransducer.of(self.acoustic_model, self.keys)


def _head_fits(keys: TransducerKeys, built: Built, findings: Findings) -> bool:
    """Check that the joint network has the recipe's vocabulary and blank."""
    node = built.nodes["transducer"]
    fits = True
    for name, key in (("vocabulary", "output_neurons"), ("blank", "blank_index")):
        of_head = getattr(keys.transducer, name)
        of_recipe = getattr(keys, key)
        if of_head != of_recipe:
            findings.error("vocabulary", node.place_of(name), node.key_of(name),
                           f"it is {of_head}, but {key} is {of_recipe}", f"write `{name}: !ref <{key}>`")
            fits = False
    return fits
