"""What every recogniser does around its loss: transcribe, score, log, keep the best checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from speechbrain.core import Stage

from sbkit.score.edits import count
from sbkit.train.brain import Brain


class Row(NamedTuple):
    """One utterance of validation or test, as it was heard."""

    id: str
    reference: str
    hypothesis: str
    seconds: float


class ASR(Brain):
    """A Brain that scores words. A task fills ``self.rows`` in validation and test.

    The recipe's keys it reads: ``schedule`` (learning rate), ``train_logger``, ``epoch_counter``,
    ``keep_checkpoints`` (best by WER), ``tokenizer``.
    """

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._set_rate()

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        if should_step:
            self._set_rate()

    def _set_rate(self) -> None:
        schedule = getattr(self.hparams, "schedule", None)
        if schedule is not None and self.opt_class is not None:
            schedule.apply(self.optimizer, self.optimizer_step + 1)

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        self.rows: list[Row] = []

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage == Stage.TRAIN:
            self.train_stats = {"loss": stage_loss}
            return
        rows = sorted(self.gather(self.rows))
        stats = {"loss": stage_loss, **error_rates(rows)}
        if stage == Stage.VALID:
            self._end_epoch(epoch, stats)
        else:
            self.hparams.train_logger.log_stats({"Epoch loaded": self.hparams.epoch_counter.current}, test_stats=stats)
            self.test_rows, self.test_stats = rows, stats

    def _end_epoch(self, epoch: int | None, stats: dict[str, float]) -> None:
        meta = {"epoch": epoch, "steps": self.optimizer_step}
        if self.opt_class is not None:
            meta["lr"] = self.optimizer.param_groups[0]["lr"]
        self.hparams.train_logger.log_stats(meta, train_stats=self.train_stats, valid_stats=stats)
        if self.checkpointer is not None:
            self.checkpointer.save_and_keep_only(
                meta={"WER": stats["WER"], "loss": stats["loss"], "epoch": epoch}, min_keys=["WER"],
                num_to_keep=getattr(self.hparams, "keep_checkpoints", 1),
            )


def error_rates(rows: list[Row]) -> dict[str, float]:
    """Word and character error rates in per cent over all rows together."""
    rates = {}
    for name, split in (("WER", str.split), ("CER", list)):
        references = [split(row.reference) for row in rows]
        edits = count(references, [split(row.hypothesis) for row in rows]).edits.sum()
        rates[name] = 100.0 * float(edits) / max(1, sum(map(len, references)))
    return rates


def write_transcripts(rows: list[Row], path: Path) -> None:
    """Tab-separated id, reference, hypothesis."""
    from sbkit.console import atomic_write

    with atomic_write(path) as out:
        out.write("id\treference\thypothesis\n")
        out.writelines(f"{r.id}\t{r.reference}\t{r.hypothesis}\n" for r in rows)
