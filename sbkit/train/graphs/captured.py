"""The runner that replays graphs, has new variants captured, and lets Python compute the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sbkit.data.batch import as_planned
from sbkit.train.batches import MicroBatch
from sbkit.train.distributed import ranks
from sbkit.train.graphs.capture import MicroStepCapture, UpdateCapture
from sbkit.train.graphs.gradients import GradientPlaces
from sbkit.train.graphs.graph import MicroStepGraph, UpdateGraph, tensors_of
from sbkit.train.graphs.recorder import Recorder
from sbkit.train.graphs.repeatable import reason_of, refusal, root_of, update_key, update_needs_python
from sbkit.train.graphs.variants import Outcome, Phase, Stage, Variant
from sbkit.train.memory.oom import is_out_of_memory, release
from sbkit.train.runner import Eager, MicroStep, Rates

logger = logging.getLogger(__name__)

#: The most graphs of micro-steps: each takes some MiB on the device besides the memory that all of them share.
MAX_GRAPHS = 128
#: What is captured, as the recorder and messages call it.
MICRO_STEP = "micro-step"
UPDATE = "update"


class Captured:
    """Captures and replays micro-steps and updates from the second step on.

    The two differ in whom a failure concerns. Micro-steps differ between ranks, and a replay sends what Python would
    send; so a rank decides by itself, and when one capture fails it stops capturing. All ranks have the same variants
    of updates, and compare them together; one that fails is refused alone.

    eager : computes what is captured, and what can't be
    """

    updates_weights = True

    def __init__(self, eager: Eager):
        self.eager = eager
        self.hooks = eager.hooks
        self.parallel = eager.parallel
        self.device = eager.device
        self.recorder = Recorder(self.device)
        self.nodes = self.recorder.nodes
        self.places = GradientPlaces(self.parallel.exchange)
        self._warned_beyond_shape = False
        self._named_unverified: set[str] = set()  # kinds of which a graph that isn't VERIFIED was logged
        self.reset()

    def reset(self) -> None:
        self.places.forget()
        self.recorder.forget_pool()
        self.phase = Phase.BEFORE_FIRST_UPDATE
        self.micro_step_variants: dict[Hashable, Variant[MicroStepGraph]] = {}
        self.update_variants: dict[Hashable, Variant[UpdateGraph]] = {}
        """The same keys on all ranks."""

    def decide(self) -> None:
        """Decide whether to capture, after the first update; all ranks decide alike."""
        self.phase = Phase.CAPTURING
        reason = refusal(self.hooks, self.parallel)
        if reason is not None:
            self._stop(reason, Phase.REFUSED)

    def _stop(self, reason: str, phase: Phase = Phase.STOPPED) -> None:
        """Replay and capture nothing from now on, and free the memory of graphs."""
        self.phase = phase
        variants: list[Variant[Any]] = [*self.micro_step_variants.values(), *self.update_variants.values()]
        for variant in variants:
            variant.refuse(reason)
        self.recorder.forget_pool()
        release(self.device)
        if ranks.is_main():
            logger.info("Steps are not captured as CUDA graphs: %s", reason)
        elif phase is Phase.STOPPED:  # perhaps this rank alone, which then is slower than the others
            logger.info("Steps of rank %d are not captured as CUDA graphs: %s", ranks.rank(), reason)

    # ------------------------------------------------------------ micro-steps

    def micro_step(self, batch: MicroBatch, last: bool) -> MicroStep:
        graph = self._micro_step_graph(batch, exchanges=last and self.parallel.exchange is not None)
        if graph is None:
            return self.eager.micro_step(batch, last)
        self.places.attach()
        graph.replay(batch)
        self.eager.times.mark("backward")
        return graph.copied_result()

    def _micro_step_graph(self, batch: MicroBatch, exchanges: bool) -> MicroStepGraph | None:
        """Return the graph of a micro-step, captured now if it is new; None: Python has to compute it."""
        planned = as_planned(batch)
        if self.phase is not Phase.CAPTURING or planned.is_dummy:  # which is of a shape of its own
            return None
        if planned.beyond_shape:  # a graph of its own would hardly be replayed
            self._warn_beyond_shape()
            return None

        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(batch))
        key = exchanges, self.hooks.graph_key(), shapes
        if key not in self.micro_step_variants:
            if len(self.micro_step_variants) >= MAX_GRAPHS:
                self._stop(f"batches have more than {MAX_GRAPHS} shapes")
                return None
            variant: Variant[MicroStepGraph] = Variant()
            self.micro_step_variants[key] = variant
            self._try(MICRO_STEP, variant, lambda: MicroStepCapture(
                self.eager, self.recorder, self.places, variant, batch, exchanges).run())
        return self.micro_step_variants[key].graph

    def _warn_beyond_shape(self) -> None:
        if not self._warned_beyond_shape:
            logger.info("A micro-batch is larger than its shape, as recordings are longer than their rows say: "
                        "such ones are computed without a CUDA graph")
        self._warned_beyond_shape = True

    # ------------------------------------------------------------ updates

    def update(self, sums: Tensor) -> Tensor:
        """As ``Runner.update``; by a graph, gradients are zeros afterwards, since graphs add to fixed addresses."""
        optimizers, rates = self.eager.prepare_update()
        graph = self._update_graph(optimizers, sums, rates)
        if graph is None:
            values = self.eager.update_and_clear(optimizers, sums, rates)
        else:
            self.places.attach()
            values = graph.replay(sums, optimizers)
        if self.phase is Phase.BEFORE_FIRST_UPDATE:
            self.decide()
        return values

    def _update_graph(self, optimizers: Sequence[Optimizer], sums: Tensor, rates: Rates) -> UpdateGraph | None:
        """Return the graph of an update, captured now if it is new; None: Python has to take it."""
        if self.phase in (Phase.BEFORE_FIRST_UPDATE, Phase.REFUSED):
            return None
        self.places.take_from_exchange()  # for a rank that had only dummies so far
        if update_needs_python(optimizers, self.hooks.all_optimizers(), rates):
            return None

        key = update_key(optimizers, len(sums), self.hooks.settings.max_grad_norm, rates)
        if key not in self.update_variants:
            variant: Variant[UpdateGraph] = Variant()
            self.update_variants[key] = variant
            can_capture = self.phase is Phase.CAPTURING and bool(self.places)
            compares = self._all_ranks_can(can_capture)
            if can_capture:
                self.places.attach()
                self._try(UPDATE, variant, lambda: UpdateCapture(
                    self.eager, self.recorder, self.places, variant, optimizers, sums, rates).run(compares))
            else:
                variant.refuse("this rank captures nothing")
        return self.update_variants[key].graph

    @staticmethod
    def _all_ranks_can(can_capture: bool) -> bool:
        """Ask all ranks whether they can capture an update, which is new to all of them at the same time.

        A comparison communicates if the optimizer does, so it takes all ranks or none. Those that have stopped
        capturing are asked, too.
        """
        return not ranks.any_of({"unable": not can_capture})["unable"]

    # ------------------------------------------------------------ failures

    def _try(self, kind: str, variant: Variant[Any], capture: Callable[[], None]) -> None:
        """Capture, and do what the outcome asks for: Python computes what has this variant, or all that follows."""
        is_first_of_kind = kind not in self.nodes
        outcome, reason = _attempt(variant, capture)
        if outcome is Outcome.NO_MEMORY:
            self._stop(f"{self.device} has too little memory for them; a smaller max_batch_seconds leaves more")
        elif outcome is Outcome.NOT_REPEATABLE and kind == MICRO_STEP:
            self._stop(reason)
        elif outcome is Outcome.NOT_REPEATABLE:
            variant.refuse(reason)
        self._log(kind, outcome, reason, is_first_of_kind)

    def _log(self, kind: str, outcome: Outcome, reason: str, is_first_of_kind: bool) -> None:
        """Log the outcome of a capture; if no others follow, ``_stop`` has done so."""
        if outcome is Outcome.NOT_REPEATABLE and kind == UPDATE:
            logger.info("Updates are not captured as a CUDA graph: %s", reason)
        if outcome not in (Outcome.VERIFIED, Outcome.NOT_COMPARED) or not ranks.is_main():
            return
        if outcome is Outcome.NOT_COMPARED and kind not in self._named_unverified:
            self._named_unverified.add(kind)
            logger.info("A captured %s is replayed without a comparison with what Python computes: a rank has no "
                        "memory for that, or captures nothing", kind)
        if is_first_of_kind:
            logger.info("The %s is captured as a CUDA graph of %d nodes (--graphs false leaves it out)", kind,
                        self.nodes[kind])


def _attempt(variant: Variant[Any], capture: Callable[[], None]) -> tuple[Outcome, str]:
    """Capture; return how that ended, and if it isn't repeatable, why.

    The error isn't kept, not even in a variable, since its frames hold the tensors of the step: Python computes the
    same step next, and it may need their memory.
    """
    try:
        capture()
    except Exception as error:  # of a recipe's own code, which can't do here what it does in a step
        if is_out_of_memory(root_of(error)):
            return Outcome.NO_MEMORY, ""
        return Outcome.NOT_REPEATABLE, reason_of(root_of(error))
    is_verified = variant.stage is Stage.VERIFIED
    return Outcome.VERIFIED if is_verified else Outcome.NOT_COMPARED, ""
