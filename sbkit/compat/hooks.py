"""SpeechBrain's Brain as the training loop sees it: its hooks, options and loaders, in the loop's own words."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import speechbrain as sb
from speechbrain.core import INTRA_EPOCH_CKPT_FLAG, Stage
from torch.nn import Module
from torch.optim import Optimizer

from sbkit.compat import loaders, workers
from sbkit.compat.samplers import set_epoch
from sbkit.data.batch import as_planned
from sbkit.errors import SbkitError, explain
from sbkit.recipe.speed import Utilisation
from sbkit.train.bad_batch.report import report
from sbkit.train.batches import DataSource, MicroBatch, Objectives, Outputs
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.hooks import EpochBatches, LoopSettings
from sbkit.train.keys import ScriptKeys
from sbkit.train.loss import Computed, as_loss, losses_in_fp32
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.monitor.timing import StepTimes
from sbkit.train.results import StepResult

logger = logging.getLogger(__name__)


def objectives_of(brain: Any, outputs: Outputs, batch: MicroBatch, stage: Stage) -> Objectives:  # as in BrainHooks
    """Call a script's ``compute_objectives``; if it can't work because there are no outputs, its error says so."""
    try:
        return brain.compute_objectives(outputs, batch, stage=stage)
    except (TypeError, AttributeError) as error:
        # A script may compute everything in compute_objectives, and only Python's words say that None was the cause.
        if outputs is None and "NoneType" in str(error) and _ends_in_objectives(brain, error):
            explain(error, SbkitError("no-forward-outputs",
                                      f"compute_forward returned None, and compute_objectives failed with it: {error}",
                                      hint="let compute_forward return its outputs"))
        raise


def _ends_in_objectives(brain: Any, error: BaseException) -> bool:  # as in BrainHooks
    """Whether the innermost function of the script in an error's traceback is its ``compute_objectives``."""
    objectives = inspect.unwrap(getattr(brain.compute_objectives, "__func__", brain.compute_objectives))
    code = getattr(objectives, "__code__", None)
    if code is None:  # no function of Python's
        return False
    frames = traceback.extract_tb(error.__traceback__)
    functions = [frame.name for frame in frames if frame.filename == code.co_filename]
    return functions[-1:] == [code.co_name]


class BrainHooks:
    """The hooks of a Brain, for ``sbkit.train.trainer.Trainer``; ``Hooks`` says when each is called.

    Attributes are read when they are asked for, since a script may set them, also in its hooks while it trains.
    """

    def __init__(self, brain: Any):  # an sbkit.Brain, whose module imports this one
        self.brain = brain
        self.modules = brain.modules
        self.recipe = vars(brain.hparams)

    # ------------------------------------------------------------ what the run has

    @property
    def settings(self) -> LoopSettings:
        brain = self.brain
        return LoopSettings(
            grad_accumulation_factor=brain.grad_accumulation_factor,
            max_grad_norm=brain.max_grad_norm,
            nonfinite_patience=brain.nonfinite_patience,
            step_limit=brain.optimizer_step_limit,
            batch_limit=brain.debug_batches if brain.debug else None,
            save_minutes=brain.ckpt_interval_minutes,
            save_batches=brain.ckpt_interval_steps,
            log_interval=brain.keys.log_interval,
            graphs=brain.keys.graphs,
            bar_colour=brain.tqdm_barcolor["train"] or None)

    @property
    def checkpointer(self) -> Checkpointer | None:
        return self.brain.checkpointer

    @property
    def metrics_log(self) -> MetricsLog | None:
        return self.brain.metrics_log

    @property
    def utilisation(self) -> Utilisation | None:
        return self.brain.utilisation

    @property
    def compiled(self) -> bool:
        return self.brain.compiled

    @property
    def locks_folder(self) -> bool:
        return isinstance(self.brain.keys, ScriptKeys)  # `sbkit train` locks the whole folder

    @property
    def updates_weights(self) -> bool:
        return self.brain.optimizers_dict is not None or self.brain.opt_class is not None

    @property
    def reads_outputs(self) -> bool:
        return type(self.brain).on_fit_batch_end is not sb.Brain.on_fit_batch_end  # SpeechBrain's own reads nothing

    # ------------------------------------------------------------ at the ends of an epoch

    def open_epoch(self, epoch: int) -> None:
        self.brain.open_stage(Stage.TRAIN, epoch)

    def batches(self, train_set: DataSource, epoch: int) -> EpochBatches:
        if loaders.has_plan(train_set):
            return self._planned_batches(train_set, epoch)
        set_epoch(epoch, self.brain.train_sampler, train_set)
        done = self.brain.train_state.batches_in_epoch
        last_batch = self.settings.batch_limit
        length = loaders.length(train_set)
        if length is not None:
            length += done - loaders.first_batch(train_set, done)
            last_batch = min(length, last_batch or length)
        return EpochBatches(partial(workers.iterator_of, train_set), done, length, last_batch)

    def _planned_batches(self, train_set: DataSource, epoch: int) -> EpochBatches:
        """The rest of an epoch's plan; warns if the plan has changed since the epoch began."""
        state = self.brain.train_state
        steps_at_begin = state.planned_steps_in_epoch
        steps = train_set.steps(epoch)
        if state.steps_in_epoch and steps_at_begin not in (None, steps):
            logger.warning(
                "Epoch %s started with %d steps and now has %d: the recipe, the corpus, the device or --compile "
                "(with round_seconds) has changed. Some utterances of this epoch are used twice or not at all.",
                epoch, steps_at_begin, steps)
        state.planned_steps_in_epoch = steps
        rest = map(loaders.check_planned, train_set.at(epoch, min(state.steps_in_epoch, steps)))
        on_device = loaders.on_device(rest, train_set, self.brain.device)
        return EpochBatches(partial(workers.iterator_of, on_device), state.steps_in_epoch, steps,
                            self.settings.batch_limit)

    def begin_profile(self) -> None:
        if self.brain.profiler is not None:
            self.brain.profiler.start()

    def hold_checkpoint(self) -> None:
        assert self.brain.checkpointer is not None
        self.brain.checkpointer.hold({INTRA_EPOCH_CKPT_FLAG: True})

    def close_epoch(self, epoch: int, loss: float) -> None:
        self.brain.close_stage(Stage.TRAIN, loss, epoch)

    # ------------------------------------------------------------ within a step

    def before_batch(self, batch: MicroBatch, last: bool) -> None:
        self.brain.on_fit_batch_start(batch, last)

    def compute(self, batch: MicroBatch, times: StepTimes) -> Computed:
        brain = self.brain
        with brain.training_ctx:
            outputs = brain.compute_forward(batch, Stage.TRAIN)
            times.mark("forward")
            outputs = losses_in_fp32(outputs, brain.training_ctx)
            objectives = objectives_of(brain, outputs, batch, Stage.TRAIN)
        return Computed(outputs, objectives, as_loss(objectives, as_planned(batch).is_dummy))

    def after_batch(self, batch: MicroBatch, outputs: Outputs, objectives: Objectives, last: bool) -> None:
        self.brain.on_fit_batch_end(batch, outputs, objectives, last)

    def optimizers(self) -> list[Optimizer]:
        brain = self.brain
        if brain.optimizers_dict is not None:
            return list(brain.freeze_optimizers(brain.optimizers_dict).values())
        return [brain.optimizer] if brain.opt_class is not None else []

    def all_optimizers(self) -> list[Optimizer]:
        return list((self.brain.optimizers_dict or {}).values())

    def zero_gradients(self) -> None:
        self.brain.zero_grad(set_to_none=True)

    # ------------------------------------------------------------ between two steps

    def end_step(self, number: int) -> None:
        self.brain.end_step(number)

    def open_step(self, number: int) -> None:
        self.brain.open_step(number)

    def close_step(self, result: StepResult) -> None:
        self.brain.close_step(result)

    def profile_step(self) -> bool:
        brain = self.brain
        if brain.profiler is None:
            return False
        brain.profiler.step()
        if brain.profiler.step_num <= brain.tot_prof_steps:
            return False
        logger.info("The profiler finished, training is stopped.")
        brain.profiler.stop()
        return True

    def write_checkpoint(self) -> None:
        self.brain._save_intra_epoch_ckpt()  # SpeechBrain's, which a script may override

    def explain(self, result: StepResult, epoch: int | None) -> str:
        return report(self.brain, self.brain.keys.output_folder or ".", result, epoch)

    # ------------------------------------------------------------ before a trial, or a capture as CUDA graphs

    def restoring(self) -> AbstractContextManager[None]:
        return self.brain.restoring()

    def capture_refusal(self) -> str | None:
        if self.brain.captures_steps:
            return None
        return f"{type(self.brain).__name__} doesn't say that its steps can be replayed; `graphs: true` says so"

    def graph_key(self) -> Hashable:
        return self.brain.graph_key()

    def state_owners(self) -> Iterable[tuple[str, object]]:
        brain = self.brain
        yield type(brain).__name__, brain
        yield "hparams", brain.hparams
        names: dict[Module, str] = {}
        for root in brain.layer_roots:  # one may hold another
            for path, module in root.named_modules():
                kind = type(module).__name__
                names.setdefault(module, f"{path} ({kind})" if path else kind)
        yield from ((name, module) for module, name in names.items())
