"""SpeechBrain's own loop over a step, for scripts that override a part of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch

from sbkit.train.batches import DataSource, MicroBatch
from sbkit.train.distributed import ranks
from sbkit.train.monitor.display import Progress
from sbkit.train.step import one_number
from sbkit.train.trainer import FLAGS, NotFinite, Trainer

logger = logging.getLogger(__name__)


class ScriptTrainer(Trainer):
    """Trains as ``Trainer``, but takes steps by ``Brain.fit_batch``, as SpeechBrain's own loop does.

    For a script, or a task's recipe, that overrides a part of SpeechBrain's step. What only ``Trainer.train_step``
    knows is missing here: the exact mean of a step, CUDA graphs, reports of bad batches, and the results of steps
    (``on_step_known``, lines of metrics.jsonl, and what follows the progress of learning).

    overridden : the methods of SpeechBrain's step that the script overrides
    """

    def __init__(self, brain: Any, overridden: Collection[str], **settings: Any):  # an sbkit.Brain, as in ``hooks``
        super().__init__(**settings)
        self.brain, self.overridden = brain, overridden

    def take_steps(self, micro_batches: Iterator[tuple[MicroBatch, bool]], progress: Progress, train_set: DataSource,
                   epoch: int) -> None:
        """Go through the epoch.

        The script decides when a step ends and how losses are divided. Ranks agree where one ends by
        ``grad_accumulation_factor`` or the plan: gradients of half a step are in no checkpoint.
        """
        brain, state = self.brain, self.state
        while not self.begin_step(train_set, epoch):
            batch, last = next(micro_batches, (None, False))
            if batch is None:
                return
            updates, failures = state.optimizer_step, state.nonfinite_count
            loss = one_number(brain.fit_batch(batch), "fit_batch")
            checks_itself = state.nonfinite_count > failures or "check_loss_isfinite" in self.overridden
            if "fit_batch" in self.overridden and not checks_itself:
                self._count_if_not_finite(loss, epoch)
            brain.avg_train_loss = brain.update_average(loss, brain.avg_train_loss)
            state.epoch_step += last
            if state.optimizer_step > updates:
                self.begin_next_update()
            if last:
                asked = ranks.any_of(dict(zip(FLAGS, self.flags().tolist(), strict=True)))
                self.between_steps({name for name, number in asked.items() if number}, progress)

    def _count_if_not_finite(self, loss: torch.Tensor, epoch: int) -> None:
        """Count a loss that is not finite, which a script's own ``fit_batch`` may train on."""
        if torch.isfinite(loss):
            return
        state, patience = self.state, self.settings.nonfinite_patience
        state.nonfinite_count += 1
        what = f"batch {state.step} has the loss {loss.item()}, number {state.nonfinite_count} of epoch {epoch}"
        if state.nonfinite_count > patience:
            raise NotFinite(what, hint=f"nonfinite_patience allows {patience}")
        logger.warning("%s (nonfinite_patience allows %d)", what, patience)

    def trained_anything(self) -> bool:
        return True  # the script's own average tells
