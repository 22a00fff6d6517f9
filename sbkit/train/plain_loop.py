"""The training loop of a recipe with its own ``fit_batch``, ``optimizers_step`` or ``update_average``."""

from __future__ import annotations

import logging
from typing import Any

from sbkit.train.batches import MicroBatch
from sbkit.train.distributed import ranks
from sbkit.train.monitor.tally import one_number
from sbkit.train.state import Overrides
from sbkit.train.step import StepResult
from sbkit.train.trainer import Trainer

logger = logging.getLogger(__name__)


class PlainLoop(Trainer):
    """Calls the recipe's own methods as SpeechBrain's Brain does, with sbkit's checkpoints, signals and progress.

    What the recipe computes itself keeps SpeechBrain's meaning: with its own ``fit_batch`` it decides when a step ends
    and how losses are divided, so nothing is recomputed when memory runs out or a loss is not finite, and ranks agree
    between its batches instead of during a backward. With its own ``optimizers_step`` gradients are those of the mean
    over the whole step when it is called.
    """

    def __init__(self, *args: Any, overrides: Overrides):
        super().__init__(*args)
        self.overrides = overrides
        self._warned_dropped = False

    def _begin_step(self) -> None:
        super()._begin_step()
        if self.overrides.fit_batch:
            self.forward_state.save()

    def _fit(self, batch: MicroBatch) -> None:
        brain = self.brain
        loss = brain.fit_batch(batch)
        if self.overrides.averages_batches:
            brain.avg_train_loss = brain.update_average(one_number(loss), brain.avg_train_loss)

    def _update(self) -> None:
        with self.budget("optimizer"):
            if self.overrides.optimizers_step:
                self.steps.normalise(self.optimizers())
            self.brain.optimizers_step()
        if self.steps.started:  # the recipe's own optimizers_step did not call apply
            self.steps.end_without_update()
            self.state.epoch_step += 1

    def _ends_step(self, updated: bool) -> bool:
        return updated or self.overrides.fit_batch

    def _requested(self) -> dict[str, bool]:
        # the steps of a recipe's own fit_batch carry no flags
        flags = ranks.any_of(self.flags()) if self.overrides.fit_batch else {}
        return {**super()._requested(), **flags}

    def _average(self, result: StepResult) -> None:
        if not self.overrides.averages_batches:
            super()._average(result)

    def average_loss(self) -> float:
        return self.state.average.value() if self.overrides.averages_batches else super().average_loss()

    def _warn_dropped(self) -> None:
        """Warn that a recipe's own ``fit_batch`` leaves gradients unused at the end of an epoch.

        Only the recipe knows how its losses are divided and whether these gradients are meant for a step.
        """
        state, accumulated = self.state, self.brain.grad_accumulation_factor
        left = state.step % accumulated
        has_gradients = any(p.grad is not None for p in self.modules.parameters())
        if left and has_gradients and ranks.is_main() and not self._warned_dropped:
            self._warned_dropped = True
            logger.warning(
                "fit_batch of %s updates after every %d batches, and an epoch has %d: the gradients of the last %d are "
                "dropped. Use a grad_accumulation_factor that divides %d, or sbkit.Brain's fit_batch, to keep them",
                type(self.brain).__name__, accumulated, state.step, left, state.step)
