"""One epoch of training: fits its batches, and lets all ranks act together between steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from speechbrain.core import Stage

from sbkit.nn import guard
from sbkit.train import loaders
from sbkit.train.between import Between
from sbkit.train.distributed import parallel, ranks
from sbkit.train.given import DataSource
from sbkit.train.hooks import Trains
from sbkit.train.memory.oom import OomRetry
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.progress import Progress
from sbkit.train.monitor.tally import one_number
from sbkit.train.rng import RngState
from sbkit.train.stepper import Stepper

logger = logging.getLogger(__name__)

_END = object()


class TrainLoop:
    """Trains for one epoch: fits its micro-batches, and runs between two steps what all ranks do together.

    Arguments
    ---------
    hooks : the Brain's methods around an epoch and for a micro-batch
    stepper, retry : compute micro-batches and updates for ``fit_batch``
    between : runs after each step
    rng : the random number generators, as restored from a checkpoint
    """

    def __init__(self, hooks: Trains, stepper: Stepper, retry: OomRetry, between: Between, rng: RngState):
        self.hooks, self.stepper, self.retry, self.between, self.rng = hooks, stepper, retry, between, rng
        self.state, self.overrides = stepper.state, stepper.overrides

    def run(self, train_set: DataSource, epoch: int, show: bool) -> None:
        """Train the rest of the epoch; ``show``: whether to show a progress bar."""
        hooks, state, stepper = self.hooks, self.state, self.stepper
        state.epoch = epoch
        hooks.open_stage(Stage.TRAIN, epoch)
        stepper.freezing.train()
        hooks.zero_grad()
        batches, steps = self._batches(train_set, epoch)
        self.between.start_epoch()
        if hooks.profiler is not None:
            hooks.profiler.start()
        display, progress = self._progress(epoch, steps, show)
        stepped = True
        with stepper.budget.active(), display:
            for batch in self._timed(batches):
                state.step += 1
                self.between.batch()
                before = state.optimizer_step
                if stepped:
                    self._thaw()
                if stepped and self.overrides.fit_batch:
                    stepper.forward_state.keep()
                stepper.graphs.next_batch()
                loss = hooks.fit_batch(batch)
                stepped = state.optimizer_step > before
                if stepped:
                    hooks.open_step(state.optimizer_step + 1)
                if self.overrides.averages_batches:
                    hooks.avg_train_loss = hooks.update_average(one_number(loss), hooks.avg_train_loss)
                progress.batch(batch, int(stepped) if state.plan_driven else 1, state.average.value,
                               stepper.learning_rate)
                self._profile()
                if stepped or self.overrides.fit_batch:
                    self._after_step()
                if hooks.debug and state.step == hooks.debug_batches:
                    break
        self._finish(epoch, stepped, progress)

    def _progress(self, epoch: int, steps: int | None, show: bool) -> tuple[StageDisplay, Progress]:
        hooks, state, budget = self.hooks, self.state, self.stepper.budget
        display = StageDisplay(
            f"train {epoch}", steps, initial=state.epoch_step if state.plan_driven else state.step, show=show,
            budget=budget, scale=ranks.world_size(), colour=hooks.tqdm_barcolor["train"] or None,
            utilisation=hooks.utilisation,
        )
        budget.reset()
        self.between.progress = Progress(display, hooks.metrics_log, budget, epoch, hooks.keys.log_interval,
                                         hooks.utilisation, compiled=hooks.compiled)
        return display, self.between.progress

    def _batches(self, train_set: DataSource, epoch: int) -> tuple[Iterable[Any], int | None]:
        """Return the epoch's remaining batches, and the total for the progress bar."""
        hooks, state = self.hooks, self.state
        state.last_batch = hooks.debug_batches if hooks.debug else None
        if state.plan_driven:
            begun, steps = state.epoch_steps, train_set.steps(epoch)
            if state.epoch_step and begun not in (None, steps):
                logger.warning(
                    "Epoch %s started with %d steps and now has %d, because the corpus or the batching changed "
                    "(round_seconds depends on the device and --compile): some utterances of this epoch are used "
                    "twice or not at all.", epoch, begun, steps)
            state.epoch_steps = steps
            batches = train_set.at(epoch, min(state.epoch_step, steps))
            return loaders.on_device(batches, train_set, hooks.device), steps
        loaders.set_epoch(epoch, hooks.train_sampler, train_set)
        length = loaders.length(train_set)
        if length is not None:
            length += state.step - loaders.begins_at(train_set, state.step)
            state.last_batch = min(length, state.last_batch or length)
        return train_set, length

    def _timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches up to the limit of steps, and count the time spent waiting for them as "data"."""
        iterator = iter(batches)
        self.rng.restore()  # after iter(): starting workers draws random numbers
        while True:
            if self.state.reached(self.hooks.optimizer_step_limit):
                logger.info("Train iteration limit exceeded")
                return
            with self.stepper.budget("data"):
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    def _thaw(self) -> None:
        """Unfreeze what is due before a step, and expect it to need more memory."""
        self.stepper.thaw()
        if self.stepper.freezing.turns(self.state.optimizer_step):
            self.retry.got_through = 0.0

    def _after_step(self) -> None:
        """Run the checks and exchanges between two optimizer steps, on all ranks."""
        stepper = self.stepper
        if not self.state.first_step_checked:
            self.state.first_step_checked = True
            stepper.buffers.look()
            parallel.assert_ranks_equal(stepper.modules, "after the first step")
        else:
            stepper.buffers.sync()
        stepper.budget.step()
        # the steps of a recipe's own fit_batch carry no flags
        flags = ranks.any_of(self.between.flags()) if self.overrides.fit_batch else None
        self.between.step(stepper.steps.facts(), flags)

    def _profile(self) -> None:
        hooks = self.hooks
        if hooks.profiler is None:
            return
        hooks.profiler.step()
        if hooks.profiler.step_num > hooks.tot_prof_steps:
            logger.info("The profiler finished, training is stopped.")
            hooks.profiler.stop()
            ranks.end_together()  # another rank may still be writing its trace

    def _finish(self, epoch: int, stepped: bool, progress: Progress) -> None:
        hooks, state, stepper = self.hooks, self.state, self.stepper
        if stepper.steps.started:  # the end of the epoch cut an accumulation short
            stepper.wrap.finish()
            stepper.update()
            hooks.open_step(state.optimizer_step + 1)
        elif not stepped:
            self._tell_dropped()
        self.between.act_on(stepper.steps.facts(wait=True))
        guard.poll(wait=True)  # before a model that learnt from an invalid label is saved
        hooks.zero_grad(set_to_none=True)
        stepper.buffers.look()
        parallel.assert_ranks_equal(stepper.modules, f"after epoch {epoch}")
        if state.validates:
            self.between.hold()
        progress.close(hooks.avg_train_loss, state.optimizer_step)
        self.retry.tell()
        hooks.close_stage(Stage.TRAIN, hooks.avg_train_loss, epoch)
        state.end_training()

    def _tell_dropped(self) -> None:
        """Warn that a recipe's own ``fit_batch`` leaves gradients unused at the end of an epoch.

        Only the recipe knows how its losses are divided and whether these gradients are meant for a step.
        """
        state, accumulated = self.state, self.hooks.grad_accumulation_factor
        left = state.step % accumulated
        has_gradients = any(p.grad is not None for p in self.stepper.modules.parameters())
        if left and has_gradients and ranks.is_main() and not state.told_dropped:
            state.told_dropped = True
            logger.warning(
                "fit_batch of %s updates after every %d batches, and an epoch has %d: the gradients of the last %d are "
                "dropped. Use a grad_accumulation_factor that divides %d, or sbkit.Brain's fit_batch, to keep them",
                type(self.hooks).__name__, accumulated, state.step, left, state.step)
