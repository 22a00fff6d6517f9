"""What every recogniser does around its loss: transcribe, score, log, keep the best checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from speechbrain.core import Stage

from sbkit.errors import SbkitError
from sbkit.score.rates import ErrorRates
from sbkit.tasks.hearing import Hearing
from sbkit.tasks.learning_alarm import LearningAlarm
from sbkit.tasks.learning_notice import Notice, Setup
from sbkit.train.averaging import average
from sbkit.train.brain import Brain
from sbkit.train.distributed import ranks, sharding
from sbkit.train.step import Facts

logger = logging.getLogger(__name__)

NAMED = 5
"""Recordings named where some could not be read."""


class Choice(NamedTuple):
    """One transcript that a search found, with natural logarithms: what it sorts by, and the sound's part of it."""

    text: str
    score: float
    acoustic: float


def choices(found: Sequence[Any]) -> tuple[Choice, ...]:
    """Of the hypotheses of an utterance what a row keeps."""
    return tuple(Choice(one.text, one.score, one.acoustic) for one in found)


class Row(NamedTuple):
    """One utterance of validation or test, as it was heard."""

    id: str
    reference: str
    hypothesis: str
    confidence: float | None = None  # 0 to 1; None where nothing was heard, or the task does not say
    nbest: Sequence[Choice] = ()  # of a search, the hypothesis first


class ASR(Brain):
    """A Brain that scores words. A task fills ``self.rows`` in validation and test.

    Keys of ``hparams`` that it reads beside the Brain's:

    tokenizer, train_logger, epoch_counter : as SpeechBrain's recipes have them
    schedule : a ``sbkit.train.schedule.Schedule`` of the learning rate, or nothing
    keep_checkpoints : how many of the best by WER stay beside the last (1)
    keep_every : also keep the checkpoint of every so many epochs for good
    average_checkpoints : test the mean of this many of the best, where that is more than 1
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self._ema is not None and getattr(self.hparams, "average_checkpoints", 1) > 1:
            raise SbkitError("ema and average_checkpoints both average weights",
                             hint="use one of them: ema_decay: 0, or average_checkpoints: 1")
        self.hearing = Hearing()
        """Its ``chance`` is to be said before ``fit``, where a part of the recipe is to follow what is heard."""
        self.alarm = LearningAlarm()
        """Its ``planned`` is to be said before ``fit``."""
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("hearing", self.hearing, optional_load=True)
            self.checkpointer.add_recoverable("alarm", self.alarm, optional_load=True)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        super().fit(*args, **kwargs)
        if not self.test_only:
            self._tell(self.alarm.end(self.optimizer_step))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        masks = getattr(self.hparams, "spec_augment", None)
        self.alarm.setup = Setup(self._ema is not None, self.max_grad_norm,
                                 masks is not None and getattr(masks, "ramp", None) is None)
        self._begin_step(self.optimizer_step + 1)

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        if should_step:
            self._begin_step(self.optimizer_step + 1)

    def on_step_known(self, facts: Facts) -> None:
        self.alarm.count(facts.extras)
        total, tokens = facts.extras.get("ctc", (facts.total, facts.count))
        self.hearing.count(facts.number, total, tokens)

    def _begin_step(self, step: int) -> None:
        """The learning rate and the strength of what makes the task harder, for the step to come."""
        schedule, rate = getattr(self.hparams, "schedule", None), None
        if schedule is not None and self.opt_class is not None:
            rate = schedule.apply(self.optimizer, step)
        heard = self.hearing.at(step)
        harder = getattr(self.hparams, "spec_augment", None)
        if self.hearing.known and hasattr(harder, "follow"):
            harder.follow(heard)
        self._tell(self.alarm.look(step, self.hearing, rate))

    def _tell(self, notices: Iterable[Notice]) -> None:
        """What all ranks know, on one."""
        for notice in notices:
            if ranks.is_main():
                logger.log(logging.WARNING if notice.holds else logging.INFO, "%s", notice.text())
            if self.metrics_log is not None:
                self.metrics_log.write("warning", **notice._asdict())

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        count = getattr(self.hparams, "average_checkpoints", 1)
        if self.checkpointer is not None and count > 1:
            state, used = average(self.checkpointer, "model", count, max_key=max_key, min_key=min_key)
            sharding.take(self.hparams.model, state)
            logger.info("Testing the average of %d checkpoints", len(used))

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        self.rows: list[Row] = []
        self._unread: dict[str, str] = {}

    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        self._unread.update(getattr(batch, "damaged", ()))
        return super().evaluate_batch(batch, stage)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage == Stage.TRAIN:
            self.train_stats = {"loss": stage_loss}
            return
        rows, unread = self.all_rows(), dict(self.gather(self._unread.items()))
        words, characters = score(rows)
        stats = {"loss": stage_loss, "WER": words.rate, "CER": characters.rate}
        if unread:  # a rate without them is never shown alone
            stats["unread"] = len(unread)
            logger.warning("%s", tell_unread(stage.name.lower(), unread, len(rows)))
        if stage == Stage.VALID:
            empty = sum(not row.hypothesis.strip() for row in rows)
            self._tell(self.alarm.validated(self.optimizer_step, empty, len(rows), characters.rate))
            self._end_epoch(epoch, stats)
        else:
            epoch = self.hparams.epoch_counter.current
            self.hparams.train_logger.log_stats({"Epoch loaded": epoch}, test_stats=stats)
            self._measured("test", epoch, stats)
            self.test_words, self.test_characters, self.test_rows, self.test_unread = words, characters, rows, unread

    def all_rows(self) -> list[Row]:
        """The rows of all ranks by id, on every rank."""
        return sorted(self.gather(self.rows), key=lambda row: row.id)

    def _measured(self, kind: str, epoch: int | None, stats: dict[str, float]) -> None:
        if self.metrics_log is not None:
            prefix = "valid" if kind == "epoch" else "test"
            self.metrics_log.write(kind, epoch=epoch, step=self.optimizer_step,
                                   **{f"{prefix}_{name}": value for name, value in stats.items()})

    def _end_epoch(self, epoch: int | None, stats: dict[str, float]) -> None:
        meta = {"epoch": epoch, "steps": self.optimizer_step}
        if self.opt_class is not None:
            meta["lr"] = self.optimizer.param_groups[0]["lr"]
        self.hparams.train_logger.log_stats(meta, train_stats=self.train_stats, valid_stats=stats)
        self._measured("epoch", epoch, stats)
        if self.checkpointer is not None:
            self.checkpointer.save_and_keep_only(
                meta={"WER": stats["WER"], "loss": stats["loss"], "epoch": epoch}, min_keys=["WER"],
                num_to_keep=getattr(self.hparams, "keep_checkpoints", 1),
                keep_every=getattr(self.hparams, "keep_every", None) or None,
            )


def tell_unread(split: str, unread: dict[str, str], read: int) -> str:
    """What error rates are without: ``unread`` (id -> why) beside the utterances that were ``read``.

    >>> tell_unread("test", {"b": "b.wav: no such file"}, 1999)
    '1 of 2,000 test utterances could not be read and is not scored: b.wav: no such file'
    """
    some = "; ".join(list(unread.values())[:NAMED])
    more = f" and {len(unread) - NAMED} more" if len(unread) > NAMED else ""
    return (f"{len(unread):,} of {read + len(unread):,} {split} utterances could not be read and "
            f"{'is' if len(unread) == 1 else 'are'} not scored: {some}{more}")


def score(rows: list[Row]) -> tuple[ErrorRates, ErrorRates]:
    """Word and character error rates. An utterance without a reference has nothing to score, and is named."""
    empty = [row.id for row in rows if not row.reference.split()]
    if empty:
        logger.warning("%d utterances have no reference and are not scored: %s", len(empty), ", ".join(empty[:5]))
    scored = [(row.id, row.reference, row.hypothesis) for row in rows if row.reference.split()]
    words, characters = ErrorRates("word"), ErrorRates("character")
    if scored:
        words.add(*zip(*scored, strict=True))
        characters.add(*zip(*scored, strict=True))
    return words, characters
