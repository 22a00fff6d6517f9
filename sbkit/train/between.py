"""Decisions of all ranks between two optimizer steps: saving, stopping, and examining steps that failed."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from speechbrain.core import INTRA_EPOCH_CKPT_FLAG

from sbkit.errors import SbkitError
from sbkit.nn import guard
from sbkit.train.diagnose import culprit
from sbkit.train.distributed import ranks
from sbkit.train.distributed.sharding import is_sharded
from sbkit.train.hooks import Decides
from sbkit.train.monitor.progress import Progress
from sbkit.train.signals import Stopped, StopSignals
from sbkit.train.step import Facts
from sbkit.train.stepper import FLAGS, Stepper

logger = logging.getLogger(__name__)


class NotFinite(SbkitError, ValueError):
    """Raised when losses or gradients were NaN or infinite in more than ``nonfinite_patience`` steps of an epoch."""

    exit_code = 1


class Between:
    """Runs between steps: records their values, saves, stops, and examines steps that were not finite.

    Arguments
    ---------
    hooks : the Brain's limits, and its hook for each step
    stepper : computes the steps
    save : writes a checkpoint in the middle of an epoch
    """

    def __init__(self, hooks: Decides, stepper: Stepper, save: Callable[[], None]):
        self.hooks, self.stepper, self.state, self._write = hooks, stepper, stepper.state, save
        self.signals: StopSignals | None = None
        self.progress: Progress | None = None
        self._saved_at, self._batches = time.monotonic(), 0

    def start_epoch(self) -> None:
        """Start the interval to the next checkpoint in the middle of an epoch."""
        self._saved_at, self._batches = time.monotonic(), 0

    def flags(self) -> dict[str, bool]:
        """Return the flags that this rank raises with this step."""
        minutes = (time.monotonic() - self._saved_at) / 60
        due = ranks.is_main() and 0 < self.hooks.ckpt_interval_minutes < minutes
        return {"stop": self.asked_to_stop, "save": due, "look": self.stepper.forward_state.surprise,
                "graph": bool(self.stepper.wrap.changed)}

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank has received a stop signal."""
        return self.signals is not None and self.signals.signum is not None

    def batch(self) -> None:
        """Count a micro-batch."""
        self._batches += 1

    def step(self, facts: list[Facts], flags: dict[str, bool] | None = None) -> None:
        """Act on an optimizer step; all ranks must call it.

        facts : values of previous steps, the same steps on all ranks
        flags : flags raised on any rank; None: they are in the facts
        """
        raised = self.act_on(facts) if flags is None else {**self.act_on(facts), **flags}
        guard.poll()
        if raised["look"]:
            self.stepper.buffers.look()
        if raised["graph"] and not self.stepper.wrap.searches:  # on a GPU, the previous step raises it again
            self.search()
        if raised["stop"]:
            self.leave()
        due = 0 < self.hooks.ckpt_interval_steps <= self._batches
        if self.hooks.checkpointer is not None:
            self.hooks.checkpointer.look()  # raises now if a save has failed, not an epoch later
            if due or raised["save"]:
                self.save()

    def act_on(self, facts: list[Facts]) -> dict[str, bool]:
        """Record steps, examine those that were not finite, and return which flags were raised."""
        raised = dict.fromkeys(FLAGS, False)
        for fact in facts:
            self._count_in(fact)
            if fact.to_blame:
                self.not_finite(fact)
            for name, number in fact.flags.items():
                raised[name] |= number > 0
        return raised

    def _count_in(self, fact: Facts) -> None:
        if not self.stepper.overrides.averages_batches:
            self.state.average.add(fact.total, fact.count)
        if self.progress is not None:
            self.progress.step(fact, self.stepper.learning_rate)
        self.hooks.close_step(fact)

    def not_finite(self, fact: Facts) -> None:
        """Report the cause of a step that was not finite, and end the run if there were too many."""
        hooks, state = self.hooks, self.state
        state.nonfinite_count += 1
        what = "gradient" if math.isfinite(fact.total) else "loss"
        told = f"its {what} is not finite (with fsdp, a rank can't examine it alone)"
        if not any(map(is_sharded, hooks.modules.values())):
            with self.stepper.budget.pause(), hooks.no_sync():
                told = culprit.report(
                    hooks, Path(hooks.keys.output_folder or "."), fact.batches, step=fact.number,
                    epoch=state.epoch, what=what, scale=fact.scale, sum_scale=fact.sum_scale,
                    lr=self.stepper.learning_rate, late=fact.late,
                )
        if ranks.is_main():
            logger.warning("Step %d was skipped, number %d in this epoch (nonfinite_patience allows %d):\n%s",
                           fact.number, state.nonfinite_count, hooks.nonfinite_patience, told)
        if state.nonfinite_count > hooks.nonfinite_patience:
            ranks.raise_on_main(NotFinite(
                f"the {what} of {state.nonfinite_count} steps of this epoch was not finite",
                hint="see the reports above; nonfinite_patience sets how many are allowed"))

    def search(self) -> None:
        """Search for unused parameters in each backward from now on, since they differ from those of the first step."""
        wrap = self.stepper.wrap
        names = sorted({name for part in ranks.gather_objects(sorted(wrap.changed)) for name in part})
        self.state.graph_changes = True
        wrap.search()
        if ranks.is_main():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning(
                "The loss uses other parameters than in the first step (%s%s). From now on each backward searches for "
                "unused parameters, which makes it wait for the device; with --find_unused_parameters it does so from "
                "the first step",
                ", ".join(name.removeprefix("owned.") for name in names[:3]), more)

    def save(self) -> None:
        """Save a checkpoint in the middle of the epoch, after recording all steps so far."""
        with self.stepper.budget.pause():
            self.act_on(self.stepper.steps.facts(wait=True))
            guard.poll(wait=True)  # raises now if a label was invalid, so that nothing learnt from it is saved
            self.stepper.buffers.look()
            self._write()
        self.start_epoch()

    def hold(self) -> None:
        """Hold the state at the end of an epoch's training, to save it if a signal arrives before the epoch ends.

        A resumed run repeats what follows, from ``on_stage_end`` of the training on, with the same random numbers. With
        a sharded model nothing is held, as that would take a complete save.
        """
        checkpointer = self.hooks.checkpointer
        if checkpointer is not None and not any(map(is_sharded, checkpointer.recoverables.values())):
            checkpointer.hold({INTRA_EPOCH_CKPT_FLAG: True})

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """Discard the held state if an error leaves this context, because this process may start the run again."""
        try:
            yield
        except BaseException:
            if self.hooks.checkpointer is not None:
                self.hooks.checkpointer.drop()
            raise

    def leave(self) -> None:
        """Save a checkpoint and end the run, after a signal to any rank."""
        own = None if self.signals is None else self.signals.signum
        signum = next(each for each in ranks.gather_objects(own) if each is not None)
        saved = None
        if self.hooks.checkpointer is not None:
            saved = self.hooks.checkpointer.publish()
            if saved is not None:
                self.hooks.checkpointer.delete_checkpoints(
                    ckpt_predicate=lambda ckpt: INTRA_EPOCH_CKPT_FLAG in ckpt.meta, verbosity=logging.DEBUG)
            else:
                self.save()
                saved = self.hooks.checkpointer.wait()
        ranks.raise_on_main(Stopped.by(signum, self.state.optimizer_step, saved and saved.path))
