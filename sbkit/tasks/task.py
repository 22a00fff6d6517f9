"""What a task is: the class that a recipe names under ``brain``, and all that others may ask of it.

The check, the bill, tune, training, evaluation, the report and export know no task. They ask the class for its keys and
stand-in batches, run its own ``compute_forward`` and ``compute_objectives``, and show and keep what it says came out.
``docs/extend.md`` makes one from nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from speechbrain.core import Stage

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.data.reader import Encoder
from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.trace import Trace
from sbkit.runs.evaluation import EvaluateRequest
from sbkit.runs.initial.vocabulary import TokenTables
from sbkit.score.metric import Metric
from sbkit.score.results import Results, tell_unread
from sbkit.tasks import start
from sbkit.tasks.keys import TaskKeys
from sbkit.train.averaging import load_mean
from sbkit.train.brain import Brain

if TYPE_CHECKING:
    from sbkit.export.exported import Exported

__all__ = ["Metric", "Task"]

logger = logging.getLogger(__name__)


class Task(Brain):
    """A Brain that ``sbkit train`` runs. A task derives from it and writes at least the two methods of every Brain,

        compute_forward(batch, stage), compute_objectives(outputs, batch, stage)

    and, of what follows, whatever differs from what stands here. ``self.keys`` has the recipe's values, and so have the
    ``keys`` of what is called before there is a model: an object of the class under ``Keys``.

    The hooks ``begin_run``, ``begin_step``, ``validated`` and those that are empty in SpeechBrain (``on_stage_start``,
    ``on_stage_end``, ``on_fit_batch_start``, ``on_fit_batch_end``) do nothing here, so none has to call ``super()``.
    What a task does around them is in the methods ``open_...`` and ``close_...``, which are not meant to be overridden
    in a recipe's own class.
    """

    Keys: ClassVar[type[TaskKeys]] = TaskKeys
    parts: ClassVar[tuple[str, ...]] = ("modules",)
    """Keys without whose objects no batch can be sent through."""
    metric: ClassVar[Metric] = Metric("loss")
    keys: TaskKeys

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rows: list[Any] = []
        """What is known of each utterance of this rank's validation or test, each with an ``id``; ``evaluate_batch``
        or ``compute_objectives`` fills it."""
        self.learning_rate: float | None = None
        """Of the current step, as the schedule set it; None without a schedule."""
        self._unread: dict[str, str] = {}
        for clash in self.keys.clashes():
            raise SbkitError(clash.message, hint=clash.hint)
        if self.averages_weights and self.keys.average_checkpoints > 1:
            raise SbkitError("ema and average_checkpoints both average weights",
                             hint="use one of them: ema_decay: 0, or average_checkpoints: 1")

    # ------------------------------------------------------------ before the model is there

    @classmethod
    def prepare(cls, keys: Any, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Make what rests on the corpus (a vocabulary, statistics); one rank does it, before the model is built.

        given : what was overridden on the command line

        Gives the keys whose values follow from the corpus, with which the recipe is then read once more.
        """
        del keys, manifests, given
        return {}

    @classmethod
    def is_prepared(cls, keys: Any) -> bool:
        """Whether what ``prepare`` makes is there."""
        del keys
        return True

    @classmethod
    def encoder(cls, keys: Any) -> Encoder | None:
        """What makes of an utterance's text the ``tokens`` of its batch, in the processes that read; None: no tokens.

        Anything with ``encode(text) -> list[int]`` that can be pickled.
        """
        del keys
        return None

    @classmethod
    def check_parts(cls, keys: Any, built: Built, findings: Findings) -> bool:
        """Look at what a recipe built before any batch is sent through; False where none can be."""
        del keys, built, findings
        return True

    @classmethod
    def check_outputs(cls, trace: Trace, findings: Findings) -> None:
        """Look at what was built and at what a batch of stand-ins gave on its way, as far as it came."""

    @classmethod
    def check_start(cls, trace: Trace, findings: Findings) -> None:
        """Look at what a run is to start from, as far as that can be done before its corpus is prepared."""
        start.check(trace, findings)

    @classmethod
    def check_labels(cls, keys: Any, manifests: Mapping[str, Manifest], findings: Findings,
                     nodes: Mapping[str, Node]) -> Section | None:
        """Look at the labels of a prepared corpus; gives what of it is worth a table.

        nodes : where the recipe's keys are written; none while a run starts
        """
        del keys, manifests, findings, nodes
        return None

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        """What is worth saying below the table of shapes, in words and as numbers for programs."""
        return [], {}

    @classmethod
    def look_at_texts(cls, keys: Any, texts: Sequence[str]) -> None:
        """Tell of texts of a corpus that is to be scored, where they can't come out right."""

    # ------------------------------------------------------------ where it starts

    def token_tables(self) -> TokenTables | None:
        """The tensors that have a row for each token, which follow another vocabulary row by row; None: none have."""
        return None

    # ------------------------------------------------------------ training

    def stand_in(self, utterances: int, seconds: float, *, noise: bool = False) -> Batch:
        """A batch of so many utterances of so many seconds, for whoever asks what a step needs or does.

        noise : its values matter: waveforms of noise, and labels at random; else they may be anything
        """
        samples, labels = round(seconds * self.keys.sample_rate), max(1, round(seconds * self.labels_per_second))
        size = (utterances, samples)
        return Batch(
            ids=[f"stand-in {i}" for i in range(utterances)], texts=[""] * utterances, samples=utterances * samples,
            signals=0.1 * torch.randn(size) if noise else torch.empty(size),
            signal_lengths=torch.full((utterances,), samples), tokens=self.stand_in_labels((utterances, labels), noise),
            token_lengths=torch.full((utterances,), labels), sample_rate=self.keys.sample_rate,
        )

    @property
    def labels_per_second(self) -> float:
        """How many labels a second of a usual utterance has; it has at least one."""
        return 0.0

    def stand_in_labels(self, shape: tuple[int, int], noise: bool) -> torch.Tensor:
        """Labels that may occur, of this shape."""
        del noise
        return torch.ones(shape, dtype=torch.long)

    def begin_run(self, texts: Sequence[str], steps: int) -> None:
        """Called before ``fit``, when it is known what is trained on and in how many optimizer steps."""

    def begin_step(self, step: int) -> None:
        """Called before each optimizer step, counted from 1, with its learning rate set."""

    def open_run(self, texts: Sequence[str], steps: int) -> None:
        """Take in what is trained on and in how many optimizer steps."""
        if self.keys.schedule is not None:
            self.keys.schedule.total_steps = steps
        self.begin_run(texts, steps)

    def open_step(self, number: int) -> None:
        """Set the learning rate."""
        if self.keys.schedule is not None and self.opt_class is not None:
            self.learning_rate = self.keys.schedule.apply(self.optimizer, number)
        self.begin_step(number)

    # ------------------------------------------------------------ what came out

    @property
    def shares_validation(self) -> bool:
        """Always: the rows of all ranks are put together, so no utterance may be seen by two of them."""
        return True

    def open_stage(self, stage: Stage, epoch: int | None = None) -> None:
        """Begin without rows."""
        self.rows, self._unread = [], {}
        super().open_stage(stage, epoch)

    def close_batch(self, batch: Any, stage: Stage) -> None:
        """Take in which recordings of the batch could not be read."""
        self._unread.update(getattr(batch, "damaged", ()))

    def all_rows(self) -> list[Any]:
        """The rows of all ranks by id, on every rank."""
        return sorted(self.gather(self.rows), key=lambda row: row.id)

    def stats(self, rows: Sequence[Any]) -> dict[str, float]:
        """What all rows of a stage come to; the metric is among it unless that is the loss."""
        del rows
        return {}

    def results(self, rows: Sequence[Any], loss: float, unread: Mapping[str, str]) -> Results:
        """What a test came to: for the screen, for files and for the report."""
        return Results({"loss": loss, **self.stats(rows)}, utterances=len(rows), unread=dict(unread))

    def validated(self, rows: Sequence[Any], stats: Mapping[str, float]) -> None:
        """Called on all ranks with the rows of a validation and their ``stats``."""

    def close_validation(self, rows: Sequence[Any], stats: Mapping[str, float]) -> None:
        """Take in what a validation came to."""
        self.validated(rows, stats)

    def close_stage(self, stage: Stage, loss: float, epoch: int | None = None) -> None:
        """Put all ranks' rows together, log what they come to, and save a checkpoint after a validation."""
        if stage == Stage.TRAIN:
            self.train_stats = {"loss": loss}
            super().close_stage(stage, loss, epoch)
            return
        rows, unread = self.all_rows(), dict(self.gather(self._unread.items()))
        if stage == Stage.TEST:
            self.tested = self.results(rows, loss, unread)
            super().close_stage(stage, loss, epoch)
            self._end_test({**self.tested.stats, **({"unread": len(unread)} if unread else {})})
            return
        stats = {"loss": loss, **self.stats(rows)}
        if unread:  # a rate without them is never shown alone
            stats["unread"] = len(unread)
            logger.warning("%s", tell_unread("valid", unread, len(rows)))
        self.close_validation(rows, stats)
        super().close_stage(stage, loss, epoch)
        self._end_epoch(epoch, stats)

    # ------------------------------------------------------------ evaluation

    def take_search(self, request: EvaluateRequest) -> None:
        """Search for results as ``sbkit evaluate`` was asked to."""
        asked = request.search_options()
        if asked:
            raise SbkitError(f"{type(self).__name__} has no search, so it can't take --{asked[0].replace('_', '-')}",
                             hint="leave it out")

    def tune_search(self, manifest: Manifest, hear: Callable[[Manifest], object]) -> dict[str, Any]:
        """Find the search's weights on a dev split, which ``hear`` sends through; what result.json says of it."""
        raise SbkitError(f"{type(self).__name__} has no search to tune", hint="leave out --tune-lm")

    def searching(self) -> contextlib.AbstractContextManager[object]:
        """Around a pass over a test set: a search that is better done over all of it at once waits for its end."""
        return contextlib.nullcontext()

    def search_facts(self) -> dict[str, Any]:
        """What result.json says of the search."""
        return {}

    # ------------------------------------------------------------ export

    def exported(self, run: Path) -> Exported | None:
        """What ``sbkit export`` is to write, of a model in evaluation mode on the CPU in fp32; None: nothing.

        run : the folder that the model was trained in
        """
        del run
        return None

    # ------------------------------------------------------------ what is written down

    def _end_test(self, stats: dict[str, float]) -> None:
        if self.tested.unread:
            logger.warning("%s", tell_unread("test", self.tested.unread, self.tested.utterances))
        epoch = getattr(self.keys.epoch_counter, "current", None)
        if self.keys.train_logger is not None:
            self.keys.train_logger.log_stats({"Epoch loaded": epoch}, test_stats=stats)
        self._write_down("test", epoch, stats)

    def _end_epoch(self, epoch: int | None, stats: dict[str, float]) -> None:
        meta = {"epoch": epoch, "steps": self.optimizer_step}
        if self.opt_class is not None:
            meta["lr"] = self.stepper.learning_rate
        if self.keys.train_logger is not None:
            self.keys.train_logger.log_stats(meta, train_stats=self.train_stats, valid_stats=stats)
        self._write_down("epoch", epoch, stats)
        if self.checkpointer is not None:
            known = {self.metric.name: stats[self.metric.name], "loss": stats["loss"], "epoch": epoch}
            self.checkpointer.save_and_keep_only(
                meta=known, num_to_keep=self.keys.keep_checkpoints, keep_every=self.keys.keep_every or None,
                **{"min_keys" if self.metric.lower_is_better else "max_keys": [self.metric.name]},
            )

    def _write_down(self, kind: str, epoch: int | None, stats: dict[str, float]) -> None:
        if self.metrics_log is not None:
            prefix = "valid" if kind == "epoch" else "test"
            self.metrics_log.write(kind, epoch=epoch, step=self.optimizer_step,
                                   **{f"{prefix}_{name}": value for name, value in stats.items()})

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        count = self.keys.average_checkpoints
        if self.checkpointer is not None and count > 1:
            used = load_mean(self.checkpointer, count, max_key=max_key, min_key=min_key)
            logger.info("Testing the average of %d checkpoints", len(used))
