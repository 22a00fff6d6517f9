"""The task of a codec: a low bit rate of codes, and speech decoded from them that sounds like the recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from speechbrain.core import Stage
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.nn.codec.coder import CodecOutput, Coder
from sbkit.nn.codec.spectral_loss import DECIBELS, MelDistance
from sbkit.nn.lengths import lengths_to_mask
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.tasks.codec.keys import CodecKeys
from sbkit.tasks.codec.results import CodecFacts, CodecResults, CodecRow, measures, pesq
from sbkit.tasks.generation import Fit, SpeechTest, all_fit, drop_other_sounds, stoi, unpadded
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.task import Metric, Task
from sbkit.train.loss import Loss

if TYPE_CHECKING:
    from sbkit.nn.codec import Discriminators
    from sbkit.tasks.codec.exported import ExportedCodec


#: The frames of the mel spectra whose distance is the metric, the same for every recipe, in seconds, and their bands.
FRAME, HOP, BANDS = 0.04, 0.01, 80


class Codec(Task):
    """The Brain of ``hparams/codec.yaml``.

    - The loss is the distance of spectra at several resolutions, a mean over code frames.
    - ``quantiser`` is a ``FiniteScalars``, or a ``ResidualVectors``, whose penalty is added to the loss.
    - ``adversarial_from: 20000`` trains discriminators too, and from that step on the codec against them: for a GPU and
      a large corpus. There is one loss and one update: the discriminators' term gets the codec's output detached, and
      the codec's term gets no gradients for the discriminators' parameters.
    - The best checkpoint is the one with the least distance of mel spectra of whole validation clips.
    """

    capturable: ClassVar[bool] = True
    Keys: ClassVar[type[TaskKeys]] = CodecKeys
    parts = ("compute_features", "encoder", "quantiser", "decoder", "head", "spectral_loss", "modules")
    metric = Metric("mel_distance")
    counts_real_rows: ClassVar[bool] = True
    generates_speech = True
    keys: CodecKeys
    speech_test: SpeechTest

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        keys, rate = self.keys, self.keys.sample_rate
        self.coder = Coder(keys.compute_features, keys.encoder, keys.quantiser, keys.decoder, keys.head)
        self.mel_distance = MelDistance(rate, round(FRAME * rate), round(HOP * rate), BANDS).to(self.device)
        self.books = CodecFacts(keys.quantiser.sizes, self.coder.bit_rate, rate)

    @classmethod
    def check_parts(cls, keys: CodecKeys, built: Built, findings: Findings) -> bool:
        """Check that the sizes of the parts match."""
        features, encoder, quantiser, decoder, head = (keys.compute_features, keys.encoder, keys.quantiser,
                                                       keys.decoder, keys.head)
        sizes = [
            Fit("compute_features", "sample_rate", features.sample_rate, keys.sample_rate,
                "recordings are read at {}"),
            Fit("encoder", "fold", encoder.fold, features.fold, "compute_features makes {} frames for each code"),
            Fit("encoder", "output_size", encoder.output_size, quantiser.size,
                "the quantiser takes {} numbers a frame"),
            Fit("decoder", "input_size", decoder.input_size, quantiser.size, "the quantiser gives {} numbers a frame"),
            Fit("head", "input_size", head.input_size, decoder.size, "the decoder's states have {} numbers"),
            Fit("head", "hop", head.hop * decoder.fold, features.stride,
                "a code frame has {} samples, which must be decoder's fold times head's hop"),
        ]
        return all_fit(sizes, built, findings)

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        """Describe the rate of codes and of bits."""
        rate, sizes = self.keys.compute_features.frame_rate, self.keys.quantiser.sizes
        books = " and ".join(f"one of {size:,} codes" for size in sizes)
        return ([f"{rate:g} frames a second, each with {books}: {self.coder.bit_rate:.0f} bit/s"],
                {"frames_per_second": rate, "sizes": list(sizes), "bit_rate": self.coder.bit_rate})

    # ------------------------------------------------------------ training

    def compute_forward(self, batch: Batch, stage: Stage) -> CodecOutput:
        """Encode waveforms [B, S], and decode the codes."""
        if stage != Stage.TEST:
            return self.coder(batch.signals, batch.signal_lengths)
        with self.speech_test.timed(batch.signals.device):
            return self.coder(batch.signals, batch.signal_lengths)

    def compute_objectives(self, outputs: CodecOutput, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, a sum over code frames, and their number."""
        frames = outputs.frames * batch.real
        count = frames.sum()
        width = batch.signals.shape[1]  # the recordings' samples, and 0 beyond an utterance's end: [B, S]
        sound = outputs.sound[:, :width] * lengths_to_mask(batch.signal_lengths, width)
        spectral = (self.keys.spectral_loss(sound, batch.signals, batch.signal_lengths) * frames).sum()
        inside = lengths_to_mask(frames, outputs.quantised.penalty.shape[1])
        total = spectral + self.keys.quantiser_weight * (outputs.quantised.penalty * inside).sum()

        if stage != Stage.TRAIN:
            if batch.weight:
                self.rows += self._rows(outputs, sound, batch, stage)
            return Loss(total, count)
        extras = {"spectral": (spectral, count)}
        if not self.keys.adversarial_from:
            return Loss(total, count, extras)
        if self.optimizer_step < self.keys.adversarial_from:
            return Loss(total + self._discriminators.idle(), count, extras)
        term, sums = self._adversarial(sound, batch, frames)
        return Loss(total + term, count, extras | {name: (part, count) for name, part in sums.items()})

    @property
    def _discriminators(self) -> Discriminators:
        discriminators = self.keys.discriminators
        assert discriminators is not None, "the keys would clash"
        return discriminators

    def _adversarial(self, sound: Tensor, batch: Batch, frames: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the losses of codec and discriminators against each other, summed over code frames.

        Returns the term of the loss, and its parts by their names in the logs.
        """
        keys = self.keys
        discriminators = self._discriminators
        signals = sound, batch.signals, batch.signal_lengths
        adversarial, feature_distance = discriminators.generator_losses(*signals)
        # Names in the logs of earlier runs.
        parts = {"noticed": adversarial, "apart": feature_distance,
                 "mistaken": discriminators.discriminator_loss(*signals)}
        sums = {name: (part * frames).sum() for name, part in parts.items()}
        term = keys.adversarial_weight * sums["noticed"] + keys.feature_weight * sums["apart"] + sums["mistaken"]
        return term, sums

    def graph_key(self) -> bool:
        """Return whether the next step trains the codec against the discriminators."""
        return bool(self.keys.adversarial_from) and self.optimizer_step >= self.keys.adversarial_from

    # ------------------------------------------------------------ validation and test

    def _rows(self, outputs: CodecOutput, sound: Tensor, batch: Batch, stage: Stage) -> list[CodecRow]:
        """Make the row of each utterance of a batch."""
        distances = DECIBELS * self.mel_distance(sound, batch.signals, batch.signal_lengths)
        values = zip(batch.ids, batch.texts, batch.signal_lengths.tolist(), distances.tolist(), outputs.frames.tolist(),
                     outputs.quantised.codes.cpu().numpy(), strict=True)
        rows = [CodecRow(name, text, samples, distance, codes[:frames].astype(np.int32))
                for name, text, samples, distance, frames, codes in values]
        if stage != Stage.TEST:
            return rows

        recordings = unpadded(batch.signals, batch.signal_lengths)
        decoded = unpadded(sound, batch.signal_lengths)
        rate = self.keys.sample_rate
        measured = []
        for row, before, after in zip(self.speech_test.complete(rows, recordings, decoded), recordings, decoded,
                                      strict=True):
            measured.append(row._replace(stoi=stoi(before, after, rate), pesq=pesq(before, after, rate)))
        return measured

    def stats(self, rows: Sequence[CodecRow]) -> dict[str, float]:
        """Compute the mel distance and the use of the codebooks."""
        return measures(rows, self.books)

    def results(self, rows: Sequence[CodecRow], loss: float, unread: Mapping[str, str]) -> CodecResults:
        return CodecResults.of(drop_other_sounds(rows), loss, unread, self.books)

    # ------------------------------------------------------------ export

    def exported(self, run: Path) -> ExportedCodec:
        from sbkit.tasks.codec.exported import ExportedCodec

        return ExportedCodec.of(self.coder.eval())
