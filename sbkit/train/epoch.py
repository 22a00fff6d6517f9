"""One epoch of training: batches become steps, and all ranks act on what the steps have shown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from speechbrain.core import Stage

from sbkit.nn import guard
from sbkit.train import loaders
from sbkit.train.distributed import parallel, ranks
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.progress import Progress
from sbkit.train.monitor.tally import Mean, one_number

logger = logging.getLogger(__name__)

_END = object()


def train(brain: Any, train_set: Any, epoch: Any, show: bool) -> None:
    """Train from where the epoch stands to its end; ``show``: a progress bar."""
    brain._epoch = epoch
    brain.on_stage_start(Stage.TRAIN, epoch)
    brain.modules.train()
    brain.zero_grad()
    batches, steps = _batches(brain, train_set, epoch)
    brain._between.start_epoch()
    if brain.profiler is not None:
        brain.profiler.start()
    done = brain._epoch_step if brain._plan_driven else brain.step
    display = StageDisplay(
        f"train {epoch}", steps, initial=done, show=show,
        budget=brain._budget, scale=ranks.world_size(), colour=brain.tqdm_barcolor["train"] or None,
        utilisation=brain.utilisation,
    )
    brain._budget.reset()
    brain._progress = Progress(display, brain.metrics_log, brain._budget, epoch,
                               brain.keys.log_interval, brain.utilisation,
                               compiled=brain.compiled)
    stepped = True
    with brain._budget.active(), display:
        for batch in _timed(brain, batches):
            brain.step += 1
            brain._between.batch()
            before = brain.optimizer_step
            if stepped and brain._own_fit_batch:
                brain._forward_state.keep()
            brain._graphs.next_batch()
            loss = brain.fit_batch(batch)
            if brain._averages_batches:
                brain.avg_train_loss = brain.update_average(one_number(loss), brain.avg_train_loss)
            stepped = brain.optimizer_step > before
            brain._progress.batch(batch, int(stepped) if brain._plan_driven else 1,
                                  brain._average.value, brain._learning_rate)
            _profile(brain)
            if stepped or brain._own_fit_batch:
                _after_step(brain)
            if brain.debug and brain.step == brain.debug_batches:
                break
    _finish(brain, epoch, stepped)


def _batches(brain: Any, train_set: Any, epoch: Any) -> tuple[Iterable, int | None]:
    """The epoch's batches from where it stands, and how many the bar counts to."""
    brain._last_batch = brain.debug_batches if brain.debug else None
    if brain._plan_driven:
        begun, steps = brain._epoch_steps, train_set.steps(epoch)
        if brain._epoch_step and begun not in (None, steps):
            logger.warning(
                "Epoch %s was begun with %d steps and has %d now (another corpus or other batching; its round_seconds "
                "follows the device and --compile): some of its utterances are heard twice or not at all.",
                epoch, begun, steps)
        brain._epoch_steps = steps
        batches = train_set.at(epoch, min(brain._epoch_step, steps))
        return loaders.on_device(batches, train_set, brain.device), steps
    loaders.set_epoch(epoch, brain.train_sampler, train_set)
    length = loaders.length(train_set)
    if length is not None:
        length += brain.step - loaders.begins_at(train_set, brain.step)
        brain._last_batch = min(length, brain._last_batch or length)
    return train_set, length


def _timed(brain: Any, batches: Iterable) -> Iterator:
    """The same batches, until the limit of steps; waiting for one is counted as "data"."""
    iterator = iter(batches)
    brain._rng.restore()  # where the checkpoint stood: starting workers has drawn random numbers
    while True:
        if brain._optimizer_step_limit_exceeded:
            logger.info("Train iteration limit exceeded")
            return
        with brain._budget("data"):
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


def _after_step(brain: Any) -> None:
    """What all ranks do together between two optimizer steps."""
    if not brain._first_step_checked:
        brain._first_step_checked = True
        brain._buffers.look()
        parallel.assert_ranks_equal(brain.modules, "after the first step")
    else:
        brain._buffers.sync()
    brain._budget.step()
    # the steps of a recipe's own fit_batch carry no flags
    flags = ranks.any_of(brain._between.flags()) if brain._own_fit_batch else None
    brain._between.step(brain._steps.facts(), flags)


def _profile(brain: Any) -> None:
    if brain.profiler is None:
        return
    brain.profiler.step()
    if brain.profiler.step_num > brain.tot_prof_steps:
        logger.info("The profiler finished, training is stopped.")
        brain.profiler.stop()
        ranks.end_together()  # one still writes its trace while another is done


def _finish(brain: Any, epoch: Any, stepped: bool) -> None:
    if brain._steps.started:  # an accumulation that the end of the epoch cut short is a step too
        if brain._parallel is not None:
            brain._parallel.finish()
        brain._update()
    elif not stepped:
        _tell_dropped(brain)
    brain._between.act_on(brain._steps.facts(wait=True))
    guard.poll(wait=True)  # before anything is made of what was learnt from a label outside its table
    brain.zero_grad(set_to_none=True)
    brain._buffers.look()
    parallel.assert_ranks_equal(brain.modules, f"after epoch {epoch}")
    if brain._validates:
        brain._between.hold()
    brain._progress.close(brain.avg_train_loss, brain.optimizer_step)
    brain._parts.tell()
    brain.on_stage_end(Stage.TRAIN, brain.avg_train_loss, epoch)
    brain._trained = (brain.step, brain._epoch_step, brain._average, brain.nonfinite_count)
    brain._average = Mean()
    brain.step = brain._epoch_step = brain.nonfinite_count = 0


def _tell_dropped(brain: Any) -> None:
    """A recipe's own ``fit_batch`` decides itself when to step: what it leaves over can't be stepped for it.

    Only the recipe knows by what the losses were divided, and whether these gradients are meant for a step.
    """
    left = brain.step % brain.grad_accumulation_factor
    has_gradients = any(p.grad is not None for p in brain.modules.parameters())
    if left and has_gradients and ranks.is_main() and not brain._told_dropped:
        brain._told_dropped = True
        logger.warning(
            "fit_batch of %s steps after every %d batches, an epoch has %d: the gradients of the last %d are dropped. "
            "A grad_accumulation_factor that divides %d keeps them, and so does sbkit.Brain's own fit_batch",
            type(brain).__name__, brain.grad_accumulation_factor, brain.step, left, brain.step)
