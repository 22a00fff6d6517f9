"""The average of a run's checkpoints: of the best ones, or the newest, as ``sbkit/score/weights.py`` lists the kinds.

It is taken after training, of files. A moving average that is kept while a run trains is ``sbkit/train/averaging.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from speechbrain.utils import checkpoints as stock
from speechbrain.utils.checkpoints import (
    DEFAULT_SAVE_HOOKS,
    Checkpoint,
    get_default_hook,
    hook_on_loading_state_dict_checkpoint,
)

from sbkit.errors import SbkitError
from sbkit.score.weights import Average
from sbkit.train.averaging import EMA, weights_in
from sbkit.train.checkpoint.files import damage
from sbkit.train.checkpoint.hooks import TENSORS
from sbkit.train.checkpoint.state import differences, load_file
from sbkit.train.distributed import sharding

logger = logging.getLogger(__name__)


def load_average(
    checkpointer: stock.Checkpointer, average: Average, min_key: str | None = None, max_key: str | None = None,
) -> list[Checkpoint]:
    """Load into each recoverable that has weights their average over the best checkpoints; returns those.

    Everything else, such as a normaliser's statistics, does not change. See ``averaged_state``.
    """
    recoverables = weight_recoverables(checkpointer)
    if not recoverables:
        raise SbkitError("no-weights",
                         "the checkpointer has no module among its recoverables, so there are no weights to average",
                         hint="add the model to recoverables")
    used: list[Checkpoint] = []
    modules_first = sorted(recoverables.items(), key=lambda item: isinstance(item[1], EMA))
    for name, recoverable in modules_first:  # so that a moving average replaces the weights of its module
        state, used = averaged_state(checkpointer, name, average, min_key, max_key)
        sharding.load_full_state(recoverable.module if isinstance(recoverable, EMA) else recoverable, state)
    return used


def averaged_state(
    checkpointer: stock.Checkpointer, recoverable: str, average: Average, min_key: str | None = None,
    max_key: str | None = None,
) -> tuple[dict[str, Any], list[Checkpoint]]:
    """Average the state of a recoverable over the best checkpoints (without a key, the newest).

    Damaged checkpoints are skipped; if fewer are left than the average is of, all of them are used. Values that are not
    floating point (counters, masks) are those of the best checkpoint.

    Returns the state dict and the checkpoints in it, the best first.

    >>> state, used = averaged_state(checkpointer, "model", Mean(10), min_key="WER")  # doctest: +SKIP
    >>> model.load_state_dict(state)  # doctest: +SKIP
    """
    best_first = checkpointer.find_checkpoints(min_key=min_key, max_key=max_key)
    used, states = _readable_states(best_first, recoverable, average.count)
    if not used:
        raise SbkitError("no-weights",
                         f"no checkpoint in {checkpointer.checkpoints_dir} holds {recoverable!r} to average",
                         file=checkpointer.checkpoints_dir)
    if len(used) < average.count:
        logger.warning("Averaging %d of %d requested checkpoints: there are no more to choose from", len(used),
                       average.count)

    combined: dict[str, Any] = {}
    for name, best in states[0].items():
        if _is_float(best):
            tensors = [state[name] for state in states]
            combined[name] = average.combine(tensors, used).to(best.dtype)
        else:
            combined[name] = best.clone() if isinstance(best, torch.Tensor) else best
    return combined, used


def _readable_states(checkpoints: Iterable[Checkpoint], recoverable: str, count: int,
                     ) -> tuple[list[Checkpoint], list[Mapping[str, Any]]]:
    """Return the first ``count`` checkpoints that can be read, and their states of a recoverable."""
    used: list[Checkpoint] = []
    states: list[Mapping[str, Any]] = []
    for checkpoint in checkpoints:
        if len(used) == count:
            break
        path = checkpoint.paramfiles.get(recoverable)
        reason = damage(Path(checkpoint.path)) if path is not None else f"it has no state for {recoverable!r}"
        if reason is not None:
            logger.warning("Leaving %s out of the average: %s", checkpoint.path, reason)
            continue
        # Lazily: of all checkpoints only one tensor at a time has to be in memory.
        state = weights_in(hook_on_loading_state_dict_checkpoint(load_file(path, lazily=True)))
        unlike = differences(states[0], state) if states else ""
        if unlike:
            raise SbkitError("other-model", f"{path} can't be averaged with {used[0].path}: {unlike}",
                             hint="are there checkpoints of two models in one folder?", file=path)
        used.append(checkpoint)
        states.append(state)
    return used, states


def weight_recoverables(checkpointer: stock.Checkpointer) -> dict[str, torch.nn.Module | EMA]:
    """Return the recoverables whose state is only weights: modules with a plain state dict, and moving averages."""
    loaded_in_another_way = {name for name, hook in checkpointer.custom_load_hooks.items()
                             if hook is not sharding.load_full}

    def is_plain_module(name: str, recoverable: object) -> bool:
        return (isinstance(recoverable, torch.nn.Module) and name not in loaded_in_another_way
                and get_default_hook(recoverable, DEFAULT_SAVE_HOOKS) in TENSORS)

    return {name: recoverable for name, recoverable in checkpointer.recoverables.items()
            if isinstance(recoverable, EMA) or is_plain_module(name, recoverable)}


def _is_float(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
