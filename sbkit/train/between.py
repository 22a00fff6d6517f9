"""Between two optimizer steps: what all ranks decide together, from what the steps before have shown."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speechbrain.core import INTRA_EPOCH_CKPT_FLAG

from sbkit.errors import SbkitError
from sbkit.nn import guard
from sbkit.train.diagnose import culprit
from sbkit.train.distributed import ranks
from sbkit.train.distributed.sharding import is_sharded
from sbkit.train.signals import Stopped, StopSignals
from sbkit.train.step import Facts

logger = logging.getLogger(__name__)

#: What any rank may raise with a step, so that all act on it at the same one.
FLAGS = ("stop", "save", "look", "graph")


class NotFinite(SbkitError, ValueError):
    """Losses or gradients were NaN or infinite more often than ``nonfinite_patience`` allows."""

    exit_code = 1


class Between:
    """Saves, stops and looks into steps that were not finite, on behalf of a ``Brain``."""

    def __init__(self, brain: Any):
        self.brain = brain
        self.signals: StopSignals | None = None
        self.start_epoch()

    def start_epoch(self) -> None:
        self._saved_at, self._batches = time.monotonic(), 0

    def flags(self) -> dict[str, bool]:
        """What this rank has to tell the others with this step."""
        minutes = (time.monotonic() - self._saved_at) / 60
        due = ranks.is_main() and 0 < self.brain.ckpt_interval_minutes < minutes
        return {"stop": self.asked_to_stop, "save": due, "look": self.brain._forward_state.surprise,
                "graph": self.brain._parallel is not None and bool(self.brain._parallel.changed)}

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank was sent a signal."""
        return self.signals is not None and self.signals.signum is not None

    def batch(self) -> None:
        self._batches += 1

    def step(self, facts: list[Facts], flags: dict[str, bool] | None = None) -> None:
        """After an optimizer step, on every rank.

        facts: of steps before, the same ones on all ranks
        flags: raised on any rank; None: they came with the facts
        """
        raised = self.act_on(facts) if flags is None else {**self.act_on(facts), **flags}
        guard.poll()
        if raised["look"]:
            self.brain._buffers.look()
        if raised["graph"] and not self.brain._parallel.searches:  # on a card, the step before tells of it once more
            self.search()
        if raised["stop"]:
            self.leave()
        due = 0 < self.brain.ckpt_interval_steps <= self._batches
        if self.brain.checkpointer is not None:
            self.brain.checkpointer.look()  # a run that can't save should end now, not an epoch later
            if due or raised["save"]:
                self.save()

    def act_on(self, facts: list[Facts]) -> dict[str, bool]:
        """Count finished steps in, look into what was not finite; tells which flags were raised."""
        raised = dict.fromkeys(FLAGS, False)
        for fact in facts:
            self.brain._count_in(fact)
            if fact.to_blame:
                self.not_finite(fact)
            for name, number in fact.flags.items():
                raised[name] |= number > 0
        return raised

    def not_finite(self, fact: Facts) -> None:
        """Name the culprit; end the run when there were too many."""
        brain = self.brain
        brain.nonfinite_count += 1
        what = "gradient" if math.isfinite(fact.total) else "loss"
        told = f"its {what} is not finite (fsdp: no rank can look for the culprit on its own)"
        if not any(map(is_sharded, brain.modules.values())):
            with brain._budget.pause(), brain.no_sync():
                told = culprit.report(
                    brain, Path(brain.keys.output_folder or "."), fact.batches, step=fact.number,
                    epoch=brain._epoch, what=what, scale=fact.scale, sum_scale=fact.sum_scale,
                    lr=brain._learning_rate, late=fact.late,
                )
        if ranks.is_main():
            logger.warning("Step %d was skipped, number %d in this epoch (nonfinite_patience puts up with %d):\n%s",
                           fact.number, brain.nonfinite_count, brain.nonfinite_patience, told)
        if brain.nonfinite_count > brain.nonfinite_patience:
            ranks.raise_on_main(NotFinite(
                f"the {what} of {brain.nonfinite_count} steps of this epoch was not finite",
                hint="see the reports above; nonfinite_patience sets how many are put up with"))

    def search(self) -> None:
        """Some backward reached other parameters than the first step did: from here on each one looks for them."""
        brain = self.brain
        names = sorted({name for part in ranks.gather_objects(sorted(brain._parallel.changed)) for name in part})
        brain._graph_changes = True
        brain._parallel.search()
        if ranks.is_main():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning(
                "The loss reaches other parameters than in the first step (%s%s): from here on each backward looks for "
                "what it does not reach, which makes it wait for the device; --find_unused_parameters does so from the "
                "start", ", ".join(name.removeprefix("owned.") for name in names[:3]), more)

    def save(self) -> None:
        """An intra-epoch checkpoint, with everything that has been computed so far counted in."""
        with self.brain._budget.pause():
            self.act_on(self.brain._steps.facts(wait=True))
            guard.poll(wait=True)  # nothing learnt from a label outside its table is saved
            self.brain._buffers.look()
            self.brain._save_intra_epoch_ckpt()
        self.start_epoch()

    def hold(self) -> None:
        """At the end of an epoch's training: what to save should a signal come before the epoch has ended.

        A run that goes on from there repeats what follows, ``on_stage_end`` of the training first, from the
        same state and random numbers. Where each rank has but a part of the model it would take a whole save.
        """
        checkpointer = self.brain.checkpointer
        if checkpointer is not None and not any(map(is_sharded, checkpointer.recoverables.values())):
            checkpointer.hold({INTRA_EPOCH_CKPT_FLAG: True})

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """An error within it lets go of the checkpoint that is held: this process may start the run once more."""
        try:
            yield
        except BaseException:
            if self.brain.checkpointer is not None:
                self.brain.checkpointer.drop()
            raise

    def leave(self) -> None:
        """Save and end, because some rank was sent a signal."""
        signum = next(s for s in ranks.gather_objects(self.signals and self.signals.signum) if s is not None)
        saved = None
        if self.brain.checkpointer is not None:
            saved = self.brain.checkpointer.publish()
            if saved is not None:
                self.brain.checkpointer.delete_checkpoints(
                    ckpt_predicate=lambda ckpt: INTRA_EPOCH_CKPT_FLAG in ckpt.meta, verbosity=logging.DEBUG)
            else:
                self.save()
                saved = self.brain.checkpointer.wait()
        ranks.raise_on_main(Stopped.by(signum, self.brain.optimizer_step, saved and saved.path))
