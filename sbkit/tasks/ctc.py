"""Speech recognition with CTC, alone or together with an attention decoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from speechbrain.core import Stage
from torch import Tensor
from torch.nn import functional

from sbkit.data.batch import Batch
from sbkit.decode.greedy import greedy
from sbkit.nn.ctc import CTCLoss, ctc_loss
from sbkit.nn.guard import guard_indices
from sbkit.nn.recognizer import Recognizer
from sbkit.tasks.asr import ASR, Row
from sbkit.train.step import Loss


class Scores(NamedTuple):
    """What the model says of a batch."""

    ctc: Tensor  # [B, T, V] scores
    frames: Tensor  # [B] int64
    attention: Tensor | None  # [B, U + 1, V] scores of the decoder, in joint training


class CTC(ASR):
    """The flagship's Brain.

    ``decoder: !new:sbkit.decode.beam.BeamSearch`` makes the test's transcripts; without it, and in validation,
    they are each frame's best.

    ``ctc_weight: 1.0`` trains CTC alone. Below 1 the rest of the loss is the attention decoder's
    label-smoothed cross-entropy. Both are means per token over the whole optimizer step.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Now, and not in the first forward: it tries the layers out, which a culprit's examination would see.
        self.recognizer = Recognizer.from_hparams(self.hparams)
        self.decoder = getattr(self.hparams, "decoder", None)

    @property
    def joint(self) -> bool:
        return self.hparams.ctc_weight < 1

    def compute_forward(self, batch: Batch, stage: Stage) -> Scores:
        """Waveforms [B, S] to scores [B, T, V]."""
        model = self.recognizer
        feats, frames = model.features(batch.signals, batch.signal_lengths, training=stage == Stage.TRAIN)
        if not (self.joint and stage == Stage.TRAIN):
            encoded, frames = model.encode(feats, frames)
            return Scores(model.ctc_lin(encoded), frames, None)
        tokens = functional.pad(self._labels(batch), (1, 0), value=self.hparams.bos_index)
        encoded, frames, decoded = model.encode_and_decode(feats, frames, tokens)
        return Scores(model.ctc_lin(encoded), frames, self.hparams.seq_lin(decoded))

    def compute_objectives(self, scores: Scores, batch: Batch, stage: Stage) -> Loss:
        """Sum over the batch, and the tokens it is a mean over."""
        ctc = self._ctc(scores, batch)
        tokens = (batch.token_lengths * ctc.feasible).sum()
        total = ctc.total
        if scores.attention is not None:
            weight = self.hparams.ctc_weight
            total = weight * total + (1 - weight) * self._cross_entropy(scores.attention, batch, ctc.feasible)
        if stage != Stage.TRAIN:
            self._transcribe(scores, batch, stage)
        return Loss(total, tokens)

    def _ctc(self, scores: Scores, batch: Batch) -> CTCLoss:
        return ctc_loss(
            scores.ctc, batch.tokens, scores.frames, batch.token_lengths, blank=self.hparams.blank_index,
            ids=batch.ids,
        )

    def utterance_losses(self, scores: Scores, batch: Batch) -> Tensor:
        """CTC loss of each utterance [B], for reports on steps that went wrong."""
        return self._ctc(scores, batch).losses

    def _labels(self, batch: Batch) -> Tensor:
        """The tokens [B, U], safe for an embedding to look up; one outside the vocabulary is told."""
        return guard_indices(
            batch.tokens, self.hparams.output_neurons, name="tokens", ids=batch.ids, lengths=batch.token_lengths,
            forbidden=(self.hparams.blank_index,),
        )

    def _cross_entropy(self, scores: Tensor, batch: Batch, counted: Tensor) -> Tensor:
        """Label-smoothed cross-entropy of the tokens and the end, summed: [B, U + 1, V] -> scalar.

        ``counted`` [B]: the utterances that the step's mean is over.
        """
        target = functional.pad(self._labels(batch), (0, 1))
        target = target.scatter(1, batch.token_lengths[:, None], self.hparams.eos_index)
        beyond = torch.arange(target.shape[1], device=target.device) > batch.token_lengths[:, None]
        beyond = beyond | ~counted[:, None]
        return functional.cross_entropy(
            scores.float().flatten(0, 1), target.masked_fill(beyond, -100).flatten(), ignore_index=-100,
            reduction="sum", label_smoothing=getattr(self.hparams, "label_smoothing", 0.0),
        )

    def _transcribe(self, scores: Scores, batch: Any, stage: Stage) -> None:
        if not batch.weight:  # a stand-in
            return
        log_probs = scores.ctc.float().log_softmax(-1)
        if self.decoder is not None and stage == Stage.TEST:
            if self.decoder.tokenizer is None:
                self.decoder.tokenizer = self.hparams.tokenizer
            best = [several[0] for several in self.decoder.decode(log_probs, scores.frames)]
            heard, found = [one.text for one in best], [one.spans for one in best]
        else:
            found = greedy(log_probs, scores.frames, blank_id=self.hparams.blank_index)
            heard = map(self.hparams.tokenizer.decode, found.ids)
        sure = (float(spans.confidence.mean()) if len(spans) else None for spans in found)
        self.rows += map(Row, batch.ids, batch.texts, heard, sure)
