"""SpeechBrain's own loop over a step, for scripts that override a part of it.

A script overrides methods of the Brain, so these have to be methods there. They only call functions of this file, which
get the Brain.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch

from sbkit.train.batches import DataSource, MicroBatch, is_last
from sbkit.train.distributed import ranks
from sbkit.train.loss import one_number
from sbkit.train.monitor.epoch_progress import EpochProgress
from sbkit.train.results import FLAGS
from sbkit.train.trainer import NotFinite, Trainer
from sbkit.train.update import update

logger = logging.getLogger(__name__)

Brain = Any  # an sbkit.Brain, whose module imports this one

#: What a script may override of SpeechBrain's step, so that ``ScriptTrainer`` trains it.
_METHODS_OF_A_STEP = ("fit_batch", "optimizers_step", "update_average", "check_loss_isfinite", "_fit_train")


def overridden_methods(script_class: type, brain_class: type) -> list[str]:
    """Return the methods of SpeechBrain's step that a script's class overrides, compared with ``sbkit.Brain``."""
    return [name for name in _METHODS_OF_A_STEP if getattr(script_class, name) is not getattr(brain_class, name)]


def fit_batch(brain: Brain, batch: MicroBatch) -> torch.Tensor:
    """Train on one batch as SpeechBrain does, and return its detached loss.

    A batch of a plan says itself whether it ends a step, and of how many its step consists; any other ends one every
    ``grad_accumulation_factor`` batches.
    """
    ends_planned_step = is_last(batch)
    if ends_planned_step is None:
        batches_of_step = brain.grad_accumulation_factor
        should_step = brain.step % batches_of_step == 0
    else:
        batches_of_step = batch.micros
        should_step = ends_planned_step

    brain.on_fit_batch_start(batch, should_step)
    with brain.no_sync(not should_step):
        outputs, objectives, loss = brain.trainer.parallel.loss_of(batch)
        count = torch.as_tensor(loss.count, device=loss.total.device)
        mean = loss.total / count.where(count > 0, 1)  # a dummy batch has no units, and its gradient is 0
        scaled = brain.scaler.scale(mean / batches_of_step)
        brain.check_loss_isfinite(scaled)
        scaled.backward()
    if should_step:
        brain.optimizers_step()
    brain.on_fit_batch_end(batch, outputs, objectives, should_step)
    return loss.mean.detach()


def optimizers_step(brain: Brain) -> None:
    """Clip each optimizer's gradients, update unless something is not finite, and count the step."""
    trainer = brain.trainer
    if not trainer.hooks.updates_weights:
        return
    eager = trainer.eager
    scale = brain.scaler.factor()
    gradient_factor = torch.ones((), device=eager.device) if scale is None else 1 / scale

    optimizers, rates_on_device = eager.prepare_update()
    with eager.rescaling_frozen(optimizers):
        _, skipped = update(optimizers, gradient_factor, brain.max_grad_norm, rates=rates_on_device)
        eager.adjust_scale_and_average(skipped, skipped)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
    brain.optimizer_step += 1


class ScriptTrainer(Trainer):
    """Trains as ``Trainer``, but has each micro-batch trained by ``Brain.fit_batch``, as SpeechBrain's own loop does.

    For a script, or a task's recipe, that overrides a part of SpeechBrain's step. ``Trainer.train_step`` would never
    call that part, so it isn't called here. An epoch around the step is ``Trainer.train_epoch`` as ever.

    Kept, whatever is overridden:

    - the data: its plan, each rank's share, workers, and resuming at the same batch;
    - what is due between steps: checkpoints, stop signals, limits, thawing, a profile, comparisons between ranks;
    - hooks around a step: ``open_step``, ``end_step``, and with them the learning rate, if the script counts its
      updates (``self.optimizer_step += 1``, as SpeechBrain's ``optimizers_step`` does; a warning says if it doesn't);
    - gradients that are averaged over ranks, after each backward by agreement on the parameters that it reached;
    - how many losses of an epoch may be not finite (``nonfinite_patience``).

    Kept as long as ``optimizers_step`` is not overridden: clipping, the loss scale of fp16, steps that are skipped on
    the device if a gradient is not finite, and the moving average of the weights.

    Lost:

    - the mean over a whole step: a micro-batch counts as much as any other, and a rank as much as any other, whatever
      their numbers of tokens or frames;
    - fsdp, which is refused, if ``fit_batch`` is overridden;
    - CUDA graphs, and steps without a wait: each loss is read on the host, which checks whether it is finite;
    - what the host learns of steps: ``on_step_known``, their lines in metrics.jsonl, reports in ``bad_batches/``, and
      what follows the progress of learning.

    A script that overrides ``_fit_train`` runs a loop of its own over the epoch, unless it calls ``super()``: it keeps
    what is around an epoch.

    The two loops share what is before and after a step (``prepare_step``, ``open_next_step``, ``between_steps``).
    Their lines differ in who knows whether a micro-batch ended a step or updated the weights: here only the script.

    overridden : the methods of SpeechBrain's step that the script overrides
    """

    def __init__(self, brain: Brain, overridden: Collection[str], **settings: Any):
        super().__init__(**settings)
        self.brain = brain
        self.overridden = overridden
        self._warned = False

    def train_steps(self, micro_batches: Iterator[tuple[MicroBatch, bool]], progress: EpochProgress,
                    train_set: DataSource, epoch: int) -> None:
        """Go through the epoch.

        The script decides when a step ends and how losses are divided. Ranks agree where one ends by
        ``grad_accumulation_factor`` or the plan: gradients of half a step are in no checkpoint.
        """
        updates_before = self.state.optimizer_step
        batches_before = self.state.batches_in_epoch
        self._train_steps(micro_batches, progress, train_set, epoch)
        if self.state.batches_in_epoch > batches_before and self.state.optimizer_step == updates_before:
            self._warn_of_uncounted_updates(epoch)

    def _train_steps(self, micro_batches: Iterator[tuple[MicroBatch, bool]], progress: EpochProgress,
                     train_set: DataSource, epoch: int) -> None:
        """Train on each micro-batch; after the last of a step, do what is due between steps."""
        state = self.state
        while self.prepare_step(train_set, epoch):
            following = next(micro_batches, None)
            if following is None:
                return
            batch, last = following

            updates_before = state.optimizer_step
            self._fit_batch(batch, epoch)
            if last:
                state.steps_in_epoch += 1
            if state.optimizer_step > updates_before:
                self.open_next_step()
            if last:
                self.between_steps(self._agree_on_flags(), progress)

    def _warn_of_uncounted_updates(self, epoch: int) -> None:
        """Warn once that batches were trained on, but no update was counted."""
        if self._warned or not ranks.is_main():
            return
        self._warned = True
        logger.warning("No optimizer step was counted in epoch %d, so schedules, freeze and step limits don't advance. "
                       "If optimizers_step or fit_batch of %s updates weights, let it also do "
                       "self.optimizer_step += 1, as SpeechBrain's does", epoch, type(self.brain).__name__)

    def _fit_batch(self, batch: MicroBatch, epoch: int) -> None:
        """Train on a micro-batch by the script's methods, and count its loss."""
        brain = self.brain
        failures_before = self.state.failed_in_epoch
        loss = one_number(brain.fit_batch(batch), "fit_batch")

        # Brain.fit_batch checks its loss; a script's own may do so by check_loss_isfinite, or not at all.
        checked = self.state.failed_in_epoch > failures_before or "check_loss_isfinite" in self.overridden
        if "fit_batch" in self.overridden and not checked:
            self._count_if_not_finite(loss, epoch)
        brain.avg_train_loss = brain.update_average(loss, brain.avg_train_loss)

    def _count_if_not_finite(self, loss: torch.Tensor, epoch: int) -> None:
        """Count a loss that is not finite, which a script's own ``fit_batch`` may train on."""
        if torch.isfinite(loss):
            return
        state = self.state
        patience = self.settings.nonfinite_patience
        state.failed_in_epoch += 1
        what = (f"batch {state.batches_in_epoch} has the loss {loss.item()}, number {state.failed_in_epoch} of epoch "
                f"{epoch}")
        if state.failed_in_epoch > patience:
            raise NotFinite("not-finite", what, hint=f"nonfinite_patience allows {patience}")
        logger.warning("%s (nonfinite_patience allows %d)", what, patience)

    def _agree_on_flags(self) -> set[str]:
        """Return what any rank asks for, see ``results.FLAGS``; a script's step has no sums with which to send that."""
        flags = dict(zip(FLAGS, map(bool, self.flags().tolist()), strict=True))
        return {name for name, raised in ranks.any_of(flags).items() if raised}

    def trained_anything(self) -> bool:
        return True  # the script's own average tells
