"""The learning rate of a step: a base rate, times the factor of each parameter group.

============================  ========================================================================================
``schedule.py``               decides the base rate of each step before it (``Schedule``), or ...
``speechbrain_schedules.py``  ... a scheduler of SpeechBrain's decides it, after a step or a validation
``rate_factors.py``           decides the factors, by part of the model, once: each group keeps its own as ``lr_scale``
this file                     sets and reads a group's rate, the base rate times its ``lr_scale``
``update.py``                 writes the rates of the update that is due to the device
============================  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

Rate = float | torch.Tensor  # a group's rate may be either


def base_rate(group: Mapping[str, Any]) -> Rate:
    """Return the base rate of a group, without its factor."""
    return group["lr"] / group.get("lr_scale", 1.0)


def set_base_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the base rate of all groups."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled
