"""Speech recognition with CTC, alone or with an attention decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from speechbrain.core import Stage
from torch import Tensor, nn
from torch.nn import functional

from sbkit.data.batch import Batch
from sbkit.decode.joint import JointSearch, Step
from sbkit.errors import SbkitError
from sbkit.nn.ctc import CTCLoss, consistency, ctc_loss
from sbkit.nn.device_numbers import DeviceNumbers
from sbkit.nn.pretrained import Encoder
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.runs.initial.source import TokenTables
from sbkit.score.metric import Metric
from sbkit.tasks.ctc.decoding import CTCDecoding
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.ctc.parts import has_decoder, has_inner_layers, layer_outputs, stack
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
from sbkit.train.loss import Loss

if TYPE_CHECKING:
    from sbkit.tasks.ctc.exported import ExportedCTC


class Scores(NamedTuple):
    """The model's outputs for a batch."""

    ctc: Tensor  # [B, T, V] scores
    frames: Tensor  # [B] int64
    attention: Tensor | None = None  # [B, U + 1, V] scores of the decoder, in joint training
    intermediate: Sequence[Tensor] = ()  # [B, T, V] each: scores of inner layers of the encoder, in training
    encoded: Tensor | None = None  # [B, T, D] encoder states, for a search with the decoder
    live: Sequence[Tensor] = ()  # [B, T, V] each: those of ``LiveTest.scores``, in a test in chunks


class CTC(Task):
    """The Brain of ``hparams/ctc.yaml``.

    - ``decoder``, a ``sbkit.decode.beam.BeamSearch`` or, with joint training, a ``sbkit.decode.joint.JointSearch``,
      finds the test's transcripts. Without it, and in validation, the best token of each frame is taken.
    - ``ctc_weight: 1.0`` trains CTC alone. Below 1, the rest of the loss is the attention decoder's label-smoothed
      cross-entropy. Both are means per token over the whole optimizer step.
    - ``intermediate_ctc: 0.3`` is the share of the CTC loss on inner layers of the encoder, through the same head: on
      ``intermediate_layers``, by default the middle layer of SpeechBrain's transformers and none of other encoders.
    - ``consistency: 0.2`` is CR-CTC: each utterance is used twice with different augmentations, and the divergence of
      the two outputs, times this weight, is added to the loss. The weight rises over ``consistency_warmup`` (a share of
      the run). A step then needs twice the computation and memory for its ``max_batch_seconds``.
    """

    capturable: ClassVar[bool] = True
    Keys: ClassVar[type[TaskKeys]] = CTCKeys
    parts = ("ctc_lin", "modules")
    metric = Metric("WER")
    tokens = FrameTokens("ctc_lin", "seq_lin")
    corpus_parts = (DurationLimit(), tokens, FeatureStatistics())
    sized_by_corpus = ("output_neurons",)
    writes_words = True
    counts_real_rows: ClassVar[bool] = True
    keys: CTCKeys
    transcriber: Transcriber

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if isinstance(self.keys.decoder, JointSearch) and not self.joint:
            raise SbkitError("clash", "the recipe's decoder is a JointSearch, but ctc_weight: 1.0 trains no attention "
                             "decoder", key="decoder",
                             hint="set ctc_weight below 1, such as 0.3, or use another decoder")
        self.learning = LearningMonitor("ctc", self.keys, self.checkpointer)
        # Built now, since it probes the layers, which must not happen while a failing step is diagnosed.
        self.use_acoustic_model(AcousticModel.of(self.keys, self.keys.ctc_lin))
        self._consistency_weight = DeviceNumbers([self.keys.consistency])

    def use_acoustic_model(self, acoustic_model: AcousticModel) -> None:
        """Train, test and export this model: the recipe's own, or one that was made elsewhere."""
        self.acoustic_model = acoustic_model
        self.contexts = FrameContexts(self.keys, acoustic_model)
        self.transcriber = Transcriber(acoustic_model, self.keys, CTCDecoding(acoustic_model, self.keys))

    # ------------------------------------------------------------ the check

    @classmethod
    def check_parts(cls, keys: CTCKeys, built: Built, findings: Findings) -> bool:
        return parts_fit(keys, built, findings, has_decoder, has_inner_layers)

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        return self.acoustic_model.describe(self.keys.sample_rate)

    def token_tables(self) -> TokenTables:
        return token_tables(self.keys, [self.keys.ctc_lin, self.keys.seq_lin])

    # ------------------------------------------------------------ training

    @property
    def joint(self) -> bool:
        return self.keys.ctc_weight < 1

    def compute_forward(self, batch: Batch, stage: Stage) -> Scores:
        """Compute scores [B, T, V] of waveforms [B, S]."""
        model = self.acoustic_model
        trains = stage == Stage.TRAIN
        views = self.views if trains else 1
        feats, feat_frames = model.features(batch.signals, batch.signal_lengths, training=trains, views=views,
                                            real=batch.real)
        with layer_outputs(model.encoder, self._inner_layers() if trains else []) as states:
            if self.joint:
                tokens = functional.pad(safe_tokens(batch, self.keys), (1, 0), value=self.keys.ends[0])
                encoded, frames, decoded = model.encode_and_decode(feats, feat_frames, tokens.repeat(views, 1))
                attention = self.keys.seq_lin(decoded)
            else:
                context = self.contexts.visible(batch, stage, self.optimizer_step, self.transcriber.test_context)
                encoded, frames = model.encode(feats, feat_frames, context)
                attention = None

        ctc = model.head(encoded)
        joint_search = stage == Stage.TEST and isinstance(self.transcriber.search, JointSearch)
        return Scores(
            ctc, frames, attention,
            intermediate=[model.head(state) for state in states],
            encoded=encoded if joint_search else None,
            live=self.transcriber.live_scores(feats, feat_frames, ctc, stage))

    def _inner_layers(self) -> Sequence[int]:
        """The encoder's layers that train with a CTC loss of their own."""
        if not self.keys.intermediate_ctc:
            return []
        chosen = self.keys.intermediate_layers or []
        encoder = self.acoustic_model.encoder
        if chosen or not hasattr(encoder, "encode"):  # layers of a user's encoder may return anything
            return chosen
        middle = len(stack(encoder)[1]) // 2
        return [middle] if middle else []

    def compute_objectives(self, scores: Scores, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, summed over the batch, and the number of its tokens; two views count as two batches.

        A row without words counts as one token, so that a step of silence alone has a mean. The loss per token that is
        compared with chance is of rows with words.
        """
        trains = stage == Stage.TRAIN
        if trains and self.views > 1:
            batch = batch.repeated(self.views)
        ctc = self._ctc(scores.ctc, scores.frames, batch)
        count = (batch.token_lengths.clamp(min=1) * ctc.feasible).sum()

        total = ctc.total
        if scores.intermediate:
            total = torch.lerp(total, self._intermediate_loss(scores, batch), self.keys.intermediate_ctc)
        if trains and self.views > 1:
            total = total + self._consistency_loss(scores, ctc)
        if scores.attention is not None:
            share = self.keys.ctc_weight
            total = share * total + (1 - share) * self._attention_loss(scores.attention, batch, ctc)

        if trains:
            tokens = (batch.token_lengths * ctc.feasible).sum()
            spoken = (ctc.losses * (batch.token_lengths > 0)).sum()
            return Loss(total, count, {"ctc": (spoken, tokens)})
        self._add_rows(scores, batch, stage)
        return Loss(total, count)

    def _ctc(self, scores: Tensor, frames: Tensor, batch: Batch) -> CTCLoss:
        return ctc_loss(
            scores, batch.tokens, frames, batch.token_lengths, blank=self.keys.blank_index, ids=batch.ids,
            real=batch.real)

    def _intermediate_loss(self, scores: Scores, batch: Batch) -> Tensor:
        """The mean of the CTC losses of the encoder's inner layers."""
        totals = [self._ctc(layer_scores, scores.frames, batch).total for layer_scores in scores.intermediate]
        return torch.stack(totals).mean()

    def _consistency_loss(self, scores: Scores, ctc: CTCLoss) -> Tensor:
        """The divergence of the outputs for two views of each utterance, times its weight in this step."""
        log_probs = scores.ctc.log_softmax(-1, dtype=torch.float32)
        weight, = self._consistency_weight.on(log_probs.device)
        return weight * consistency(log_probs, scores.frames * ctc.feasible)

    def _attention_loss(self, attention: Tensor, batch: Batch, ctc: CTCLoss) -> Tensor:
        """The cross-entropy of the tokens and of the end of sentence, by the decoder's scores [B, U + 1, V]."""
        target = functional.pad(safe_tokens(batch, self.keys), (0, 1))
        target = target.scatter(1, batch.token_lengths[:, None], self.keys.ends[1])
        beyond = torch.arange(target.shape[1], device=target.device) > batch.token_lengths[:, None]
        beyond = beyond | ~ctc.feasible[:, None]  # utterances that aren't in the step's mean
        return functional.cross_entropy(
            attention.float().flatten(0, 1), target.masked_fill(beyond, -100).flatten(), ignore_index=-100,
            reduction="sum", label_smoothing=self.keys.label_smoothing)

    def _add_rows(self, scores: Scores, batch: Batch, stage: Stage) -> None:
        """Transcribe a batch of a validation or test."""
        further = () if scores.encoded is None else (self.next_token(scores),)
        search_input = self.transcriber.decoding.search_input(scores.ctc)
        self.rows += self.transcriber.rows(search_input, scores.frames, batch, stage, scores.live, *further)

    @property
    def views(self) -> int:
        """How many augmented versions of each utterance a training step uses."""
        return 2 if self.keys.consistency else 1

    def write_numbers(self, number: int) -> None:
        steps = self.keys.consistency_warmup * self._run_steps
        self._consistency_weight.write([self.keys.consistency * min(1.0, number / max(1.0, steps))])

    @property
    def _run_steps(self) -> int:
        """The optimizer steps of the run; in a script those that it gave to its schedule; 0 if they are unknown."""
        return self.planned_steps or getattr(self.keys.schedule, "total_steps", 0)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train; refuse a warm-up of the consistency that is a share of an unknown number of steps."""
        if self.keys.consistency and self.keys.consistency_warmup and not self._run_steps and not self.test_only:
            raise SbkitError("unknown-steps",
                             "consistency_warmup is a share of the run, whose number of steps isn't known "
                             "here", key="consistency_warmup",
                             hint="call open_run(texts, steps) before fit, or set consistency_warmup: 0")
        super().fit(*args, **kwargs)

    def stacked_layers(self) -> Sequence[nn.Module] | None:
        encoder = self.acoustic_model.encoder
        try:
            return list(encoder.stack if isinstance(encoder, Encoder) else stack(encoder)[1])
        except SbkitError:  # a user's encoder with other names of layers
            return None

    def graph_key(self) -> tuple[int, int] | None:
        return self.contexts.graph_key(self.optimizer_step)

    def exported(self, run: Path) -> ExportedCTC:
        from sbkit.tasks.ctc.exported import ExportedCTC

        return ExportedCTC.of(self.acoustic_model, self.keys, run)

    def next_token(self, scores: Scores) -> Step:
        """Return the attention decoder as a function for a joint search."""
        encoded = scores.encoded
        assert encoded is not None, "compute_forward returns it for this search"

        def step(tokens: Tensor, rows: Tensor) -> Tensor:
            frames = scores.frames[rows]
            decoded = self.acoustic_model.decode(tokens, encoded[rows, :int(frames.max())], frames)
            return self.keys.seq_lin(decoded[:, -1]).float().log_softmax(-1)

        return step
