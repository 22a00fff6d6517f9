"""Handling of memory that runs out: a micro-batch that does not fit is computed in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from speechbrain.core import Stage

from sbkit import errors
from sbkit.errors import SbkitError, first_line
from sbkit.train import device as devices
from sbkit.train import rng
from sbkit.train.diagnose.saved_batch import utterance_ids
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import talks_in_forward
from sbkit.train.distributed.sharding import Sharded
from sbkit.train.given import Objectives
from sbkit.train.hooks import Evaluates
from sbkit.train.memory import host
from sbkit.train.memory.threads import NO_PRIMITIVE, Threads
from sbkit.train.step import Loss
from sbkit.train.stepper import Stepper

logger = logging.getLogger(__name__)

#: Errors that usually mean this only if memory is bounded: Python and Arrow have no room for a thread's stack.
_WORDS_BOUNDED = (NO_PRIMITIVE, "can't start new thread", "Failed to launch worker thread")
HINT = "lower max_batch_seconds (sbkit tune finds the largest that fits), or try activation_checkpointing"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device, or the CPU, had no memory left."""
    bounded = host.bounded() and isinstance(error, (RuntimeError, OSError))
    return isinstance(error, torch.OutOfMemoryError) or errors.is_out_of_memory(error) or (
        bounded and any(part in str(error) for part in _WORDS_BOUNDED))


@contextlib.contextmanager
def told(device: torch.device | str, hint: str = HINT) -> Iterator[None]:
    """Turn an error for lack of memory inside this context into an ``SbkitError``."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SbkitError(f"out of memory on {device}: {first_line(error)}", hint=hint, exit_code=1) from error


class OomRetry:
    """Computes micro-batches, in parts if they don't fit into memory.

    Losses are sums and gradients add up, so a step in parts equals the whole step, except for dropout, which draws
    other numbers, and for layers that depend on the whole batch. A loss that is a plain scalar is weighted by the share
    of utterances in a part.

    A failed backward leaves incomplete gradients, so the step starts again from its first micro-batch, with the same
    random numbers. Later micro-batches of a size that failed are split before they are tried.

    On several ranks DDP averages gradients during the backward of the last micro-batch, when no rank can start again.
    So if a step is larger than all that fit on all ranks so far, gradients are averaged only after all ranks have
    finished it. All ranks know the planned size, so they decide alike.
    """

    def __init__(self, hooks: Evaluates, stepper: Stepper):
        self.hooks, self.stepper = hooks, stepper
        self.limit = float("inf")
        """The smallest size that failed, as the number of values in the batch's largest tensor."""
        self.evaluation_limit = float("inf")
        """The same for evaluation, which needs less memory."""
        self.cut = 0
        """The number of micro-batches computed in parts since the last call of ``tell``."""
        self.got_through = 0.0
        """The planned size of the largest step that no rank had to split; the same on all ranks."""
        self.conditions: list[str] | None = None
        """What else memory depends on, on all ranks; known once they train."""
        self._threads = Threads()
        # For this step: micro-batch, number of parts, random state before it.
        self._done: list[tuple[Any, int, dict[str, torch.Tensor]]] = []

    @property
    def device(self) -> torch.device:
        return self.stepper.device

    def begin(self, precision: str, compiled: bool) -> None:
        """Collect the devices and settings of all ranks."""
        recomputed = self.hooks.keys.activation_checkpointing
        own = f"{devices.described(self.device)} in {precision}"
        own += ", compiled" * compiled + f", activation_checkpointing: {recomputed}" * bool(recomputed)
        self.conditions = sorted(set(ranks.gather_objects(own)))

    def state_dict(self) -> dict[str, Any]:
        """Return the size that fits, and the conditions for it, for a resumed run."""
        return {"got_through": self.got_through, "got_through_on": self.conditions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the size that fits, if the conditions have not changed."""
        size, on = state.get("got_through", 0.0), state.get("got_through_on")
        same = self.conditions is not None and on == self.conditions
        self.got_through = size if same else 0.0
        if size and self.conditions is not None and not same and ranks.is_main():
            logger.info("The run was on %s and is now on %s, so which batches fit is tried again",
                        "; ".join(on or ["other devices"]), "; ".join(self.conditions))

    def run(self, batch: object, last: bool) -> Loss:
        """Run forward and backward of a micro-batch, the last of its step or not, and return its whole loss."""
        if not self.stepper.steps.started:
            self._done = []
        generators = rng.capture(self.device)
        most = getattr(batch, "most", 0.0)
        risky = last and most > self.got_through and self.stepper.wrap.can_wait
        while True:
            count = self._count(batch)
            try:
                loss = self._way(count, generators)(batch, last and not risky)
                break
            except Exception as error:
                if not self._ran_out(error):
                    raise
                self._give_up_unless_possible(batch, last, count, error)
            # Outside of the handler, so that the error and its frames no longer hold the step's tensors.
            self._remember(batch, count)
            self._start_again(generators)
        self.cut += count > 1
        if risky:
            self.stepper.exchange()
            if not ranks.any_of({"cut": count > 1})["cut"]:
                self.got_through = most
        self._done = [] if last else [*self._done, (batch, count, generators)]
        return loss

    def fits(self, batch: object) -> bool:
        """Take a step on a whole micro-batch; return False, with nothing left of it, if it ran out of memory."""
        try:
            self._threads(self.stepper.backward, batch, True)
            self.stepper.update()
            return True
        except Exception as error:
            if not self._ran_out(error):
                raise
        self._clear()
        return False

    def evaluate(self, batch: object, stage: Stage) -> Objectives:
        """Call ``evaluate_batch`` for a batch, in halves if it does not fit into memory.

        Only what failed is split, so that no utterance is transcribed twice.
        """
        if self._may_fit(batch):
            try:
                return self._threads(self.hooks.evaluate_batch, batch, stage=stage)
            except Exception as error:
                if not self._ran_out(error):
                    raise
                if length(batch) == 1:
                    raise _too_long(self.device, batch) from error
            self._remember_evaluation(batch)
        size = length(batch)
        halves = [rows(batch, 0, size // 2), rows(batch, size // 2, size)]
        losses = [self.evaluate(half, stage) for half in halves]
        if all(isinstance(loss, Loss) for loss in losses):
            return _joined(losses)
        return sum(loss * length(half) for loss, half in zip(losses, halves, strict=True)) / size

    def _may_fit(self, batch: object) -> bool:
        return (self.evaluation_limit == float("inf")  # nothing has failed, so there is nothing to compare
                or largest(batch) < self.evaluation_limit or length(batch) == 1)

    def _remember_evaluation(self, batch: object) -> None:
        self.evaluation_limit = largest(batch)
        logger.warning("No memory left on %s to evaluate a batch of %d utterances: it and others of its size are "
                       "evaluated in halves", self.device, length(batch))
        _free(self.device)

    def tell(self) -> None:
        """Log how many micro-batches of the epoch were computed in parts."""
        if self.cut:
            logger.warning("%d micro-batches of this epoch did not fit into memory and were computed in parts: "
                           "a lower max_batch_seconds is faster", self.cut)
        self.cut = 0

    def _count(self, batch: object) -> int:
        """Return the number of parts for a micro-batch, so that none is as large as one that failed."""
        count = 1
        if self.limit < float("inf"):
            size, most = largest(batch), length(batch)
            while size / count >= self.limit and count < most:
                count = min(2 * count, most)
        return count

    def _way(self, count: int, generators: dict[str, torch.Tensor]) -> Callable[[Any, bool], Loss]:
        """Return the function that computes a micro-batch, whole or in ``count`` parts."""
        if count > 1:
            return functools.partial(self._in_parts, count)
        return functools.partial(self._threads.reached(self.stepper.backward), generators=generators)

    def _in_parts(self, count: int, batch: object, last: bool) -> Loss:
        size = length(batch)
        edges = [i * size // count for i in range(count + 1)]
        losses = []
        for start, stop in itertools.pairwise(edges):
            part = rows(batch, start, stop)
            last_part = last and stop == size
            loss = self._threads(self.stepper.backward, part, last_part, share=(stop - start) / size)
            losses.append(loss.detach())
        return _joined(losses)

    # ------------------------------------------------------------ after a failure

    def _ran_out(self, error: Exception) -> bool:
        if not is_out_of_memory(error):
            return False
        self._threads.leave_if_stuck(error)
        return True

    def _give_up_unless_possible(self, batch: object, last: bool, count: int, error: Exception) -> None:
        stepper, size = self.stepper, length(batch)
        if count >= size:
            raise _too_long(self.device, batch) from error
        if isinstance(stepper.wrap, Sharded):
            raise SbkitError(f"out of memory on {self.device} with {size} utterances; with fsdp no rank can repeat a "
                             "step alone", hint=HINT, exit_code=1) from error
        talking = next((name for name, module in stepper.modules.named_modules() if talks_in_forward(module)), None)
        if ranks.world_size() > 1 and talking is not None:
            raise SbkitError(f"out of memory on {self.device} with {size} utterances; '{talking}' needs the values of "
                             "all ranks, so none can repeat a step alone", hint=HINT, exit_code=1) from error
        if last and stepper.steps.announced and ranks.world_size() > 1:
            raise SbkitError(f"out of memory on {self.device} with {size} utterances, while gradients were being "
                             "exchanged with the other ranks", hint=HINT, exit_code=1) from error

    def _remember(self, batch: object, count: int) -> None:
        self.limit = largest(batch) / count
        seconds = getattr(batch, "padded_seconds", None)
        amount = f" of {seconds:.0f} s with padding" if seconds else ""
        advice = f"; a max_batch_seconds below {seconds / count:.0f} avoids this" if seconds else ""
        logger.warning("Step %d: no memory left on %s for a micro-batch of %d utterances%s%s. It and others of its "
                       "size are computed in %d parts%s", self.stepper.state.optimizer_step + 1, self.device,
                       length(batch), amount, f" in {count} parts" if count > 1 else "", self._count(batch), advice)

    def _start_again(self, generators: dict[str, torch.Tensor]) -> None:
        """Discard the failed attempt, and compute the step's earlier micro-batches again."""
        place = 0
        while True:
            self._clear()
            try:
                for place, (batch, count, before) in enumerate(self._done):  # noqa: B007 (needed below)
                    rng.restore(before, self.device)
                    self._way(count, before)(batch, False)
                break
            except Exception as error:
                batch, count, before = self._done[place]
                if not self._ran_out(error) or count >= length(batch):
                    raise
                self._done[place] = batch, min(2 * count, length(batch)), before
        rng.restore(generators, self.device)

    def _clear(self) -> None:
        """Discard the step, and release unused memory."""
        self.stepper.forget()
        _free(self.device)


def _joined(parts: list[Loss]) -> Loss:
    """Return the loss of a whole batch from those of its parts."""
    return Loss(functools.reduce(operator.add, (part.total for part in parts)), sum(part.count for part in parts))


def _too_long(device: torch.device, batch: object) -> SbkitError:
    names = utterance_ids(batch)
    name = f" ({names[0]})" if length(batch) == 1 and names else ""
    return SbkitError(f"out of memory on {device} with a single utterance{name}", exit_code=1,
                      hint="leave out such long utterances (max_duration), or try activation_checkpointing")


def _free(device: torch.device | str) -> None:
    """Release cached memory that is not in use."""
    device = torch.device(device)
    gc.collect()
    if device.type == "cpu":
        host.give_back()
    else:
        torch.get_device_module(device).empty_cache()


# ---------------------------------------------------------------------------------------------- batches


def length(batch: object) -> int:
    """Return the number of utterances (or other examples) in a batch; 1 if unknown."""
    names = utterance_ids(batch)
    if names:
        return len(names)
    found = [len(t) for t in _tensors(batch)]
    return found[0] if found and all(n == found[0] for n in found) else 1


def largest(batch: object) -> int:
    """Return the number of values in a batch's largest tensor, which memory is proportional to."""
    return max((t.numel() for t in _tensors(batch)), default=0)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() else []
    if isinstance(value, dict):
        return [t for inner in value.values() for t in _tensors(inner)]
    if isinstance(value, (list, tuple)):
        return [t for inner in value for t in _tensors(inner)]
    return [t for inner in vars(value).values() for t in _tensors(inner)] if hasattr(value, "__dict__") else []


def rows(batch: object, start: int, stop: int) -> object:
    """Return utterances ``start`` to ``stop`` of a batch, with its padding."""
    size = length(batch)
    if isinstance(batch, dict):
        return {key: _cut(value, start, stop, size) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(_cut(value, start, stop, size) for value in batch)
    if isinstance(batch, torch.Tensor) or hasattr(batch, "_fields"):
        return _cut(batch, start, stop, size)
    # "damaged" and a PaddedBatch's lists of keys have other lengths
    fields = {key: value if "keys" in key or key == "damaged" else _cut(value, start, stop, size)
              for key, value in vars(batch).items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{f.name: fields[f.name] for f in dataclasses.fields(batch) if f.init})
    part = object.__new__(type(batch))
    part.__dict__.update(fields)
    return part


def _cut(value: object, start: int, stop: int, size: int) -> Any:  # of the same type as the value
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() and len(value) == size else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # SpeechBrain's PaddedData
        return type(value)(*(_cut(inner, start, stop, size) for inner in value))
    if isinstance(value, (list, tuple)):
        return value[start:stop] if len(value) == size else value
    return value
