"""The task of speech enhancement: noisy waveforms to what they would be without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from speechbrain.core import Stage
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.data.columns import Declared, SignalColumn
from sbkit.nn.enhance.ratios import si_snr, snr
from sbkit.tasks.enhance.keys import EnhancementKeys
from sbkit.tasks.enhance.results import Enhanced, EnhancedRow, measures
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.listening import Drawn, first_drawn, stoi
from sbkit.tasks.task import Metric, Task
from sbkit.train.step import Loss

if TYPE_CHECKING:
    from sbkit.tasks.enhance.exported import ExportedEnhancer


class Enhancement(Task):
    """The Brain of ``hparams/enhance.yaml``.

    - Its target is the column ``clean``; where the corpus names none, the recording itself, to which ``augment``,
      ``valid_augment`` and ``test_augment`` add noise.
    - The loss is the negative mean of SI-SNR and SNR, of which the second keeps the speech as loud as it was.
    - The best checkpoint improves the SI-SNR of whole validation clips most.
    """

    Keys: ClassVar[type[TaskKeys]] = EnhancementKeys
    parts = ("enhancer", "modules")
    columns: ClassVar[Declared] = {"clean": SignalColumn(or_recording=True)}
    metric = Metric("SI_SNRi", lower_is_better=False)
    keys: EnhancementKeys

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        """Say how long a stream waits for its samples."""
        enhancer, rate = self.keys.enhancer, self.keys.sample_rate
        seconds = (enhancer.delay + enhancer.hop) / rate
        return [f"live, a sample comes {1000 * seconds:g} ms after it was heard"], {"latency": seconds}

    def compute_forward(self, batch: Batch, stage: Stage) -> Tensor:
        """Enhance waveforms [B, S]."""
        return self.keys.enhancer(batch.signals, batch.signal_lengths)

    def compute_objectives(self, sound: Tensor, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, a sum over utterances, and their number."""
        clean, lengths, most = batch.columns["clean"].data, batch.signal_lengths, self.keys.most_decibels
        if stage != Stage.TRAIN and batch.weight:
            self.rows += self._rows(sound, clean, batch, stage)
        ratios = si_snr(sound, clean, lengths, most), snr(sound, clean, lengths, most)
        return Loss(-(ratios[0] + ratios[1]).sum() / 2, len(batch), {"si_snr": (ratios[0].sum(), len(batch))})

    # ------------------------------------------------------------ validation and test

    def open_stage(self, stage: Stage, epoch: int | None = None) -> None:
        """Begin to listen anew."""
        self._drawn = Drawn()
        super().open_stage(stage, epoch)

    def _rows(self, sound: Tensor, clean: Tensor, batch: Batch, stage: Stage) -> list[EnhancedRow]:
        """Return what became of each utterance of a batch."""
        lengths = batch.signal_lengths
        ratios = (si_snr(signals, clean, lengths).tolist() for signals in (batch.signals, sound))
        rows = list(map(EnhancedRow, batch.ids, batch.texts, lengths.tolist(), *ratios))
        if stage != Stage.TEST:
            return rows
        waves = [signals.cpu().numpy() for signals in (batch.signals, sound, clean)]
        return [self._heard(row, [wave[i, :row.samples] for wave in waves]) for i, row in enumerate(rows)]

    def _heard(self, row: EnhancedRow, waves: Sequence[np.ndarray]) -> EnhancedRow:
        """Measure how intelligible a test clip is, and keep its noisy, enhanced and clean sound if it was drawn."""
        noisy, sound, clean = waves
        rate, peak = self.keys.sample_rate, max(1.0, *(float(np.abs(wave).max()) for wave in waves))
        return row._replace(stoi_before=stoi(clean, noisy, rate), stoi=stoi(clean, sound, rate),
                            sound=self._drawn.take(row.id, np.stack(waves) / peak, row.after - row.before))

    def stats(self, rows: Sequence[EnhancedRow]) -> dict[str, float]:
        """Compute means over utterances."""
        return measures(rows)

    def results(self, rows: Sequence[EnhancedRow], loss: float, unread: Mapping[str, str]) -> Enhanced:
        return Enhanced.of(first_drawn(rows, lambda row: row.after - row.before), loss, unread, self.keys.sample_rate)

    # ------------------------------------------------------------ export

    def exported(self, run: Path) -> ExportedEnhancer:
        from sbkit.tasks.enhance.exported import ExportedEnhancer

        return ExportedEnhancer.of(self.keys.enhancer, self.keys.sample_rate)
