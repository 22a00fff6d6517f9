"""The training loop: epochs of optimizer steps, each of micro-batches, and what all ranks decide between two steps.

``Trainer.train_epoch`` reads from top to bottom. For each micro-batch it goes through

    fit_batch             one micro-batch: on_fit_batch_start, the two below, on_fit_batch_end
        _compute          forward, loss and backward; in parts if memory runs out
        _update           with the last micro-batch of a step: normalise, clip, update
    _between_steps        read the values of previous steps; stop, save, or examine a step that failed

Nothing in it waits for the device: the values that the host needs arrive one step later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import speechbrain as sb
import torch
from speechbrain.core import INTRA_EPOCH_CKPT_FLAG, Stage

from sbkit.errors import SbkitError
from sbkit.nn import guard
from sbkit.recipe.report import listed
from sbkit.train import loaders, rng
from sbkit.train.averaging import EMA
from sbkit.train.batches import DataSource, MicroBatch, Objectives, Outputs, length
from sbkit.train.checkpoint.files import locked_for_training
from sbkit.train.compiling import CudaGraphs
from sbkit.train.diagnose import culprit
from sbkit.train.diagnose.inspection import KeptBatch
from sbkit.train.distributed import parallel, ranks
from sbkit.train.distributed.parallel import Buffers, LossModule, ModuleWrapper
from sbkit.train.distributed.sharding import is_sharded
from sbkit.train.forward_state import ForwardState
from sbkit.train.freezing import Freezing
from sbkit.train.keys import ScriptKeys
from sbkit.train.memory.oom import MemoryLimits, joined, parts_of
from sbkit.train.monitor.display import Progress, StageDisplay
from sbkit.train.monitor.timing import StepBudget
from sbkit.train.precision import losses_in_fp32
from sbkit.train.rates import Rate, base_lr
from sbkit.train.signals import Stopped, StopSignals
from sbkit.train.state import TrainState
from sbkit.train.step import Loss, StepAccumulator, StepResult, as_loss

logger = logging.getLogger(__name__)

#: What any rank may ask for with a step, so that all ranks do it at the same step: to stop, to save, to find the
#: buffers that change, to search for unused parameters.
FLAGS = ("stop", "save", "buffers", "graph")
_END = object()


class NotFinite(SbkitError, ValueError):
    """Raised when losses or gradients were NaN or infinite in more than ``nonfinite_patience`` steps of an epoch."""

    exit_code = 1


class Computed(NamedTuple):
    """What a recipe's Brain computed from a batch, and its loss as sums."""

    outputs: Outputs = None
    objectives: Objectives = None
    loss: Loss = Loss(torch.zeros(()), 0.0)


class Trainer:
    """Trains the modules of a Brain.

    brain : its hooks and options, as SpeechBrain documents them
    generators : the random number generators, as restored from a checkpoint
    write : saves a checkpoint in the middle of an epoch
    """

    def __init__(self, brain: sb.Brain, state: TrainState, ema: EMA | None, freezing: Freezing,
                 generators: rng.RngState, write: Callable[[], None]):
        self.brain, self.state, self.ema, self.freezing = brain, state, ema, freezing
        self.memory = MemoryLimits(self.device)
        self.budget, self.graphs = StepBudget(self.device), CudaGraphs()
        self.buffers = Buffers(self.modules)
        self.signals: StopSignals | None = None
        self.computed = Computed()
        """Of the last batch, or of its last part."""
        self._generators, self._write = generators, write
        self._progress: Progress | None = None
        self._saved_at, self._batches_since = time.monotonic(), 0
        self._unreached: set[str] = set()  # parameters that a warning has named
        # The micro-batches of this step, with the number of parts and the random state that each was computed with.
        self._done: list[tuple[MicroBatch, int, dict[str, torch.Tensor]]] = []
        self.use(ModuleWrapper(self.loss_module()))

    @property
    def modules(self) -> torch.nn.ModuleDict:
        return self.brain.modules

    @property
    def device(self) -> torch.device:
        return torch.device(self.brain.device)

    # ------------------------------------------------------------ setting up

    def loss_module(self) -> LossModule:
        """Return one module that holds all modules, whose forward is the loss of a batch."""
        return LossModule(self.modules, self.loss_of)

    def use(self, wrap: ModuleWrapper) -> None:
        """Use these wrapped modules for the steps that follow."""
        self.wrap = wrap
        self.steps = StepAccumulator(self.device, wrap.world, self.brain.scaler, FLAGS)
        self.forward_state = ForwardState(self.modules)

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Catch signals inside this context; an error discards the held state, as this process may start again."""
        checkpointer = self.brain.checkpointer
        lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if checkpointer is not None and self._is_script and ranks.is_main():  # `sbkit train` locks the whole folder
            lock = locked_for_training(checkpointer.checkpoints_dir)
        with lock, StopSignals() as self.signals:
            try:
                yield
            except BaseException:
                if self.brain.checkpointer is not None:  # a script's on_fit_start may have set it
                    self.brain.checkpointer.drop()
                raise

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Don't stop the evaluation inside this context after a signal: only ``fit`` has something to save."""
        signals, self.signals = self.signals, None
        try:
            yield
        finally:
            self.signals = signals

    @contextlib.contextmanager
    def keeping_computed(self) -> Iterator[None]:
        """Put ``computed`` back on exit."""
        computed = self.computed
        try:
            yield
        finally:
            self.computed = computed

    @property
    def _is_script(self) -> bool:
        return isinstance(self.brain.keys, ScriptKeys)

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank has received a stop signal."""
        return self.signals is not None and self.signals.signum is not None

    @property
    def learning_rate(self) -> Rate | None:
        optimizers = list((self.brain.optimizers_dict or {}).values())
        return base_lr(optimizers[0].param_groups[0]) if optimizers else None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are not frozen."""
        if self.brain.optimizers_dict is not None:
            return list(self.brain.freeze_optimizers(self.brain.optimizers_dict).values())
        return [self.brain.optimizer] if self.brain.opt_class is not None else []

    # ------------------------------------------------------------ an epoch

    def begin_fit(self, validates: bool) -> None:
        """Begin a ``fit``; ``validates``: whether each epoch ends with a validation."""
        self.brain.open_step(self.state.optimizer_step + 1)
        self.buffers = Buffers(self.modules)
        self.state.first_step_checked, self.state.validates = False, validates

    def train_epoch(self, train_set: DataSource, epoch: int, show: bool) -> None:
        """Train the rest of an epoch; ``show``: whether to show a progress bar."""
        brain, state = self.brain, self.state
        state.epoch = epoch
        brain.open_stage(Stage.TRAIN, epoch)
        self.freezing.train()
        brain.zero_grad()
        batches, steps = self._batches(train_set, epoch)
        self._begin_interval()
        if brain.profiler is not None:
            brain.profiler.start()
        display = StageDisplay(
            f"train {epoch}", steps, initial=state.epoch_step if state.plan_driven else state.step, show=show,
            budget=self.budget, scale=ranks.world_size(), colour=brain.tqdm_barcolor["train"] or None,
            utilisation=brain.utilisation)
        self.budget.reset()
        progress = self._progress = Progress(display, brain.metrics_log, self.budget, epoch, brain.keys.log_interval,
                                             compiled=brain.compiled)
        if not state.step:
            state.began = time.monotonic()
        updated = True
        with self.budget.active(), display:
            for batch in self._read(batches):
                state.step += 1
                self._batches_since += 1
                before = state.optimizer_step
                if updated:
                    self._begin_step()
                self.graphs.next_batch()
                self._fit(batch)
                updated = state.optimizer_step > before
                if updated:
                    brain.open_step(state.optimizer_step + 1)
                progress.batch(batch, int(updated) if state.plan_driven else 1, state.average.known,
                               self.learning_rate)
                self._profile()
                if self._ends_step(updated):
                    self._between_steps()
                if brain.debug and state.step == brain.debug_batches:
                    break
        self._end_epoch(epoch, updated, progress)

    def _batches(self, train_set: DataSource, epoch: int) -> tuple[Iterable[Any], int | None]:
        """Return the epoch's remaining batches, and the total for the progress bar."""
        brain, state = self.brain, self.state
        state.last_batch = brain.debug_batches if brain.debug else None
        if state.plan_driven:
            begun, steps = state.epoch_steps, train_set.steps(epoch)
            if state.epoch_step and begun not in (None, steps):
                logger.warning(
                    "Epoch %s started with %d steps and now has %d: the recipe, the corpus, the device or --compile "
                    "(with round_seconds) has changed. Some utterances of this epoch are used twice or not at all.",
                    epoch, begun, steps)
            state.epoch_steps = steps
            batches = train_set.at(epoch, min(state.epoch_step, steps))
            return loaders.on_device(batches, train_set, brain.device), steps
        loaders.set_epoch(epoch, brain.train_sampler, train_set)
        length = loaders.length(train_set)
        if length is not None:
            length += state.step - loaders.first_batch(train_set, state.step)
            state.last_batch = min(length, state.last_batch or length)
        return train_set, length

    def _read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches up to the limit of steps, and count the time spent waiting for them as "data"."""
        iterator = loaders.iterator_of(batches)
        self._generators.restore()  # after that: starting workers draws random numbers
        while True:
            if self.state.reached(self.brain.optimizer_step_limit):
                logger.info("Train iteration limit exceeded")
                return
            with self.budget("data"):
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    def _begin_step(self) -> None:
        """Unfreeze parameters that train from this step on, and expect them to need more memory."""
        step = self.state.optimizer_step
        if self.freezing.update(step):
            self.freezing.train()
            if self.ema is not None:
                self.ema.track_trainable()
            self.wrap.reset()
            self.state.first_step_checked = False
        if self.freezing.unfreezes_after(step):
            self.memory.expect_more()

    def _fit(self, batch: MicroBatch) -> None:
        self.fit_batch(batch)

    def _ends_step(self, updated: bool) -> bool:
        return updated

    def _end_epoch(self, epoch: int, updated: bool, progress: Progress) -> None:
        brain, state = self.brain, self.state
        if self.steps.started:  # the end of the epoch cut an accumulation short
            self.wrap.finish()
            self._update()
            brain.open_step(state.optimizer_step + 1)
        elif not updated:
            self._warn_dropped()
        self._record(self.steps.results(wait=True))
        guard.poll(wait=True)  # before a model that learnt from an invalid label is saved
        brain.zero_grad(set_to_none=True)
        self.buffers.detect_changes()
        parallel.assert_ranks_equal(self.modules, f"after epoch {epoch}")
        if state.validates:
            self._hold_state()
        loss = self.average_loss()
        progress.close(loss, state.optimizer_step, state.began)
        self.memory.report()
        brain.close_stage(Stage.TRAIN, loss, epoch)
        state.end_training()

    def _warn_dropped(self) -> None:
        """Warn of gradients that no update used; here each step ends with one."""

    def _profile(self) -> None:
        profiler = self.brain.profiler
        if profiler is None:
            return
        profiler.step()
        if profiler.step_num > self.brain.tot_prof_steps:
            logger.info("The profiler finished, training is stopped.")
            profiler.stop()
            ranks.end_together()  # another rank may still be writing its trace

    # ------------------------------------------------------------ a micro-batch

    def fit_batch(self, batch: MicroBatch) -> torch.Tensor:
        """Train on one micro-batch, update after the last of a step, and return the detached loss on the device."""
        last = self.state.closes_step(batch, self.brain.grad_accumulation_factor)
        self.brain.on_fit_batch_start(batch, last)
        loss = self._compute(batch, last)
        computed = self.computed
        if last:
            self._update()
        self.brain.on_fit_batch_end(batch, computed.outputs, computed.objectives, last)
        return loss.detach().mean

    def _compute(self, batch: MicroBatch, last: bool) -> Loss:
        """Run forward and backward of a micro-batch, in parts if it does not fit, and return its whole loss.

        A failed backward leaves incomplete gradients, so the step starts again from its first micro-batch. On several
        ranks DDP averages gradients during the backward of the last micro-batch, when no rank can start again. So if a
        step is larger than all that fit on all ranks so far, gradients are averaged only after all ranks have computed
        it. All ranks know the planned size, so they decide alike.
        """
        if not self.steps.started:
            self._done = []
        generators = rng.capture(self.device)
        planned = getattr(batch, "largest_micro_batch", 0.0)
        untried = last and planned > self.memory.largest_step_that_fit and self.wrap.can_wait
        while True:
            count = self.memory.parts(batch)
            try:
                loss = self._in_parts(batch, last and not untried, count, generators)
                break
            except Exception as error:
                if not self.memory.ran_out(error):
                    raise
                self.memory.refuse_to_retry(error, batch, count, self.modules, self.wrap,
                                            exchanging=last and self.steps.announced)
            # Outside of the handler, so that the error and its frames no longer hold the step's tensors.
            self.memory.split_from_now_on(batch, count, self.state.optimizer_step + 1)
            self._restart_step(generators)
        if untried:
            self.exchange()
        self.memory.computed(planned if untried else None, in_parts=count > 1)
        self._done = [] if last else [*self._done, (batch, count, generators)]
        return loss

    def _in_parts(self, batch: MicroBatch, last: bool, count: int, generators: dict[str, torch.Tensor]) -> Loss:
        compute = functools.partial(self.memory.threads.call, self._forward_and_backward)
        if count == 1:
            return compute(batch, last, generators=generators)
        losses = []
        for part, share, final in parts_of(batch, count):
            losses.append(compute(part, last and final, share=share).detach())
        return joined(losses)

    def _forward_and_backward(self, batch: MicroBatch, last: bool, *, share: float = 1.0,
                              generators: dict[str, torch.Tensor] | None = None) -> Loss:
        """Compute the loss and the gradients of a micro-batch, or of a share of one.

        last : whether it is the last of its step, with which gradients, sums and flags are exchanged between ranks
        """
        if not self.steps.started:
            self.forward_state.save()
        with self.wrap.no_sync() if not last else contextlib.nullcontext():
            generators = rng.capture(self.device) if generators is None else generators  # to examine it again
            total = self.wrap.module(batch)  # calls loss_of, which keeps the rest of the loss in self.computed
            if not total.requires_grad:
                raise SbkitError("the loss depends on no trainable parameter", hint="freeze less of the model")
            loss = self.computed.loss._replace(total=total)  # as DDP returns it: its backward exchanges gradients
            if share != 1.0 and not isinstance(self.computed.objectives, Loss):  # a mean over the batch
                loss = loss._replace(total=total * share, count=loss.count * share)
            self.steps.add(loss, KeptBatch(batch, generators))
            if last:
                self.steps.announce(self.flags())
            with self.budget("backward"), parallel.zeroed_if(loss.weightless, self.modules):
                if last:
                    self.budget.exposed_all_reduce(loss.total)
                scaled = self.steps.scaled(loss)
                scaled.backward()
                self.wrap.complete(scaled)
                if not last:
                    self.graphs.keep_gradients(self.modules)
        return loss

    def loss_of(self, batch: MicroBatch) -> torch.Tensor:
        """Compute the forward and the loss of a batch, keep them in ``computed``, and return the sum to call
        ``backward`` on."""
        context = self.brain.training_ctx
        with context:
            with self.budget("forward"):
                outputs = self.brain.compute_forward(batch, Stage.TRAIN)
            with self.budget("loss"):
                outputs = losses_in_fp32(outputs, context)
                objectives = self.brain.compute_objectives(outputs, batch, Stage.TRAIN)
        loss = as_loss(objectives, getattr(batch, "weight", 1.0))
        self.computed = Computed(outputs, objectives, loss)
        return loss.total

    def exchange(self) -> None:
        """Exchange sums and gradients between ranks, for a step that ended without doing so."""
        self.steps.announce(self.flags())
        self.wrap.finish()

    def _restart_step(self, generators: dict[str, torch.Tensor]) -> None:
        """Discard the failed attempt, and compute the step's earlier micro-batches again."""
        place = 0
        while True:
            self._discard_step()
            try:
                for place, (batch, count, before) in enumerate(self._done):  # noqa: B007 (needed below)
                    rng.restore(before, self.device)
                    self._in_parts(batch, False, count, before)
                break
            except Exception as error:
                batch, count, before = self._done[place]
                if not self.memory.ran_out(error) or count >= length(batch):
                    raise
                self._done[place] = batch, min(2 * count, length(batch)), before
        rng.restore(generators, self.device)

    def _discard_step(self) -> None:
        """Discard the unfinished step: its gradients, its sums, the state that its forwards changed, unused memory."""
        self.brain.zero_grad(set_to_none=True)
        self.steps.reset()
        self.forward_state.restore()
        self.computed = Computed()
        self.memory.free()

    def try_step(self, batch: MicroBatch) -> bool:
        """Take a step on a whole micro-batch; undo it and return False if memory runs out."""
        try:
            self.memory.threads.call(self._forward_and_backward, batch, True)
            self._update()
            return True
        except Exception as error:
            if not self.memory.ran_out(error):
                raise
        self._discard_step()
        return False

    # ------------------------------------------------------------ the update

    def _update(self) -> None:
        with self.budget("optimizer"):
            self.apply()

    def apply(self) -> None:
        """Normalise and clip all gradients together and update, unless something is not finite."""
        optimizers, state = self.optimizers(), self.state
        if not optimizers:
            self.steps.reset()
            return
        if not state.first_step_checked:
            parallel.warn_unreached(self.modules, vars(self.brain.hparams), self._unreached)
            if not state.graph_changes:
                self.wrap.note_unreached()
        skipped = self.steps.update(optimizers, self.brain.max_grad_norm, number=state.optimizer_step + 1)
        self.forward_state.restore(skipped)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.wrap.exclude_unreached()
        if self.ema is not None:
            self.ema.update(skipped)
        state.optimizer_step += 1
        state.epoch_step += 1

    # ------------------------------------------------------------ between two steps

    def flags(self) -> dict[str, bool]:
        """Return what this rank asks for with this step."""
        minutes = (time.monotonic() - self._saved_at) / 60
        due = ranks.is_main() and 0 < self.brain.ckpt_interval_minutes < minutes
        return {"stop": self.asked_to_stop, "save": due, "buffers": self.forward_state.found_new_buffers,
                "graph": bool(self.wrap.changed)}

    def _between_steps(self) -> None:
        """Do what all ranks do together between two optimizer steps."""
        if not self.state.first_step_checked:
            self.state.first_step_checked = True
            self.buffers.detect_changes()
            parallel.assert_ranks_equal(self.modules, "after the first step")
        else:
            self.buffers.sync()
        self.budget.step()
        asked = self._requested()
        guard.poll()
        if asked["buffers"]:
            self.buffers.detect_changes()
        if asked["graph"] and not self.wrap.searches:  # on a GPU, the previous step asks for it again
            self._search_unused()
        if asked["stop"]:
            self.save_and_stop()
        due = 0 < self.brain.ckpt_interval_steps <= self._batches_since
        if self.brain.checkpointer is not None:
            self.brain.checkpointer.raise_pending_error()  # raises now if a save has failed, not an epoch later
            if due or asked["save"]:
                self._save()

    def _requested(self) -> dict[str, bool]:
        """Take in the steps whose values have arrived, and return what any rank asked for with them."""
        return self._record(self.steps.results())

    def _record(self, results: list[StepResult]) -> dict[str, bool]:
        """Record steps, examine those that were not finite, and return what any rank asked for with them."""
        asked = dict.fromkeys(FLAGS, False)
        for result in results:
            self._average(result)
            if self._progress is not None:
                self._progress.step(result, self.learning_rate)
            self.brain.close_step(result)
            if result.failed:
                self._report_not_finite(result)
            for name, number in result.flags.items():
                asked[name] |= number > 0
        return asked

    def _average(self, result: StepResult) -> None:
        self.state.average.add(result.total, result.count)

    def average_loss(self) -> float:
        """Return the mean training loss of the epoch so far, over all ranks; waits for the device."""
        return self.state.average.value((fact.total, fact.count) for fact in self.steps.peek())

    def _report_not_finite(self, result: StepResult) -> None:
        """Report the cause of a step that was not finite, and end the run if there were too many."""
        brain, state = self.brain, self.state
        state.nonfinite_count += 1
        what = "gradient" if math.isfinite(result.total) else "loss"
        report = f"its {what} is not finite (with fsdp, a rank can't examine it alone)"
        if not any(map(is_sharded, self.modules.values())):
            with self.budget.pause(), self.wrap.no_sync():
                report = culprit.report(
                    brain, Path(brain.keys.output_folder or "."), result.batches, step=result.number, epoch=state.epoch,
                    what=what, scale=result.scale, sum_scale=result.sum_scale, lr=self.learning_rate, late=result.late)
        if ranks.is_main():
            logger.warning("Step %d was skipped, number %d in this epoch (nonfinite_patience allows %d):\n%s",
                           result.number, state.nonfinite_count, brain.nonfinite_patience, report)
        if state.nonfinite_count > brain.nonfinite_patience:
            ranks.raise_on_main(NotFinite(
                f"the {what} of {state.nonfinite_count} steps of this epoch was not finite",
                hint="see the reports above; nonfinite_patience sets how many are allowed"))

    def _search_unused(self) -> None:
        """Search for unused parameters in each backward from now on, since they differ from those of the first step."""
        names = sorted({name for part in ranks.gather_objects(sorted(self.wrap.changed)) for name in part})
        self.state.graph_changes = True
        self.wrap.search()
        if ranks.is_main():
            logger.warning(
                "The loss uses other parameters than in the first step (%s). From now on each backward searches for "
                "unused parameters, which makes it wait for the device; with --find_unused_parameters it does so from "
                "the first step",
                listed((name.removeprefix("owned.") for name in names), 3))

    # ------------------------------------------------------------ saving and leaving

    def _begin_interval(self) -> None:
        """Start the interval to the next checkpoint in the middle of an epoch."""
        self._saved_at, self._batches_since = time.monotonic(), 0

    def _save(self) -> None:
        """Save a checkpoint in the middle of the epoch, after recording all steps so far."""
        with self.budget.pause():
            self._record(self.steps.results(wait=True))
            guard.poll(wait=True)  # raises now if a label was invalid, so that nothing learnt from it is saved
            self.buffers.detect_changes()
            self._write()
        self._begin_interval()

    def _hold_state(self) -> None:
        """Hold the state at the end of an epoch's training, to save it if a signal arrives before the epoch ends.

        A resumed run repeats what follows, from ``on_stage_end`` of the training on, with the same random numbers. With
        a sharded model nothing is held, as that would take a complete save.
        """
        checkpointer = self.brain.checkpointer
        if checkpointer is not None and not any(map(is_sharded, checkpointer.recoverables.values())):
            checkpointer.hold({INTRA_EPOCH_CKPT_FLAG: True})

    def save_and_stop(self) -> None:
        """Save a checkpoint and end the run, after a signal to any rank."""
        own = None if self.signals is None else self.signals.signum
        signum = next(each for each in ranks.gather_objects(own) if each is not None)
        saved, checkpointer = None, self.brain.checkpointer
        if checkpointer is not None:
            saved = checkpointer.publish()
            if saved is not None:
                checkpointer.delete_checkpoints(
                    ckpt_predicate=lambda ckpt: INTRA_EPOCH_CKPT_FLAG in ckpt.meta, verbosity=logging.DEBUG)
            else:
                self._save()
                saved = checkpointer.wait()
        stopped = Stopped.by(signum, self.state.optimizer_step, saved and saved.path)
        if self._is_script and ranks.is_main():
            logger.warning("%s", stopped)  # Python prints nothing
        ranks.raise_on_main(stopped)
