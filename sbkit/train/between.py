"""Between two optimizer steps: what all ranks decide together, from what the steps before have shown."""

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
    """Losses or gradients were NaN or infinite more often than ``nonfinite_patience`` allows."""

    exit_code = 1


class Between:
    """Counts finished steps in, saves, stops and looks into steps that were not finite.

    Arguments
    ---------
    hooks: the Brain's limits, and what hears of each step
    stepper: whose steps these are
    save: writes a checkpoint in the middle of an epoch
    """

    def __init__(self, hooks: Decides, stepper: Stepper, save: Callable[[], None]):
        self.hooks, self.stepper, self.state, self._write = hooks, stepper, stepper.state, save
        self.signals: StopSignals | None = None
        self.progress: Progress | None = None
        self._saved_at, self._batches = time.monotonic(), 0

    def start_epoch(self) -> None:
        """Count from here to the next checkpoint in the middle of an epoch."""
        self._saved_at, self._batches = time.monotonic(), 0

    def flags(self) -> dict[str, bool]:
        """What this rank has to tell the others with this step."""
        minutes = (time.monotonic() - self._saved_at) / 60
        due = ranks.is_main() and 0 < self.hooks.ckpt_interval_minutes < minutes
        return {"stop": self.asked_to_stop, "save": due, "look": self.stepper.forward_state.surprise,
                "graph": bool(self.stepper.wrap.changed)}

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank was sent a signal."""
        return self.signals is not None and self.signals.signum is not None

    def batch(self) -> None:
        """Count a micro-batch."""
        self._batches += 1

    def step(self, facts: list[Facts], flags: dict[str, bool] | None = None) -> None:
        """After an optimizer step, on every rank.

        facts: of steps before, the same ones on all ranks
        flags: raised on any rank; None: they came with the facts
        """
        raised = self.act_on(facts) if flags is None else {**self.act_on(facts), **flags}
        guard.poll()
        if raised["look"]:
            self.stepper.buffers.look()
        if raised["graph"] and not self.stepper.wrap.searches:  # on a card, the step before tells of it once more
            self.search()
        if raised["stop"]:
            self.leave()
        due = 0 < self.hooks.ckpt_interval_steps <= self._batches
        if self.hooks.checkpointer is not None:
            self.hooks.checkpointer.look()  # a run that can't save should end now, not an epoch later
            if due or raised["save"]:
                self.save()

    def act_on(self, facts: list[Facts]) -> dict[str, bool]:
        """Count finished steps in, look into what was not finite; tells which flags were raised."""
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
        """Name the culprit; end the run when there were too many."""
        hooks, state = self.hooks, self.state
        state.nonfinite_count += 1
        what = "gradient" if math.isfinite(fact.total) else "loss"
        told = f"its {what} is not finite (fsdp: no rank can look for the culprit on its own)"
        if not any(map(is_sharded, hooks.modules.values())):
            with self.stepper.budget.pause(), hooks.no_sync():
                told = culprit.report(
                    hooks, Path(hooks.keys.output_folder or "."), fact.batches, step=fact.number,
                    epoch=state.epoch, what=what, scale=fact.scale, sum_scale=fact.sum_scale,
                    lr=self.stepper.learning_rate, late=fact.late,
                )
        if ranks.is_main():
            logger.warning("Step %d was skipped, number %d in this epoch (nonfinite_patience puts up with %d):\n%s",
                           fact.number, state.nonfinite_count, hooks.nonfinite_patience, told)
        if state.nonfinite_count > hooks.nonfinite_patience:
            ranks.raise_on_main(NotFinite(
                f"the {what} of {state.nonfinite_count} steps of this epoch was not finite",
                hint="see the reports above; nonfinite_patience sets how many are put up with"))

    def search(self) -> None:
        """Some backward reached other parameters than the first step did: from here on each one looks for them."""
        wrap = self.stepper.wrap
        names = sorted({name for part in ranks.gather_objects(sorted(wrap.changed)) for name in part})
        self.state.graph_changes = True
        wrap.search()
        if ranks.is_main():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning(
                "The loss reaches other parameters than in the first step (%s%s): from here on each backward looks for "
                "what it does not reach, which makes it wait for the device; --find_unused_parameters does so from the "
                "start", ", ".join(name.removeprefix("owned.") for name in names[:3]), more)

    def save(self) -> None:
        """An intra-epoch checkpoint, with everything that has been computed so far counted in."""
        with self.stepper.budget.pause():
            self.act_on(self.stepper.steps.facts(wait=True))
            guard.poll(wait=True)  # nothing learnt from a label outside its table is saved
            self.stepper.buffers.look()
            self._write()
        self.start_epoch()

    def hold(self) -> None:
        """At the end of an epoch's training: what to save should a signal come before the epoch has ended.

        A run that goes on from there repeats what follows, ``on_stage_end`` of the training first, from the
        same state and random numbers. Where each rank has but a part of the model it would take a whole save.
        """
        checkpointer = self.hooks.checkpointer
        if checkpointer is not None and not any(map(is_sharded, checkpointer.recoverables.values())):
            checkpointer.hold({INTRA_EPOCH_CKPT_FLAG: True})

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """An error within it lets go of the checkpoint that is held: this process may start the run once more."""
        try:
            yield
        except BaseException:
            if self.hooks.checkpointer is not None:
                self.hooks.checkpointer.drop()
            raise

    def leave(self) -> None:
        """Save and end, because some rank was sent a signal."""
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
