"""A run's checkpoints for a model that is not trained: of each, only the weights are loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sbkit.train.averaging import EMA
from sbkit.train.checkpoint.checkpointer import Checkpointer

_WEIGHTS = (torch.nn.Module, EMA)


class _WeightsAlone(Checkpointer):
    """Leaves out whatever else is added to it: optimizers, random generators, log files."""

    def add_recoverable(self, name: str, obj: object, *hooks: Any, **options: Any) -> None:  # SpeechBrain's arguments
        if isinstance(obj, _WEIGHTS):
            super().add_recoverable(name, obj, *hooks, **options)


def weights_alone(checkpointer: Checkpointer, moving_average: EMA | None) -> Checkpointer:
    """Return a checkpointer of the same folder that loads only modules and the moving average of their weights.

    A Brain that is built with it can add nothing else. The given checkpointer stays as it is.
    """
    kind = type(checkpointer)
    alone = copy.copy(checkpointer)
    alone.__class__ = type(kind.__name__, (_WeightsAlone, kind), {})
    alone.custom_load_hooks = dict(checkpointer.custom_load_hooks)
    alone.custom_save_hooks = dict(checkpointer.custom_save_hooks)
    alone.optional_recoverables = dict(checkpointer.optional_recoverables)
    alone.recoverables = {name: obj for name, obj in checkpointer.recoverables.items() if isinstance(obj, _WEIGHTS)}
    if moving_average is not None:
        alone.add_recoverable("ema", moving_average, optional_load=True)
    return alone
