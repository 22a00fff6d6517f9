"""The training loop: an optimizer step, an epoch of them, and what all ranks decide between two steps.

``Trainer.train_step`` is one step, read from top to bottom. ``Trainer.train_epoch`` is the loop around it: the epoch's
micro-batches, the step, and what is due after it. Nothing in a step waits for the device: the values that the host
needs, a step's loss among them, are copied in the background and read one step later.

How a step is computed (``runner``), how ranks share it (``parallel``) and in which precision are objects, chosen before
the first step. What is trained is known by its hooks alone (``hooks``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator

import torch
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.errors import SbkitError
from sbkit.nn import guard
from sbkit.system import memory
from sbkit.train import graphs, rng
from sbkit.train.averaging import EMA
from sbkit.train.batches import DataSource, KeptBatch, MicroBatch, is_last
from sbkit.train.checkpoint.files import locked_for_training
from sbkit.train.distributed import equality, ranks, unreached
from sbkit.train.distributed.equality import Buffers
from sbkit.train.distributed.parallel import Parallel, Single
from sbkit.train.freezing import Freezing
from sbkit.train.graphs import Captured
from sbkit.train.hooks import EpochBatches, Hooks, LoopSettings
from sbkit.train.loss import Computed
from sbkit.train.memory import largest
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.epoch_progress import EpochProgress
from sbkit.train.monitor.timing import StepTimes
from sbkit.train.precision import Precision
from sbkit.train.rates import Rate, base_rate
from sbkit.train.results import FLAGS, ArrivingSteps, StepResult, StepSums
from sbkit.train.runner import Eager, GradientsOnly, MicroStep, Runner
from sbkit.train.signals import Stopped, StopSignals
from sbkit.train.state import TrainState

logger = logging.getLogger(__name__)


class NotFinite(SbkitError, ValueError):
    """Raised when losses or gradients were NaN or infinite in more than ``nonfinite_patience`` steps of an epoch."""

    exit_code = 1


class Trainer:
    """Trains the modules of ``hooks``. All ranks of a run call the same methods at the same steps.

    hooks : the modules, and what the recipe does around steps and epochs
    state : the counters and flags of the run
    freezing : which parameters train, by the number of steps
    generators : the random number generators, as restored from a checkpoint
    precision : whether and how losses are scaled
    moving_average : a moving average of the weights, if the run keeps one
    """

    def __init__(self, hooks: Hooks, device: torch.device, state: TrainState, freezing: Freezing,
                 generators: rng.RngState, precision: Precision, moving_average: EMA | None = None):
        self.hooks = hooks
        self.modules = hooks.modules
        self.device = device
        self.state = state
        self.freezing = freezing
        self.precision = precision
        self.moving_average = moving_average
        self.times = StepTimes(device)
        self.buffers = Buffers(self.modules)
        self.signals: StopSignals | None = None
        self.arriving = ArrivingSteps(lag=0 if device.type == "cpu" else 1)  # on a CPU nothing runs behind
        self._generators = generators
        self._progress: EpochProgress | None = None
        self._no_flags = torch.zeros(len(FLAGS), device=device)
        self.share_by(Single(self.compute))

    # ------------------------------------------------------------ how steps are computed

    def share_by(self, parallel: Parallel) -> None:
        """Share steps with the other ranks in this way from now on."""
        self.parallel = parallel
        self.eager = Eager(self.hooks, parallel, self.precision, self.moving_average, self.times, self.device)
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """What computes steps; chosen when the first one is due, as hooks may make optimizers until then."""
        if self._runner is None:
            if not self.hooks.updates_weights:
                self._runner = GradientsOnly(self.eager)
            elif graphs.wanted(self.device, self.settings.graphs):
                self._runner = Captured(self.eager)
            else:
                self._runner = self.eager
        return self._runner

    def compute(self, batch: MicroBatch) -> Computed:
        """Run forward and loss of a training micro-batch."""
        return self.hooks.compute(batch, self.times)

    # ------------------------------------------------------------ around a fit

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Catch signals inside this context; an error discards the held state, as this process may start again."""
        checkpointer = self.hooks.checkpointer
        lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if checkpointer is not None and self.hooks.locks_folder and ranks.is_main():
            lock = locked_for_training(checkpointer.checkpoints_dir)
        # A script's ``on_fit_start`` may set a checkpointer.
        with lock, StopSignals(saves=lambda: self.hooks.checkpointer is not None) as self.signals:
            try:
                yield
            except BaseException:
                if self.hooks.checkpointer is not None:
                    self.hooks.checkpointer.drop()
                raise

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Don't stop the evaluation inside this context after a signal: only ``fit`` has something to save."""
        signals = self.signals
        self.signals = None
        try:
            yield
        finally:
            self.signals = signals

    @property
    def settings(self) -> LoopSettings:
        """The numbers of the run, read anew each time: a script's hooks may change them between any two steps."""
        return self.hooks.settings

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank has received a stop signal."""
        return self.signals is not None and self.signals.signum is not None

    @property
    def learning_rate(self) -> Rate | None:
        optimizers = self.hooks.all_optimizers()
        return base_rate(optimizers[0].param_groups[0]) if optimizers else None

    # ------------------------------------------------------------ a step

    def train_step(self, micro_batches: Iterable[tuple[MicroBatch, bool]]) -> bool:
        """Take one optimizer step; return False if there was no micro-batch left.

        micro_batches : each with whether it is the last of its step; those of later steps are not taken
        """
        hooks = self.hooks
        state = self.state
        times = self.times
        times.begin(state.optimizer_step)
        sums = StepSums()
        batches: list[KeptBatch] = []
        micro: MicroStep | None = None
        last = False

        for batch, last in micro_batches:
            times.mark("data")
            hooks.before_batch(batch, last)
            batches.append(KeptBatch(batch, rng.capture(self.device)))  # for `sbkit rerun`, if something is not finite
            micro = self.runner.micro_step(batch, last)
            sums.add(micro.sums, micro.extra_names)
            if last:
                break
            hooks.after_batch(batch, micro.outputs, micro.objectives, last)
            micro = None  # the next micro-batch needs its memory
        if not batches:
            return False
        if not last:  # the epoch ended within an accumulation of which nobody knew the length
            self.parallel.finish()

        sums_of_ranks = self.parallel.reduce(sums.with_flags(self.flags()))
        if not state.first_step_checked:
            unreached.warn_unreached(self.modules, hooks.recipe, state.warned_unreached)
        values = self.runner.update(sums_of_ranks)
        number = state.count_step(self.runner.updates_weights)
        self.arriving.add(values, sums.extra_names, batches, number)
        times.mark("optimizer")
        if last:
            assert micro is not None
            hooks.after_batch(batch, micro.outputs, micro.objectives, last)
        return True

    def flags(self) -> torch.Tensor:
        """Return what this rank asks for with a step: a 1 on the device for each of ``FLAGS`` that it raises."""
        minutes = self.settings.save_minutes if self.hooks.checkpointer is not None else 0
        save_is_due = minutes > 0 and time.monotonic() - self.state.saved_at > 60 * minutes
        raised = {"stop": self.asked_to_stop, "save": save_is_due and ranks.is_main(), "agree": self.parallel.disagrees}
        if not any(raised.values()):
            return self._no_flags  # a copy from the host less in nearly all steps
        return torch.tensor([raised[name] for name in FLAGS], dtype=torch.float32, device=self.device)

    # ------------------------------------------------------------ an epoch

    def begin_fit(self, validates: bool) -> None:
        """Begin a ``fit``; ``validates``: whether each epoch ends with a validation."""
        state = self.state
        self._runner = None  # hooks may have made other optimizers
        self.hooks.open_step(state.optimizer_step + 1)
        self.buffers = Buffers(self.modules)  # hooks may have replaced layers
        state.first_step_checked = False
        state.validates = validates
        state.largest_tried = False
        if state.parameters_vary:
            self.parallel.agree_each_time()

    def train_epoch(self, train_set: DataSource, epoch: int, show: bool) -> None:
        """Train the rest of an epoch; ``show``: whether to show a progress bar."""
        hooks = self.hooks
        state = self.state
        state.epoch = epoch
        hooks.open_epoch(epoch)
        self.freezing.train()
        hooks.zero_gradients()
        batches = hooks.batches(train_set, epoch)
        state.last_batch_in_epoch = batches.last_batch
        if not state.largest_tried:
            state.largest_tried = True
            self._try_largest(train_set, epoch)
        state.restart_save_interval()
        hooks.begin_profile()
        self.times.reset()
        if not state.batches_in_epoch:
            state.epoch_began = time.monotonic()

        progress = self._new_progress(batches, epoch, show)
        self._progress = progress
        with progress:
            self.train_steps(self._micro_batches(batches, progress), progress, train_set, epoch)
            self.receive_results(wait=True)
            progress.show(state.mean_loss.known(), self.learning_rate)
        self._end_epoch(progress, epoch)

    def _end_epoch(self, progress: EpochProgress, epoch: int) -> None:
        """Do what is due after the last step of an epoch, before its validation."""
        hooks = self.hooks
        state = self.state

        # Steps send what ranks ask for, and none follows the last one. A validation asks by itself.
        if not state.validates and ranks.any_of({"stop": self.asked_to_stop})["stop"]:
            self.save_and_stop()

        guard.poll(wait=True)  # before a model that learnt from an invalid label is saved
        hooks.zero_gradients()
        self.buffers.detect_changes()
        equality.assert_ranks_equal(self.modules, f"after epoch {epoch}")
        if state.validates and hooks.checkpointer is not None and self.parallel.sharded is None:
            # Saved if a signal arrives or an error before the epoch ends: a resumed run then repeats what follows, from
            # ``on_stage_end`` on, with the same random numbers. Of a sharded model this would take a complete save.
            hooks.hold_checkpoint()

        loss = self.mean_loss()
        if not self.trained_anything():
            logger.warning("Nothing was trained in epoch %d: every loss had a count of 0, or was not finite", epoch)
        progress.close(loss, state.optimizer_step, state.epoch_began)
        hooks.close_epoch(epoch, loss)
        state.end_training()

    def _new_progress(self, batches: EpochBatches, epoch: int, show: bool) -> EpochProgress:
        hooks = self.hooks
        state = self.state
        # A second of audio takes fewer FLOPs while parts are frozen that will train.
        thaws = any(step > state.optimizer_step for step in self.freezing.unfreeze_steps)
        display = StageDisplay(
            f"train {epoch}", batches.total, initial=batches.done, show=show, times=self.times,
            colour=self.settings.bar_colour, utilisation=None if thaws else hooks.utilisation)
        return EpochProgress(display, self.times, hooks.metrics_log, epoch=epoch, interval=self.settings.log_interval,
                             compiled=hooks.compiled)

    def trained_anything(self) -> bool:
        """Return whether the epoch so far has trained on something, or had nothing to train on."""
        return bool(self.state.mean_loss.count) or not self.state.steps_in_epoch

    def train_steps(self, micro_batches: Iterator[tuple[MicroBatch, bool]], progress: EpochProgress,
                    train_set: DataSource, epoch: int) -> None:
        """Take the epoch's steps, and do what is due after each."""
        while self.prepare_step(train_set, epoch):
            if not self.train_step(micro_batches):
                return
            self.open_next_step()
            self.between_steps(self.receive_results(), progress)

    def open_next_step(self) -> None:
        """Let the hooks end the step whose update was the last, and prepare the one whose update is the next."""
        number = self.state.optimizer_step
        self.hooks.end_step(number)
        self.hooks.open_step(number + 1)

    def _micro_batches(self, epoch_batches: EpochBatches, progress: EpochProgress) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield the epoch's micro-batches, each with whether its step ends with it."""
        state = self.state
        batches = epoch_batches.start()
        self._generators.restore()  # after that: starting workers draws random numbers
        for batch in batches:
            state.batches_in_epoch += 1
            state.batches_since_save += 1
            settings = self.settings
            planned = is_last(batch)
            if planned is None:
                last = state.batches_in_epoch % settings.grad_accumulation_factor == 0
            else:
                last = planned
            last = last or state.batches_in_epoch == state.last_batch_in_epoch
            progress.count(batch, 1 if planned is None else int(last))
            yield batch, last
            if state.batches_in_epoch == settings.batch_limit:
                return

    def prepare_step(self, train_set: DataSource, epoch: int) -> bool:
        """Thaw what trains from this step on; return False if the run has taken as many steps as it may."""
        state = self.state
        limit = self.settings.step_limit
        if limit is not None and state.optimizer_step >= limit:
            logger.info("Training ends, because the run has taken the %d steps of optimizer_step_limit", limit)
            return False

        thaws_at = self.freezing.next_change
        if thaws_at is not None and state.optimizer_step >= thaws_at:
            self.freezing.apply(state.optimizer_step)
            self.freezing.train()
            if self.moving_average is not None:
                self.moving_average.track_trainable()
            self.parallel.reset()
            self.runner.reset()
            state.first_step_checked = False
            self._try_largest(train_set, epoch)
        return True

    def between_steps(self, asked: set[str], progress: EpochProgress) -> None:
        """Do what is due between two steps, and what any rank has asked for with a step before."""
        state = self.state
        if not state.first_step_checked:
            state.first_step_checked = True
            self.buffers.detect_changes()
            equality.assert_ranks_equal(self.modules, "after the first step")
        elif self.buffers.changing:
            self.buffers.sync()
        guard.poll()
        if time.monotonic() >= progress.due:
            progress.show(state.mean_loss.known(), self.learning_rate)

        if "agree" in asked:
            self._agree_each_time()
        if "stop" in asked:
            self.save_and_stop()
        checkpointer = self.hooks.checkpointer
        if checkpointer is not None:
            enough_batches = 0 < self.settings.save_batches <= state.batches_since_save
            if enough_batches or "save" in asked:
                self._save()
            if checkpointer.writer.failed:
                checkpointer.writer.wait()  # raises now, and not an epoch later
        if self.hooks.profile_step():
            ranks.end_together()  # another rank may still be writing its trace

    def _agree_each_time(self) -> None:
        """Have ranks agree in each step on the parameters that have gradients, unless they do so already."""
        if not self.parallel.agree_each_time():
            return
        self.runner.reset()
        self.state.parameters_vary = True
        if ranks.is_main():
            logger.warning("The loss uses other parameters than in the first step. From now on ranks agree in each "
                           "step on those that have gradients, which makes it wait for the device; with "
                           "--find_unused_parameters they do so from the first step")

    # ------------------------------------------------------------ what fits into memory

    def _try_largest(self, train_set: DataSource, epoch: int) -> None:
        """End the run if a micro-batch of its plan doesn't fit into memory, hours before it comes.

        On a CPU there is nothing to find out, unless the memory of this process is limited.
        """
        if hasattr(train_set, "largest") and (self.device.type == "cuda" or memory.bounded()):
            largest.refuse_too_large(train_set.largest(epoch), self.fits, self.device)

    def fits(self, batch: MicroBatch) -> bool:
        """Return whether forward and backward of a micro-batch fit into memory, beside the optimizer's states."""
        return largest.fits_into_memory(batch, self.hooks, self.parallel, self.device)

    # ------------------------------------------------------------ what the host learns of steps

    def receive_results(self, wait: bool = False) -> set[str]:
        """Count, show and report the steps whose values have arrived: all but the newest, or all with ``wait``.

        Returns what any rank asked for with them, see ``results.FLAGS``.
        """
        asked: set[str] = set()
        for result in self.arriving.take(wait):
            self.state.mean_loss.add(result.total, result.count)
            if self._progress is not None:
                self._progress.add(result)
            self.hooks.close_step(result)
            if result.failed:
                self._report_failure(result)
            asked |= result.asked
        return asked

    def _report_failure(self, result: StepResult) -> None:
        """Say why a step was not finite, and end the run if there were too many of them."""
        state = self.state
        patience = self.settings.nonfinite_patience
        state.failed_in_epoch += 1
        report = f"its {result.failed_part} is not finite (with fsdp, a rank can't examine it alone)"
        if self.parallel.sharded is None:
            report = self.hooks.explain(result, state.epoch)
        if ranks.is_main():
            logger.warning("Step %d was skipped, number %d in this epoch (nonfinite_patience allows %d):\n%s",
                           result.number, state.failed_in_epoch, patience, report)
        if state.failed_in_epoch > patience:
            ranks.raise_on_main(NotFinite(
                "not-finite",
                f"the {result.failed_part} of {state.failed_in_epoch} steps of this epoch was not finite",
                hint="see the reports above; nonfinite_patience sets how many are allowed"))

    def mean_loss(self) -> float:
        """Return the mean training loss of the epoch so far, over all ranks; waits for the device."""
        return self.state.mean_loss.value(self.arriving.losses())

    # ------------------------------------------------------------ saving and leaving

    def _save(self) -> None:
        """Save a checkpoint in the middle of the epoch, after recording all steps so far."""
        self.receive_results(wait=True)  # what ranks asked for with these, they ask for again with the next step
        if self._progress is not None:
            self._progress.show(self.state.mean_loss.known(), self.learning_rate)
        guard.poll(wait=True)  # raises now if a label was invalid, so that nothing learnt from it is saved
        self.buffers.detect_changes()
        self.hooks.write_checkpoint()
        self.state.restart_save_interval()

    @contextlib.contextmanager
    def keeping_epoch(self, epoch: int) -> Iterator[None]:
        """Save what an epoch trained if its validation fails, or a recipe's own ``on_stage_end``."""
        checkpointer = self.hooks.checkpointer
        try:
            yield
        except (Exception, ranks.PeerFailed):
            with contextlib.suppress(Exception):  # the first error is what counts
                if checkpointer is not None and checkpointer.publish() is not None:
                    logger.warning("Epoch %d's training is saved: the same command goes on with its validation.", epoch)
            raise
        finally:
            if checkpointer is not None:
                checkpointer.drop()

    def save_and_stop(self) -> None:
        """Save a checkpoint and end the run, after a signal to any rank."""
        signum_here = None if self.signals is None else self.signals.signum
        signum = next(signum for signum in ranks.gather_objects(signum_here) if signum is not None)
        saved: Checkpoint | None = None
        checkpointer = self.hooks.checkpointer
        if checkpointer is not None:
            saved = ranks.run_on_main(checkpointer.publish)
            if saved is None:
                self._save()
                saved = checkpointer.wait()
        state = self.state
        place = f"step {state.optimizer_step}"
        if not state.optimizer_step:  # a recipe's own step may count none
            place = f"batch {state.batches_in_epoch} of epoch {state.epoch}"
        stopped = Stopped.by(signum, place, None if saved is None else saved.path)
        if self.hooks.locks_folder and ranks.is_main():
            logger.warning("%s", stopped)  # of a script, for which Python prints nothing
        ranks.raise_on_main(stopped)
