"""Memory that runs out: what such an error looks like, and the message for the user."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from sbkit import errors
from sbkit.errors import SbkitError, first_line
from sbkit.system import memory

#: oneDNN's message when there was no memory for compiled code (or another failure).
NO_PRIMITIVE = "could not create a primitive"
#: Errors that usually mean this only if memory is bounded: Python and Arrow have no room for a thread's stack.
_BOUNDED_MESSAGES = (NO_PRIMITIVE, "can't start new thread", "Failed to launch worker thread")
HINT = "lower max_batch_seconds (sbkit tune finds the largest that fits), or try activation_checkpointing"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device, or the CPU, had no memory left."""
    bounded = memory.bounded() and isinstance(error, (RuntimeError, OSError))
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
        raise SbkitError("out-of-memory", f"out of memory on {device}: {first_line(error)}",
                         hint=hint, exit_code=1) from error


def release(device: torch.device) -> None:
    """Release memory that is not in use, after a step that didn't fit."""
    gc.collect()
    if device.type == "cpu":
        memory.release_memory()
    else:
        torch.get_device_module(device).empty_cache()
