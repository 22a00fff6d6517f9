"""The task of speech enhancement: noisy waveforms to clean ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from speechbrain.core import Stage
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.data.columns import Declared, SignalColumn
from sbkit.nn.enhance.enhancer import si_snr, snr
from sbkit.score.results import Table
from sbkit.system.console import counted
from sbkit.tasks.enhance.keys import EnhancementKeys
from sbkit.tasks.generation import ClipSampler, SoundResults, drop_other_sounds, means, stoi
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.task import Metric, Task
from sbkit.train.loss import Loss

if TYPE_CHECKING:
    from sbkit.tasks.enhance.exported import ExportedEnhancer


#: Limits in decibels of the groups of noisy recordings in the table of results.
_EDGES = (0.0, 5.0, 10.0, 15.0)


class EnhancedRow(NamedTuple):
    """An utterance; None: not measured."""

    id: str
    reference: str
    samples: int
    before: float
    """SI-SNR of the noisy recording, in decibels."""
    after: float
    stoi_before: float | None = None
    stoi: float | None = None
    sound: np.ndarray | None = None  # noisy, enhanced and clean, [3, S] int16, of the sample clips


def measures(rows: Sequence[EnhancedRow]) -> dict[str, float]:
    """Compute the means of all measures over utterances."""
    if not rows:
        return {}
    return {"SI_SNRi": float(np.mean([row.after - row.before for row in rows])),
            **means(rows, SI_SNR="after", STOI="stoi", STOI_of_noisy="stoi_before")}


@dataclass
class EnhancementResults(SoundResults):
    """Rows of a test, and their statistics."""

    rows: Sequence[EnhancedRow] = ()
    maker: ClassVar[str] = "enhanced"

    @classmethod
    def of(cls, rows: Sequence[EnhancedRow], loss: float, unread: Mapping[str, str],
           sample_rate: int) -> EnhancementResults:
        """Compute the results of a test from its rows."""
        found = cls({"loss": loss, **measures(rows)}, len(rows), dict(unread), sample_rate=sample_rate, rows=rows)
        lines = []
        for low, high in zip((-np.inf, *_EDGES), (*_EDGES, np.inf), strict=True):
            some = [row for row in rows if low <= row.before < high]
            if some:
                stats = measures(some)
                lines.append([f"{low:g} to {high:g} dB".replace("-inf to", "below").replace("to inf dB", "dB and more"),
                              len(some), *(f"{stats[name]:.3g}" if name in stats else "" for name in (
                                  "SI_SNR", "SI_SNRi", "STOI_of_noisy", "STOI"))])
        found.tables = [Table("By the SI-SNR of the noisy recording", [
            "noisy SI-SNR", "utterances", "SI-SNR, dB", "improvement, dB", "noisy STOI", "STOI"], lines)]
        return found

    def headline(self) -> str:
        parts = [f"SI-SNR {self.stats['SI_SNR']:.2f} dB, improved by {self.stats['SI_SNRi']:.2f} dB"]
        if self.estimate is not None and self.estimate.interval is not None:
            parts[0] += " (95 % interval {:.2f} to {:.2f})".format(*self.estimate.interval)
        if "STOI" in self.stats:
            parts.append(f"STOI {self.stats['STOI']:.3f} (noisy {self.stats['STOI_of_noisy']:.3f})")
        return ", ".join([*parts, counted(self.utterances, "utterance")])

    def remark(self, row: EnhancedRow) -> str:
        intelligibility = "" if row.stoi is None else f" · STOI {row.stoi_before:.3f} to {row.stoi:.3f}"
        return f"SI-SNR {row.before:.1f} to {row.after:.1f} dB{intelligibility} · {row.id}"

    def sounds(self, row: EnhancedRow) -> Mapping[str, np.ndarray]:
        assert row.sound is not None, "only clips that were kept get here"
        return dict(zip(("noisy", self.maker, "clean"), row.sound, strict=True))


class Enhancement(Task):
    """The Brain of ``hparams/enhance.yaml``.

    - Its target is the column ``clean``. If the corpus has none, it is the recording itself, to which ``augment``,
      ``valid_augment`` and ``test_augment`` add noise.
    - The loss is the negative mean of SI-SNR and SNR; the second preserves the level of the speech.
    - The best checkpoint is the one with the largest improvement of the SI-SNR of whole validation clips.
    """

    capturable: ClassVar[bool] = True
    Keys: ClassVar[type[TaskKeys]] = EnhancementKeys
    parts = ("enhancer", "modules")
    columns: ClassVar[Declared] = {"clean": SignalColumn(or_recording=True)}
    metric = Metric("SI_SNRi", lower_is_better=False)
    counts_real_rows: ClassVar[bool] = True
    keys: EnhancementKeys

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        """Describe the latency on a stream."""
        enhancer, rate = self.keys.enhancer, self.keys.sample_rate
        seconds = (enhancer.delay + enhancer.hop) / rate
        return [f"latency on a stream: {1000 * seconds:g} ms"], {"latency": seconds}

    def compute_forward(self, batch: Batch, stage: Stage) -> Tensor:
        """Enhance waveforms [B, S]."""
        return self.keys.enhancer(batch.signals, batch.signal_lengths)

    def compute_objectives(self, sound: Tensor, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, a sum over utterances, and their number."""
        clean = batch.columns["clean"].data
        if stage != Stage.TRAIN and batch.weight:
            self.rows += self._rows(sound, clean, batch, stage)
        by_shape, by_level = (
            torch.where(batch.real, ratio(sound, clean, batch.signal_lengths, self.keys.max_db), 0.0).sum()
            for ratio in (si_snr, snr))
        count = batch.real.sum()
        return Loss(-(by_shape + by_level) / 2, count, {"si_snr": (by_shape, count)})

    # ------------------------------------------------------------ validation and test

    def open_stage(self, stage: Stage, epoch: int | None = None) -> None:
        self._clips = ClipSampler()
        super().open_stage(stage, epoch)

    def _rows(self, sound: Tensor, clean: Tensor, batch: Batch, stage: Stage) -> list[EnhancedRow]:
        """Make the row of each utterance of a batch."""
        lengths = batch.signal_lengths
        ratios = (si_snr(signals, clean, lengths).tolist() for signals in (batch.signals, sound))
        rows = list(map(EnhancedRow, batch.ids, batch.texts, lengths.tolist(), *ratios))
        if stage != Stage.TEST:
            return rows
        waves = [signals.cpu().numpy() for signals in (batch.signals, sound, clean)]
        return [self._measured(row, [wave[i, :row.samples] for wave in waves]) for i, row in enumerate(rows)]

    def _measured(self, row: EnhancedRow, waves: Sequence[np.ndarray]) -> EnhancedRow:
        """Measure how intelligible a test clip is, and keep its noisy, enhanced and clean sound if it is a sample."""
        noisy, sound, clean = waves
        rate, peak = self.keys.sample_rate, max(1.0, *(float(np.abs(wave).max()) for wave in waves))
        return row._replace(stoi_before=stoi(clean, noisy, rate), stoi=stoi(clean, sound, rate),
                            sound=self._clips.keep(row.id, np.stack(waves) / peak, row.after - row.before))

    def stats(self, rows: Sequence[EnhancedRow]) -> dict[str, float]:
        """Compute means over utterances."""
        return measures(rows)

    def results(self, rows: Sequence[EnhancedRow], loss: float, unread: Mapping[str, str]) -> EnhancementResults:
        kept = drop_other_sounds(rows, lambda row: row.after - row.before)
        return EnhancementResults.of(kept, loss, unread, self.keys.sample_rate)

    # ------------------------------------------------------------ export

    def exported(self, run: Path) -> ExportedEnhancer:
        from sbkit.tasks.enhance.exported import ExportedEnhancer

        return ExportedEnhancer.of(self.keys.enhancer, self.keys.sample_rate)
