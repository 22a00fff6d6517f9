"""Handling of memory that runs out: a micro-batch that does not fit is computed in parts."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from sbkit import errors
from sbkit.errors import SbkitError, first_line
from sbkit.train import device as devices
from sbkit.train.batches import largest, length, rows, utterance_ids
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import ModuleWrapper, communicates_in_forward
from sbkit.train.distributed.sharding import Sharded
from sbkit.train.memory import host
from sbkit.train.step import Loss

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: oneDNN's message when there was no memory for compiled code (or another failure).
NO_PRIMITIVE = "could not create a primitive"
#: Errors that usually mean this only if memory is bounded: Python and Arrow have no room for a thread's stack.
_BOUNDED_MESSAGES = (NO_PRIMITIVE, "can't start new thread", "Failed to launch worker thread")
HINT = "lower max_batch_seconds (sbkit tune finds the largest that fits), or try activation_checkpointing"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device, or the CPU, had no memory left."""
    bounded = host.bounded() and isinstance(error, (RuntimeError, OSError))
    return isinstance(error, torch.OutOfMemoryError) or errors.is_out_of_memory(error) or (
        bounded and any(part in str(error) for part in _BOUNDED_MESSAGES))


@contextlib.contextmanager
def oom_as_user_error(device: torch.device | str, hint: str = HINT) -> Iterator[None]:
    """Turn an error for lack of memory inside this context into an ``SbkitError``."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SbkitError(f"out of memory on {device}: {first_line(error)}", hint=hint, exit_code=1) from error


class Threads:
    """Calls functions in this thread, or in another one if a library is stuck in this thread.

    When oneDNN once fails to get memory for compiled code, it refuses every new shape in that thread from then on. The
    next thread is started in advance, while there is memory for its stack.
    """

    def __init__(self) -> None:
        self._present: ThreadPoolExecutor | None = None
        self._spare: ThreadPoolExecutor | None = None

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._spare is None and host.bounded():
            try:
                self._spare = ThreadPoolExecutor(1)
                self._spare.submit(int).result()
            except (RuntimeError, MemoryError) as error:
                raise SbkitError("out of memory: there is none left to start a thread", hint=host.LIMIT_HINT,
                                 exit_code=1) from error
        if self._present is None:
            return function(*args, **kwargs)
        return self._present.submit(_called, torch.is_grad_enabled(), function, args, kwargs).result()

    def leave_if_stuck(self, error: BaseException) -> None:
        """Use another thread from now on, if this error requires it."""
        if NO_PRIMITIVE in str(error):
            if self._present is not None:
                self._present.shutdown(wait=False)
            self._present, self._spare = self._spare, None


def _called(grad: bool, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    with torch.set_grad_enabled(grad):  # each thread has its own
        return function(*args, **kwargs)


class MemoryLimits:
    """What is known of the batches that fit into memory, and into how many parts others are split.

    Losses are sums and gradients add up, so a step in parts equals the whole step, except for dropout, which draws
    other numbers, and for layers that depend on the whole batch. A loss that is a plain scalar is weighted by the share
    of utterances in a part. Micro-batches of a size that failed once are split before they are tried.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.limit = self.evaluation_limit = float("inf")
        """The smallest size that failed, as the number of values in the batch's largest tensor; evaluation needs less
        memory than training."""
        self.split = 0
        """The number of micro-batches computed in parts since the last call of ``report``."""
        self.largest_step_that_fit = 0.0
        """The planned size of the largest step that no rank had to split; the same on all ranks."""
        self.conditions: list[str] | None = None
        """What else memory depends on, on all ranks; known once they train."""
        self.threads = Threads()

    def begin(self, precision: str, compiled: bool, checkpointing: object) -> None:
        """Collect the devices and settings of all ranks."""
        own = f"{devices.described(self.device)} in {precision}"
        own += ", compiled" * compiled + f", activation_checkpointing: {checkpointing}" * bool(checkpointing)
        self.conditions = sorted(set(ranks.gather_objects(own)))

    def state_dict(self) -> dict[str, Any]:
        """Return the size that fits, and the conditions for it, for a resumed run."""
        return {"got_through": self.largest_step_that_fit, "got_through_on": self.conditions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the size that fits, if the conditions have not changed."""
        size, on = state.get("got_through", 0.0), state.get("got_through_on")
        same = self.conditions is not None and on == self.conditions
        self.largest_step_that_fit = size if same else 0.0
        if size and self.conditions is not None and not same and ranks.is_main():
            logger.info("The run was on %s and is now on %s, so batch sizes are tried again",
                        "; ".join(on or ["other devices"]), "; ".join(self.conditions))

    def expect_more(self) -> None:
        """Try again which steps fit, because more parameters train from now on."""
        self.largest_step_that_fit = 0.0

    # ------------------------------------------------------------ training

    def parts(self, batch: object) -> int:
        """Return the number of parts for a micro-batch, so that none is as large as one that failed."""
        count = 1
        if self.limit < float("inf"):
            size, utterances = largest(batch), length(batch)
            while size / count >= self.limit and count < utterances:
                count = min(2 * count, utterances)
        return count

    def ran_out(self, error: Exception) -> bool:
        """Return whether an error is for lack of memory; leaves a thread in which a library is stuck since."""
        if not is_out_of_memory(error):
            return False
        self.threads.leave_if_stuck(error)
        return True

    def refuse_to_retry(self, error: Exception, batch: object, count: int, modules: nn.Module, wrap: ModuleWrapper, *,
                        exchanging: bool) -> None:
        """Raise an error that says why a micro-batch, which ran out of memory in ``count`` parts, can't be split more.

        exchanging : whether its gradients were on their way to the other ranks
        """
        size = length(batch)
        if count >= size:
            raise too_long(self.device, batch) from error
        reason = ""
        if ranks.world_size() > 1:
            communicating = next((name for name, module in modules.named_modules() if communicates_in_forward(module)),
                                 None)
            if communicating is not None:
                reason = f"; '{communicating}' needs the values of all ranks, so none can repeat a step alone"
            elif exchanging:
                reason = ", while gradients were being exchanged with the other ranks"
        if isinstance(wrap, Sharded):
            reason = "; with fsdp no rank can repeat a step alone"
        if reason:
            raise SbkitError(f"out of memory on {self.device} with {size} utterances{reason}", hint=HINT,
                             exit_code=1) from error

    def split_from_now_on(self, batch: object, count: int, step: int) -> None:
        """Remember the size of a micro-batch that failed in ``count`` parts, and say what follows."""
        self.limit = largest(batch) / count
        seconds = getattr(batch, "padded_seconds", None)
        amount = f" of {seconds:.0f} s with padding" if seconds else ""
        advice = f"; a max_batch_seconds below {seconds / count:.0f} avoids this" if seconds else ""
        logger.warning("Step %d: no memory left on %s for a micro-batch of %d utterances%s%s. Micro-batches of this "
                       "size are now computed in %d parts%s", step, self.device, length(batch), amount,
                       f" in {count} parts" if count > 1 else "", self.parts(batch), advice)

    def computed(self, untried: float | None, *, in_parts: bool) -> None:
        """Count a micro-batch that was computed, in parts or whole.

        untried : the planned size of the step, if it was larger than all that fit; all ranks call it then
        """
        self.split += in_parts
        if untried is not None and not ranks.any_of({"split": in_parts})["split"]:
            self.largest_step_that_fit = untried

    def report(self) -> None:
        """Log how many micro-batches of the epoch were computed in parts."""
        if self.split:
            logger.warning("%d micro-batches of this epoch did not fit into memory and were computed in parts: "
                           "a lower max_batch_seconds is faster", self.split)
        self.split = 0

    # ------------------------------------------------------------ evaluation

    def may_fit(self, batch: object) -> bool:
        """Return whether a batch is worth trying whole in evaluation."""
        return (self.evaluation_limit == float("inf")  # nothing has failed, so there is nothing to compare
                or largest(batch) < self.evaluation_limit or length(batch) == 1)

    def halve_from_now_on(self, batch: object) -> None:
        """Remember the size of a batch that failed in evaluation, and say what follows."""
        self.evaluation_limit = largest(batch)
        logger.warning("No memory left on %s to evaluate a batch of %d utterances. Batches of this size are now "
                       "evaluated in halves", self.device, length(batch))
        self.free()

    def free(self) -> None:
        """Release cached memory that is not in use."""
        gc.collect()
        if self.device.type == "cpu":
            host.release_memory()
        else:
            torch.get_device_module(self.device).empty_cache()


def joined(parts: list[Loss]) -> Loss:
    """Return the loss of a whole batch from those of its parts."""
    return Loss(functools.reduce(operator.add, (part.total for part in parts)), sum(part.count for part in parts))


def too_long(device: torch.device, batch: object) -> SbkitError:
    """Return the error for a batch that can't be split further."""
    names = utterance_ids(batch)
    name = f" ({names[0]})" if length(batch) == 1 and names else ""
    return SbkitError(f"out of memory on {device} with a single utterance{name}", exit_code=1,
                      hint="leave out such long utterances (max_duration), or try activation_checkpointing")


def parts_of(batch: object, count: int) -> Iterator[tuple[object, float, bool]]:
    """Yield the parts of a batch, each with its share of the utterances and whether it is the last."""
    size = length(batch)
    edges = [i * size // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield rows(batch, start, stop), (stop - start) / size, stop == size
