"""Whether the largest micro-batches of a run fit into memory, found out before the first step and not hours later."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from sbkit.data.batch import Batch
from sbkit.errors import SbkitError
from sbkit.train.batches import MicroBatch, rows
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import Parallel
from sbkit.train.hooks import Hooks
from sbkit.train.memory.oom import is_out_of_memory, release

#: Time for the other ranks to end a trial of a batch that doesn't fit on one of them.
TRIAL_SECONDS = 60.0


def refuse_too_large(batches: Iterable[Batch], fits: Callable[[MicroBatch], bool], device: torch.device) -> None:
    """End the run with one message if one of these micro-batches doesn't fit into memory; all ranks call it.

    All ranks try the largest of any rank, so they decide alike.

    fits : whether a micro-batch fits on this rank, see ``fits_into_memory``
    """
    for batch in batches:
        problem = f"out of memory on {device} with the run's largest micro-batch: {len(batch.ids)} utterances, " \
                  f"{batch.padded_seconds:.0f} s with padding ({batch.ids[0]} and others)"
        if _fits_everywhere(batch, fits, problem):
            continue

        size = len(batch) // 2
        while size > 1 and not _fits_everywhere(rows(batch, 0, size), fits, problem):
            size //= 2
        hint = f"set max_batch_seconds to {size * batch.padded_seconds / len(batch):.0f} (sbkit tune finds the exact " \
               "limit), or try activation_checkpointing"
        if size < 2:
            hint = "set max_batch_seconds to less: a single utterance fits at most, so leave out long ones " \
                   "(max_duration), or try activation_checkpointing"
        ranks.raise_on_main(SbkitError("out-of-memory", problem, hint=hint, exit_code=1))


def _fits_everywhere(batch: MicroBatch, fits: Callable[[MicroBatch], bool], problem: str) -> bool:
    """Return whether a micro-batch fits on all ranks."""
    fits_here = fits(batch)
    # Others may wait for this rank within the model, where they can't learn that it failed: it ends the run.
    if not ranks.barrier("tried", None if fits_here else TRIAL_SECONDS):
        raise SbkitError("out-of-memory", problem, exit_code=1,
                         hint="set max_batch_seconds to less (sbkit tune finds the limit), or try "
                              "activation_checkpointing")
    return not ranks.any_of({"failed": not fits_here})["failed"]


def fits_into_memory(batch: MicroBatch, hooks: Hooks, parallel: Parallel, device: torch.device) -> bool:
    """Return whether forward and backward of a micro-batch fit into memory, beside the optimizer's states.

    Nothing that training depends on is changed.
    """
    try:
        with hooks.restoring(), parallel.accumulating():
            known = set().union(*(optimizer.state for optimizer in hooks.optimizers()))
            # Two tensors for each parameter, as Adam has them.
            states = [torch.empty_like(parameter) for parameter in hooks.modules.parameters()
                      if parameter.requires_grad and parameter not in known for _ in range(2)]
            batch = batch.to(device)
            hooks.before_batch(batch, True)  # in which a recipe may prepare what its forward needs
            parallel.loss_of(batch).loss.total.backward()
            del states
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release(device)  # outside of the handler, whose frames hold the step's tensors
    return False
