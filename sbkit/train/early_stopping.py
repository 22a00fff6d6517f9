"""SpeechBrain's early stopping, in tasks: its state is saved, and a warning says that the run ends."""

from __future__ import annotations

import logging

from speechbrain.utils.distributed import main_process_only
from speechbrain.utils.epoch_loop import EpochCounter, EpochCounterWithStopper

from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)
#: Its state's name in checkpoints.
STOPPER = "stopper"


class EarlyStopping:
    """Stops a run by its ``EpochCounterWithStopper``; nothing happens with another counter.

    checkpointer : saves the counter's best value and epoch, of which SpeechBrain saves only the epochs
    """

    def __init__(self, counter: object, checkpointer: Checkpointer | None) -> None:
        self.counter = counter if isinstance(counter, EpochCounterWithStopper) else None
        if self.counter is not None and checkpointer is not None:
            checkpointer.add_recoverable(
                STOPPER, counter, custom_save_hook=main_process_only(EpochCounterWithStopper._save),
                custom_load_hook=load_stopper, optional_load=True)

    def after_validation(self, name: str, value: float) -> None:
        """Count an epoch, with the value of the metric that chooses checkpoints."""
        if self.counter is None:
            return
        self.counter.update_metric(value)
        if self.counter.should_stop and ranks.is_main():
            logger.warning("The run ends after epoch %d of %d: the best %s is of epoch %d", self.counter.current,
                           self.counter.limit, name, self.counter.best_limit)


def load_stopper(counter: EpochCounterWithStopper, path: str, end_of_epoch: bool = True, device: object = None) -> None:
    """Load what SpeechBrain saved, and decide again whether to stop, since the limit may have changed."""
    EpochCounterWithStopper._recover(counter, path, end_of_epoch)
    counter.should_stop &= counter.current - counter.best_limit >= counter.limit_to_stop


def keys_to_raise(counter: EpochCounter) -> str:
    """Return the options of a counter that must be larger for an ended run to continue, in words; empty if none must.

    >>> keys_to_raise(EpochCounter(4))
    ''
    """
    larger = ["number_of_epochs"] if counter.current >= counter.limit else []
    if getattr(counter, "should_stop", False):
        larger.append("limit_to_stop (it stopped early)")
    return " and ".join(larger)
