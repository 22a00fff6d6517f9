"""Steps as CUDA graphs: micro-steps and updates are captured once for each variant, then replayed with one launch.

A small model's step has a thousand kernels, and the device idles while the host launches one after the other. A graph
launches all of them at once. But a replay runs no Python: it repeats kernels, with the addresses and numbers of the
capture. So there is a variant for each thing that Python decides: shapes, the task's ``graph_key``, what the optimizer
does by turns. What changes from step to step is in tensors that stay where they are: the batch, learning rates,
gradients. Random numbers are drawn anew, since torch gives each replay the state of its generator.

The contract: a step that is replayed leaves the device and the host as the same step by Python does. Who keeps it:

===================  ===========================================================================================
``captured.py``      ``Captured``, the runner: replays a variant, has it captured, or lets Python compute it
``variants.py``      the stages of a variant, from first seen to verified or refused, and those of the whole run
``graph.py``         what is captured: a micro-step or an update, with its tensors at fixed addresses
``gradients.py``     where the gradients of graphs are
``recorder.py``      how it is captured: one stream, one pool of memory, and no wait for the device
``repeatable.py``    what decides whether a step can be replayed at all, and the reason if not
``capture.py``       a capture from the first trial to the comparison with a first replay
``comparison.py``    what a first replay is compared with, by which tolerance, and why by that
===================  ===========================================================================================

On several ranks the last micro-step of a step sums gradients over ranks within its graph, bucket by bucket while
backward computes, by the same hooks as without graphs. So ranks that replay and ranks that don't send the same.

What can't be repeated that way runs as without graphs, and one line of the log says why.
"""

from __future__ import annotations

import torch

from sbkit.train.graphs import capture
from sbkit.train.graphs.captured import Captured

__all__ = ["Captured", "is_capture", "wanted"]


def wanted(device: torch.device, setting: bool | None) -> bool:
    """Return whether steps on a device are captured at all; ``setting``: the recipe's key ``graphs``."""
    return device.type == "cuda" and setting is not False


def is_capture(filename: str) -> bool:
    """Return whether a frame of a stack, of this file, captures or compares, as a run rarely does."""
    return filename == capture.__file__
