"""The base class of a task: the class that a recipe names under ``brain``.

Check, cost estimate, tune, training, evaluation, report and export work for any task. They get keys and dummy
batches from this class, run its ``compute_forward`` and ``compute_objectives``, and show and save its results.
``docs/tutorials/own-task.md`` writes a complete one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from speechbrain.core import Stage
from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, get_default_hook

from sbkit.compat.brain import Brain
from sbkit.data.batch import Batch, as_planned
from sbkit.data.columns import BatchColumns, Declared, LabelColumn
from sbkit.data.manifest import Manifest
from sbkit.data.reader import SupportsEncode
from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.load import Transcribe
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.trace import Trace
from sbkit.runs.initial import check_start
from sbkit.runs.initial.source import TokenTables
from sbkit.runs.keys import Bundles
from sbkit.runs.same_model import check_checkpoints
from sbkit.score.estimate import MetricEstimate, estimate
from sbkit.score.metric import Metric
from sbkit.score.results import Results, describe_unread
from sbkit.tasks.corpus_part import CorpusPart, OwnKeys
from sbkit.tasks.generation import SpeechTest
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.learning import LearningMonitor
from sbkit.tasks.mixture_parts import ALL, MixtureParts
from sbkit.tasks.text_tokens import TextTokens
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint_average import load_average
from sbkit.train.distributed import ranks
from sbkit.train.early_stopping import EarlyStopping
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.results import StepResult
from sbkit.train.schedule import log_limits
from sbkit.train.speechbrain_schedules import Annealing, SpeechBrainScheduler

if TYPE_CHECKING:
    from sbkit.data.loader import TrainLoader
    from sbkit.export.exported import Exported
    from sbkit.recipe.speed import Utilisation
    from sbkit.tasks.recognise.transcriber import Transcriber

__all__ = ["Metric", "Task"]

logger = logging.getLogger(__name__)


class Task(Brain):
    """A Brain that ``sbkit train`` can run.

    A task derives from it and implements at least the two methods of every Brain,

        compute_forward(batch, stage), compute_objectives(outputs, batch, stage)

    and overrides those methods below whose defaults do not fit. They are grouped by who asks them: the preparation of
    a corpus, what makes batches, the check, the loop, the export. The recipe's values are in ``self.keys``, an object
    of the class under ``Keys``; class methods, which are called before there is a model, get it as ``keys``.

    What several tasks share they hold as objects, not as base classes: ``corpus_parts`` and ``tokens`` of the class,
    ``learning`` and ``transcriber`` of a Brain. A task sets those that it has; this class asks them. A task that
    generates speech has a ``speech_test``.

    The hooks ``begin_run``, ``begin_step`` and ``validated``, and those that are empty in SpeechBrain
    (``on_stage_start``, ``on_stage_end``, ``on_fit_batch_start``, ``on_fit_batch_end``), do nothing here: an override
    need not call ``super()``. The task's own work around them is in the methods ``open_...`` and ``close_...``, which a
    recipe's class should leave alone.
    """

    Keys: ClassVar[type[TaskKeys]] = TaskKeys
    parts: ClassVar[tuple[str, ...]] = ("modules",)
    """Keys whose objects are needed to send a batch through the model."""
    columns: ClassVar[Declared] = {}
    """Columns of the corpus that batches hold besides recordings and texts, by name: a ``LabelColumn``, a
    ``SignalColumn``, or a kind of the user's."""
    corpus_parts: ClassVar[tuple[CorpusPart, ...]] = ()
    """What is computed from the corpus, or limited in it, in this order."""
    tokens: ClassVar[TextTokens | None] = None
    """The tokens of an utterance's text, which are its labels; None: a batch has none, or ``tokenizer`` makes them."""
    sized_by_corpus: ClassVar[tuple[str, ...]] = ()
    """Keys with sizes that ``prepare`` returns, so that another corpus gives tensors of other shapes."""
    metric: ClassVar[Metric] = Metric("loss")
    counts_real_rows: ClassVar[bool] = False
    """Whether loss, count and extras leave out the rows of a training batch that aren't in ``batch.real``; then batches
    can be padded to few shapes (``batching: pad_to_shapes``)."""
    writes_words: ClassVar[bool] = False
    """Whether its rows have a ``hypothesis``, which is empty where nobody speaks."""
    generates_speech: ClassVar[bool] = False
    """Whether its tests generate speech, for which it then has a ``speech_test``."""
    keys: TaskKeys
    learning: LearningMonitor | None = None
    """Warns if a recogniser doesn't learn; None: nothing watches the loss."""
    transcriber: Transcriber | None = None
    """Transcribes validations and tests, by the search that an evaluation asks for; None: the task has no search."""
    speech_test: SpeechTest | None = None
    """Times, transcribes and samples the speech that tests generate; None: they generate none."""

    def __init__(self, *args: Any, transcribe: Transcribe | None = None, **kwargs: Any):
        """Build the Brain; the arguments besides those of ``Brain`` are

        transcribe : a recogniser for the speech that tests generate; None: there is none
        """
        super().__init__(*args, **kwargs)
        if self.generates_speech:
            self.speech_test = SpeechTest(transcribe)
        self.rows: list[Any] = []
        """One object with an ``id`` for each utterance that this rank has evaluated in the current validation or test;
        ``compute_objectives`` or ``evaluate_batch`` adds them."""
        self.learning_rate: float | None = None
        """The current step's learning rate as the schedule set it; None without a schedule."""
        self.planned_steps = 0
        """The optimizer steps of the whole run, once ``open_run`` was called; 0 if they are unknown."""
        self._unreadable: dict[str, str] = {}
        schedule = self.keys.schedule
        self.annealing = Annealing(schedule) if isinstance(schedule, SpeechBrainScheduler) else None
        self.schedule: Any = schedule if self.annealing is None else None  # a Schedule, or a recipe's own like one
        if self.annealing is not None:
            self.save_too("schedule", schedule)
        self.save_too("train_logger", self.keys.train_logger)
        self.early_stopping = EarlyStopping(vars(self.keys).get("epoch_counter"), self.checkpointer)
        self.mixture_parts = MixtureParts(vars(self.keys).get("corpus"), self.checkpointer)
        for clash in self.keys.clashes():
            raise SbkitError(clash.code, clash.text, hint=clash.hint, key=clash.key)
        if self.trainer.moving_average is not None and self.keys.tested_weights.average.several:
            raise SbkitError("clash", "ema and average_checkpoints both average weights", key="average_checkpoints",
                             hint="use one of them: ema_decay: 0, or average_checkpoints: 1")
        for part in self.corpus_parts:
            for name, statistics in part.load(self.keys):
                self.save_too(name, statistics)

    def save_too(self, name: str, obj: object) -> None:
        """Have checkpoints hold an object of the recipe that has a state, unless the recipe's recoverables do."""
        saved = self.checkpointer is None or any(other is obj for other in self.checkpointer.recoverables.values())
        if not saved and get_default_hook(obj, DEFAULT_SAVE_HOOKS) is not None:
            self.checkpointer.add_recoverable(name, obj, optional_load=True)

    # ------------------------------------------------------------ asked while a corpus is prepared

    @classmethod
    def prepare(cls, keys: OwnKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Compute what depends on the corpus, such as a vocabulary; one rank calls it, before the model is built.

        given : the keys that were set on the command line

        Returns the keys whose values follow from the corpus; the recipe is then loaded again with them.
        """
        follows: dict[str, Any] = {}
        for part in cls.corpus_parts:
            follows |= part.prepare(keys, manifests, given)
        return follows

    @classmethod
    def label(cls, keys: OwnKeys, manifests: Mapping[str, Manifest], bundles: Bundles) -> None:
        """Label the corpus with other models, such as a codec; one rank calls it, after ``prepare``.

        bundles : opens these models
        """

    @classmethod
    def is_prepared(cls, keys: OwnKeys) -> bool:
        """Whether the results of ``prepare`` exist already."""
        return all(part.is_prepared(keys) for part in cls.corpus_parts)

    # ------------------------------------------------------------ asked by what makes batches

    @classmethod
    def tokenizer(cls, keys: OwnKeys) -> SupportsEncode | None:
        """Return what turns an utterance's text into the ``tokens`` of its batch; None if batches have no tokens.

        Any object with ``encode(text) -> list[int]`` that can be pickled will do: the processes that read audio use it.
        """
        return None if cls.tokens is None else cls.tokens.tokenizer(keys)

    @classmethod
    def needs_text(cls) -> bool:
        """Whether rows of a corpus without a text are left out: true if the task has ``tokens``, or its own
        ``tokenizer``."""
        overrides_tokenizer = any("tokenizer" in vars(base) for base in cls.__mro__[:cls.__mro__.index(Task)])
        return cls.tokens is not None or overrides_tokenizer

    # ------------------------------------------------------------ asked by the check, the cost estimate and tune

    @classmethod
    def check_parts(cls, keys: OwnKeys, built: Built, findings: Findings) -> bool:
        """Check the built recipe before a batch is sent through; False if none can be."""
        return True

    @classmethod
    def check_outputs(cls, trace: Trace, findings: Findings) -> None:
        """Check the shapes of a dummy batch in the model, up to where it failed."""
        if cls.tokens is not None:
            cls.tokens.check_outputs(trace, findings)

    @classmethod
    def check_start(cls, trace: Trace, findings: Findings) -> Section | None:
        """Check the initial weights of a run, as far as possible before its corpus is prepared.

        Returns a table of the weights for the check's report; None if there are none, or they can't be used.
        """
        # Of a user's task that prepares something, or lists labels, only the corpus knows all shapes.
        prepares = not getattr(cls.prepare, "__module__", "").startswith("sbkit.")
        lists_labels = any(isinstance(column, LabelColumn) for column in cls.columns.values())
        if not prepares and (cls.sized_by_corpus or not lists_labels):
            check_checkpoints(trace, findings, cls.sized_by_corpus)
        return check_start(trace, findings)

    @classmethod
    def check_labels(cls, keys: OwnKeys, manifests: Mapping[str, Manifest], findings: Findings,
                     nodes: Mapping[str, Node]) -> Section | None:
        """Check the labels of a prepared corpus; returns a table about them for the check's report, if there is one.

        nodes : where the recipe's keys are written; while a run starts, only the recipe's file
        """
        return None if cls.tokens is None else cls.tokens.check_labels(keys, manifests, findings, nodes)

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        """Return lines for the check to print below its table of shapes, and the same facts for ``--json``."""
        return [], {}

    def dummy_batch(self, utterances: int, seconds: float, *, noise: bool = False) -> Batch:
        """Make a batch of this size, for the check, the cost estimate and tune.

        noise : fill it with noise and random labels; otherwise the values may be anything
        """
        for part in self.corpus_parts:
            part.allow_missing(self.keys)
        samples = round(seconds * self.keys.sample_rate)
        signals = 0.1 * torch.randn(utterances, samples) if noise else torch.empty(utterances, samples)
        signal_lengths = torch.full((utterances,), samples)

        labels = max(1, round(seconds * self.labels_per_second))
        if noise and self.tokens is not None:
            tokens = self.tokens.random(self.keys, (utterances, labels))
        else:
            tokens = torch.ones((utterances, labels), dtype=torch.long)

        columns = BatchColumns(self.columns, self.keys)
        return Batch(
            ids=[f"dummy {number}" for number in range(utterances)],
            texts=[""] * utterances,
            samples=utterances * samples,
            signals=signals,
            signal_lengths=signal_lengths,
            tokens=tokens,
            token_lengths=torch.full((utterances,), labels),
            sample_rate=self.keys.sample_rate,
            **columns.dummy(signals, signal_lengths, noise=noise))

    @property
    def labels_per_second(self) -> float:
        """The number of labels per second in a typical utterance, for dummy batches."""
        return 0.0 if self.tokens is None else self.tokens.per_second(self.keys)

    # ------------------------------------------------------------ asked by init_from

    def token_tables(self) -> TokenTables | None:
        """Return the tensors with a row per token, so that ``init_from`` can map them to another vocabulary; None if
        the model has none."""
        return None

    # ------------------------------------------------------------ asked by a run that begins

    def open_run(self, texts: Sequence[str], steps: int, *, epochs: int | None = None,
                 train_set: TrainLoader | None = None, utilisation: Utilisation | None = None,
                 results_folder: Path | None = None) -> None:
        """Take what the run has planned, log what it is too short for, and call ``begin_run``.

        steps : optimizer steps of the whole run
        epochs : the number of epochs with which the run began; None: unknown
        train_set : the training data
        utilisation : the model's FLOPs, if they are to be reported
        results_folder : for the test's results, if they don't go into the run's folder
        """
        self.planned_steps = steps
        self.train_state.planned_epochs = epochs
        self.utilisation = utilisation
        self.mixture_parts.open_run(train_set)
        if results_folder is not None and self.metrics_log is not None:
            self.metrics_log.close()
            self.metrics_log = MetricsLog(results_folder)

        # A step that a recipe overrides reports no losses, so nothing can follow them.
        watches_learning = self.learning is not None and not self.overridden_methods
        if self.learning is not None and watches_learning:
            self.learning.begin_run(
                texts, steps, step_limit=self.optimizer_step_limit, max_norm=self.max_grad_norm,
                anneals=self.annealing is not None, thaws_at=self.thaws_at,
                schedule=self.schedule if self.opt_class is not None else None, recipe_keys=vars(self.hparams))

        if self.schedule is not None and not self.test_only:
            self.schedule.total_steps = steps
        if not self.test_only and ranks.is_main():
            self._warn_of_too_few_steps(steps, watches_learning)
        self.begin_run(texts, steps)

    def _warn_of_too_few_steps(self, steps: int, watches_learning: bool) -> None:
        if self.annealing is not None:
            self.annealing.log_limits(steps)
        if self.schedule is not None:
            compares_with_chance = self.learning is not None and self.learning.knows_chance and watches_learning
            log_limits(self.schedule, steps, compares_with_chance)
        if self.thaws_at >= steps > 0:
            logger.warning("What is frozen until step %d never trains, because the run has %d steps: train for "
                           "more steps (--min_steps 1000), or freeze for fewer", self.thaws_at, steps)

    @property
    def thaws_at(self) -> int:
        """The step until which something is frozen that trains later; 0 if there is no such part."""
        return int(max(filter(math.isfinite, self.trainer.freezing.until.values()), default=0))

    @property
    def peak_rate(self) -> float | None:
        """The peak of the schedule, if there is one."""
        return super().peak_rate if self.schedule is None else self.schedule.warmup_end()[1]

    # ------------------------------------------------------------ asked by the loop, around a step

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train, and warn at the end if nothing was learnt."""
        super().fit(*args, **kwargs)
        if self.learning is not None and not self.test_only:
            after_last = self.optimizer_step + 1
            self.learning.end(after_last)
            self.learning.log_notices(after_last, self._current_rate(), self.metrics_log, ended=True)

    def open_step(self, number: int) -> None:
        """Set what depends on the step: masks, the numbers of kernels, and the learning rate; call ``begin_step``."""
        if self.learning is not None:
            self.learning.apply(number, vars(self.keys).get("spec_augment"), self.schedule)
        self.write_numbers(number)
        if self.schedule is not None and self.opt_class is not None:
            self.learning_rate = self.schedule.apply(self.optimizer, number)
        self.begin_step(number)
        if self.learning is not None and self.learning.is_due(number):
            self.learning.log_notices(number, self._current_rate(), self.metrics_log)

    def end_step(self, number: int) -> None:
        """Let SpeechBrain's scheduler set the next rate, which a checkpoint of this step holds."""
        if self.annealing is not None and number > 0:
            self.annealing.after_step(self.optimizer, number)

    def close_step(self, result: StepResult) -> None:
        """Record a step's loss, on which masks, learning rate and warnings depend; call ``on_step_known``."""
        if self.learning is not None:
            self.learning.count(result)
        super().close_step(result)

    def _current_rate(self) -> float | torch.Tensor | None:
        return self.trainer.learning_rate if self.learning_rate is None else self.learning_rate

    # ------------------------------------------------------------ asked by the loop, around a stage

    shares_validation = True  # the rows of all ranks are gathered, so no utterance may be evaluated on two ranks

    def open_stage(self, stage: Stage, epoch: int | None = None) -> None:
        """Clear the rows, and call ``on_stage_start``."""
        self.rows, self._unreadable = [], {}
        if self.speech_test is not None:
            self.speech_test.begin_stage()
        super().open_stage(stage, epoch)

    def close_batch(self, batch: object, stage: Stage) -> None:
        """Note which recordings of a batch could not be read."""
        self._unreadable.update(as_planned(batch).damaged)

    def close_stage(self, stage: Stage, loss: float, epoch: int | None = None) -> None:
        """Compute and log results, call ``on_stage_end``, and save a checkpoint after a validation."""
        if stage == Stage.TRAIN:
            self.train_stats = {"loss": loss, **self.mixture_parts.close_epoch(epoch, self.metrics_log)}
            super().close_stage(stage, loss, epoch)
        elif stage == Stage.VALID:
            self._close_validation(loss, epoch)
        else:
            self._close_test(loss, epoch)

    def _close_validation(self, loss: float, epoch: int | None) -> None:
        rows, unread = self.all_rows(), dict(self.gather(self._unreadable.items()))
        stats = {"loss": loss, **self.mixture_parts.validation_stats(rows, self.stats)}
        if unread:  # rates leave them out, so they are always shown together
            stats["unread"] = len(unread)
            logger.warning("%s", describe_unread("valid", unread, len(rows)))
        self.validated(rows, stats)

        if self.annealing is not None and self.opt_class is not None and epoch is not None:
            self.annealing.after_validation(self.optimizer, epoch, loss)
        if self.metric.name in stats:
            self.early_stopping.after_validation(self.metric.name, stats[self.metric.name])
        super().close_stage(Stage.VALID, loss, epoch)

        progress: dict[str, Any] = {"epoch": epoch, "steps": self.optimizer_step}
        if self.opt_class is not None:
            progress["lr"] = self.trainer.learning_rate
        if self.keys.train_logger is not None:
            self.keys.train_logger.log_stats(progress, self.train_stats, self.mixture_parts.for_log(stats))
        self._log("epoch", epoch, stats)
        if self.checkpointer is not None:
            self._save_epoch(self.checkpointer, stats, epoch)
        self._warn_if_held_back()

    def _save_epoch(self, checkpointer: Checkpointer, stats: Mapping[str, float], epoch: int | None) -> None:
        """Save a checkpoint after a validation, and delete those that are neither the best nor to be kept."""
        if self.metric.name not in stats:  # the epoch is saved first, so that it needn't be trained again
            checkpointer.save_checkpoint(meta={"loss": stats["loss"], "epoch": epoch})
            ranks.raise_on_main(SbkitError(
                "metric",
                f"{type(self).__name__} chooses the best checkpoint by {self.metric.name!r}, but its validation gives "
                f"{', '.join(stats)}", key="metric", value=self.metric.name,
                hint="return it from stats, or name one of these in metric; the epoch is saved"))
        meta = {self.metric.name: stats[self.metric.name], "loss": stats["loss"], "epoch": epoch}
        best_by: dict[str, Any] = {"min_keys" if self.metric.lower_is_better else "max_keys": [self.metric.name]}
        checkpointer.save_and_keep_only(meta=meta, num_to_keep=self.keys.keep_checkpoints,
                                        keep_every=self.keys.keep_every or None, **best_by)

    def _warn_if_held_back(self) -> None:
        """Warn of a run that trained initial weights hold back, if a finished run beside it shows that."""
        if self.learning is None or self.metrics_log is None or not ranks.is_main():
            return
        warning = self.learning.held_back_by()
        if warning is not None:
            logger.warning("%s", warning)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        average = self.keys.tested_weights.average
        if self.checkpointer is not None and average.several:
            used = load_average(self.checkpointer, average, max_key=max_key, min_key=min_key)
            logger.info("Testing %s", average.describe(len(used)))

    def _close_test(self, loss: float, epoch: int | None) -> None:
        rows, unread = self.all_rows(), dict(self.gather(self._unreadable.items()))
        self.tested = self.tested_results(rows, loss, unread)
        super().close_stage(Stage.TEST, loss, epoch)
        if self.tested.unread:
            logger.warning("%s", describe_unread("test", self.tested.unread, self.tested.utterances))

        stats = dict(self.tested.stats)
        if unread:
            stats["unread"] = len(unread)
        epoch_loaded = getattr(self.keys.epoch_counter, "current", None)
        if self.keys.train_logger is not None:
            self.keys.train_logger.log_stats({"Epoch loaded": epoch_loaded},
                                             test_stats=self.mixture_parts.for_log(stats, ALL))
        self._log("test", epoch_loaded, stats)

    def _log(self, kind: str, epoch: int | None, stats: dict[str, float]) -> None:
        if self.metrics_log is not None:
            prefix = "valid" if kind == "epoch" else "test"
            self.metrics_log.write(kind, epoch=epoch, step=self.optimizer_step,
                                   **{f"{prefix}_{name}": value for name, value in stats.items()})

    # ------------------------------------------------------------ asked about the rows of an evaluation

    @classmethod
    def check_manifest(cls, keys: OwnKeys, split: str, manifest: Manifest) -> None:
        """Warn about texts that the model can't output in a manifest to score; raise if it can't be scored at all."""
        for part in cls.corpus_parts:
            part.check_manifest(keys, split, manifest)

    def all_rows(self) -> list[Any]:
        """Collect the rows of all ranks, sorted by id, on every rank."""
        return sorted(self.gather(self.rows), key=lambda row: row.id)

    def stats(self, rows: Sequence[Any]) -> dict[str, float]:
        """Compute the statistics of a validation or test, the metric among them unless that is the loss."""
        return {} if self.transcriber is None else self.transcriber.stats(rows)

    def results(self, rows: Sequence[Any], loss: float, unread: Mapping[str, str]) -> Results:
        """Build the results of a test, for the screen, the files and the report.

        unread : recordings that could not be read, and why
        """
        if self.transcriber is not None:
            return self.transcriber.results(rows, loss, unread)
        return Results({"loss": loss, **self.stats(rows)}, utterances=len(rows), unread=dict(unread))

    def estimate(self, rows: Sequence[Any]) -> MetricEstimate | None:
        """Estimate the uncertainty of a test's metric by a bootstrap over rows, unless ``stats`` compares rows."""
        if self.transcriber is not None:
            return None  # the intervals of error rates are bootstrapped over words
        return estimate(self.metric, rows, self.stats)

    def tested_results(self, rows: Sequence[Any], loss: float, unread: Mapping[str, str]) -> Results:
        """Build the results of a test and their uncertainty."""
        results = self.results(rows, loss, unread)
        results.estimate = self.estimate(rows)
        if self.metric.name != "loss":
            self.mixture_parts.add_results(results, rows,
                                           lambda part_rows: self.tested_results(part_rows, loss, {}))
        return results

    # ------------------------------------------------------------ asked by sbkit export

    def exported(self, run: Path) -> Exported | None:
        """Return what ``sbkit export`` writes; None if the task can't be exported.

        The model is in evaluation mode, on the CPU and in fp32.

        run : the run's folder
        """
        return None

    def clip_batch(self, signal: torch.Tensor, samples: int) -> Batch:
        """Make a batch of one waveform [S], on which an export is compared with ``compute_forward``.

        samples : its length, after which it is padded
        """
        batch = self.dummy_batch(1, samples / self.keys.sample_rate, noise=True)
        signals = signal[None]
        signal_lengths = torch.tensor([samples])
        columns = BatchColumns(self.columns, self.keys)
        return dataclasses.replace(
            batch, ids=["clip"], signals=signals, samples=samples, signal_lengths=signal_lengths,
            **columns.dummy(signals, signal_lengths, noise=True))

    # ------------------------------------------------------------ for a recipe's class, which need not call super()

    def begin_run(self, texts: Sequence[str], steps: int) -> None:
        """Called before ``fit`` with the training texts and the number of optimizer steps."""

    def begin_step(self, step: int) -> None:
        """Called before each optimizer step, counted from 1, when its learning rate has been set."""

    def validated(self, rows: Sequence[Any], stats: Mapping[str, float]) -> None:
        """Called on every rank after a validation with the rows of all ranks and their ``stats``."""
