"""Speech recognition with a transducer (RNN-T), alone or with CTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from speechbrain.core import Stage
from torch import Tensor, nn

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.decode.spans import TokenSpans
from sbkit.decode.transducer import TransducerSearch
from sbkit.decode.transducer_beam import TransducerBeam
from sbkit.nn.ctc import ctc_loss
from sbkit.nn.transducer import transducer_loss
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node
from sbkit.runs.initial.source import TokenTables
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.recognise.labels import check_labels, token_tables
from sbkit.tasks.recognise.parts import parts_fit
from sbkit.tasks.recognise.recognizer import Recognizer
from sbkit.tasks.recognise.task import RecognitionTask
from sbkit.tasks.transducer.keys import TransducerKeys
from sbkit.tasks.transducer.search import TorchJoint
from sbkit.train.step import Loss

if TYPE_CHECKING:
    from sbkit.tasks.transducer.exported import ExportedTransducer


class TransducerScores(NamedTuple):
    """The model's outputs for a batch."""

    states: Tensor  # [B, T, J] of the encoder, as they are joined
    frames: Tensor  # [B] int64
    joined: Tensor  # [B, T, U + 1, V] scores of what follows each frame and token
    ctc: Tensor | None  # [B, T, V] scores of the CTC head
    live: Sequence[tuple[Tensor, Tensor | None]] = ()  # those of ``LiveTest.scores``, in a test in chunks


class Transducer(RecognitionTask):
    """The Brain of ``hparams/transducer.yaml``.

    ``ctc_weight: 0.3`` is the share of the loss of a CTC head on the same encoder, which makes it learn sooner and is
    only used in training. Both are sums over utterances, divided by the tokens of the whole optimizer step.
    """

    capturable: ClassVar[bool] = True
    Keys: ClassVar[type[TaskKeys]] = TransducerKeys
    parts = ("transducer", "modules")
    heads, scores_tokens = ("ctc_lin",), False
    Search = TransducerBeam
    loss_of_tokens: ClassVar[str] = "ctc"
    counts_real_rows: ClassVar[bool] = True
    keys: TransducerKeys

    @classmethod
    def check_parts(cls, keys: TransducerKeys, built: Built, findings: Findings) -> bool:
        return parts_fit(keys, built, findings, _head_fits)

    @classmethod
    def check_labels(cls, keys: TransducerKeys, manifests: Mapping[str, Manifest], findings: Findings,
                     nodes: Mapping[str, Node]) -> Section:
        keys.tokenizer.load()
        return check_labels(keys, Recognizer.of(keys), manifests, findings, nodes, ctc=keys.ctc_lin is not None,
                            alone=False)

    def head(self) -> nn.Module:
        return self.keys.transducer.of_encoder

    def token_tables(self) -> TokenTables:
        return token_tables(self.keys, [self.keys.transducer, self.keys.ctc_lin])

    # ------------------------------------------------------------ training

    @property
    def tracks_learning(self) -> bool:
        return self.keys.ctc_lin is not None

    def compute_forward(self, batch: Batch, stage: Stage) -> TransducerScores:
        """Compute scores [B, T, U + 1, V] of waveforms [B, S] and the tokens of their texts [B, U]."""
        model, head = self.recognizer, self.keys.transducer
        feats, feat_frames = model.features(batch.signals, batch.signal_lengths, training=stage == Stage.TRAIN,
                                            real=batch.real)
        encoded, frames = model.encode(feats, feat_frames, self.visible_context(stage, batch))
        states, ctc = self.compute_scores(encoded)
        predicted = head.predict(head.with_start(self.safe_tokens(batch)))
        joined = head.join(states[:, :, None], predicted[:, None])
        test = self.live if stage == Stage.TEST else None
        live = () if test is None else test.scores(feats, feat_frames, (states, ctc))
        return TransducerScores(states, frames, joined, ctc, live)

    def compute_scores(self, encoded: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the states that are joined [B, T, J], and the CTC head's scores [B, T, V] if there is one."""
        return self.recognizer.head(encoded), None if self.keys.ctc_lin is None else self.keys.ctc_lin(encoded)

    def compute_objectives(self, scores: TransducerScores, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, summed over the batch, and the number of its tokens."""
        losses = transducer_loss(scores.joined, batch.tokens, scores.frames, batch.token_lengths,
                                 self.keys.blank_index, batch.ids)
        total = torch.where(batch.real, losses, 0.0).sum()
        # As for CTC, a row without words counts as one token.
        count, extras = (batch.token_lengths.clamp(min=1) * batch.real).sum(), None
        if scores.ctc is not None:
            ctc = ctc_loss(scores.ctc, batch.tokens, scores.frames, batch.token_lengths, self.keys.blank_index,
                           ids=batch.ids, real=batch.real)
            total = torch.lerp(total, ctc.total, self.keys.ctc_weight)
            spoken = (ctc.losses * (batch.token_lengths > 0)).sum()
            extras = {self.loss_of_tokens: (spoken, (batch.token_lengths * ctc.feasible).sum())}
        if stage == Stage.TRAIN:
            return Loss(total, count, extras)
        self.transcribe(scores.states, scores.frames, batch, stage, scores.live)
        return Loss(total, count)

    # ------------------------------------------------------------ transcripts

    def ctc_scores(self, scores: tuple[Tensor, Tensor | None]) -> Tensor | None:
        return scores[1]

    def search_input(self, scores: tuple[Tensor, Tensor | None]) -> Tensor:
        return scores[0].float()

    def greedy(self, scores: Tensor, frames: Tensor) -> list[TokenSpans]:
        rows = scores.float().cpu().numpy()
        search = TransducerSearch(TorchJoint(self.keys.transducer, self.keys.blank_index), len(rows))
        return search.feed([row[:count] for row, count in zip(rows, frames.tolist(), strict=True)])

    def prepare_search(self, search: TransducerBeam) -> TransducerBeam:
        search.joint = TorchJoint(self.keys.transducer, self.keys.blank_index)
        return super().prepare_search(search)

    def exported(self, run: Path) -> ExportedTransducer:
        from sbkit.tasks.transducer.exported import ExportedTransducer

        return ExportedTransducer.of(self.recognizer, self.keys)


def _head_fits(keys: TransducerKeys, built: Built, findings: Findings) -> bool:
    """Check that the joint network has the recipe's vocabulary and blank."""
    node, fits = built.nodes["transducer"], True
    for name, key in (("vocabulary", "output_neurons"), ("blank", "blank_index")):
        mine, theirs = getattr(keys.transducer, name), getattr(keys, key)
        if mine != theirs:
            findings.error("vocabulary", node.place_of(name), node.key_of(name), f"it is {mine}, but {key} is {theirs}",
                           f"write `{name}: !ref <{key}>`")
            fits = False
    return fits
