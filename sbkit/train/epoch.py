"""One epoch of training: batches become steps, and all ranks act on what the steps have shown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from speechbrain.core import Stage

from sbkit.nn import guard
from sbkit.train import loaders
from sbkit.train.between import Between
from sbkit.train.distributed import parallel, ranks
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
    """Goes through an epoch's micro-batches: each is fitted, and between two steps all ranks do the same.

    Arguments
    ---------
    hooks: the Brain's methods around an epoch and for a micro-batch of it
    stepper, retry: compute what ``fit_batch`` asks for
    between: what follows each step
    rng: the generators, as the checkpoint left them
    """

    def __init__(self, hooks: Trains, stepper: Stepper, retry: OomRetry, between: Between, rng: RngState):
        self.hooks, self.stepper, self.retry, self.between, self.rng = hooks, stepper, retry, between, rng
        self.state, self.overrides = stepper.state, stepper.overrides

    def run(self, train_set: Any, epoch: Any, show: bool) -> None:
        """Train from where the epoch stands to its end; ``show``: a progress bar."""
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

    def _progress(self, epoch: Any, steps: int | None, show: bool) -> tuple[StageDisplay, Progress]:
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

    def _batches(self, train_set: Any, epoch: Any) -> tuple[Iterable[Any], int | None]:
        """The epoch's batches from where it stands, and how many the bar counts to."""
        hooks, state = self.hooks, self.state
        state.last_batch = hooks.debug_batches if hooks.debug else None
        if state.plan_driven:
            begun, steps = state.epoch_steps, train_set.steps(epoch)
            if state.epoch_step and begun not in (None, steps):
                logger.warning(
                    "Epoch %s was begun with %d steps and has %d now (another corpus or other batching; its "
                    "round_seconds follows the device and --compile): some of its utterances are heard twice or not "
                    "at all.", epoch, begun, steps)
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
        """The same batches, until the limit of steps; waiting for one is counted as "data"."""
        iterator = iter(batches)
        self.rng.restore()  # where the checkpoint stood: starting workers has drawn random numbers
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
        """Before a step: what has been frozen long enough trains from here on, and needs memory."""
        self.stepper.thaw()
        if self.stepper.freezing.turns(self.state.optimizer_step):
            self.retry.got_through = 0.0

    def _after_step(self) -> None:
        """What all ranks do together between two optimizer steps."""
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
            ranks.end_together()  # one still writes its trace while another is done

    def _finish(self, epoch: Any, stepped: bool, progress: Progress) -> None:
        hooks, state, stepper = self.hooks, self.state, self.stepper
        if stepper.steps.started:  # an accumulation that the end of the epoch cut short is a step too
            stepper.wrap.finish()
            stepper.update()
            hooks.open_step(state.optimizer_step + 1)
        elif not stepped:
            self._tell_dropped()
        self.between.act_on(stepper.steps.facts(wait=True))
        guard.poll(wait=True)  # before anything is made of what was learnt from a label outside its table
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
        """A recipe's own ``fit_batch`` decides itself when to step: what it leaves over can't be stepped for it.

        Only the recipe knows by what the losses were divided, and whether these gradients are meant for a step.
        """
        state, accumulated = self.state, self.hooks.grad_accumulation_factor
        left = state.step % accumulated
        has_gradients = any(p.grad is not None for p in self.stepper.modules.parameters())
        if left and has_gradients and ranks.is_main() and not state.told_dropped:
            state.told_dropped = True
            logger.warning(
                "fit_batch of %s steps after every %d batches, an epoch has %d: the gradients of the last %d are "
                "dropped. A grad_accumulation_factor that divides %d keeps them, and so does sbkit.Brain's own "
                "fit_batch", type(self.hooks).__name__, accumulated, state.step, left, state.step)
