"""The device of a run: from any way of naming one to a usable ``torch.device``."""

from __future__ import annotations

import logging
import os

import torch

from sbkit.errors import SbkitError, first_line
from sbkit.nn import attention_kernel
from sbkit.system import memory

logger = logging.getLogger(__name__)

#: A device by type, by name or by the number of a card.
Device = torch.device | str | int
# Device types with numbered devices.
_NUMBERED = ("cuda", "xpu", "hpu", "npu", "mlu")


def resolve(device: Device | None = None) -> torch.device:
    """Return the device of this process, after checking that it works, and make it the current one.

    ``None`` means the accelerator of this machine if it has one, otherwise the CPU. Under torchrun each process gets
    the card with its ``LOCAL_RANK``, even if all were given the same name, because NCCL hangs if two processes share a
    card.
    """
    if device is None or device == "":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        asked = torch.device("cpu" if found is None else found.type)  # the index is chosen below
    else:
        asked = parse(device)
    if asked.type == "cpu":
        return torch.device("cpu")
    if asked.type == "meta":
        raise SbkitError("device 'meta' holds no data, so nothing can be trained on it", hint="use cpu")
    backend = getattr(torch, asked.type, None)
    here = torch.backends.mps if asked.type == "mps" else backend
    if backend is None or not getattr(here, "is_available", lambda: False)():
        reason = f"finds no '{asked.type}' device on this machine"
        if asked.type == "cuda":
            built = torch.version.cuda is not None or torch.version.hip is not None
            reason = "finds no working driver or card" if built else "is built without CUDA"
        raise SbkitError(f"device '{asked}' can't be used: torch {torch.__version__} {reason}",
                         hint="run with --device cpu")
    if asked.type not in _NUMBERED:
        return asked
    count = backend.device_count()
    local, index = os.environ.get("LOCAL_RANK"), asked.index or 0
    if local is not None and (count != 1 or index > 0):  # a launcher may show each process only its own card
        together = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
        if asked.index is None:
            index = int(local)
        elif together > 1 and index != int(local):
            logger.info("Process %s of this machine takes %s:%s, not %s, which %d processes would share.",
                        local, asked.type, local, asked, together)
            index = int(local)
    if index >= count:
        raise SbkitError(
            f"device '{asked.type}:{index}' does not exist: this process sees {count} "
            f"{asked.type} device{'s' if count != 1 else ''} (numbered from 0)",
            hint="name another one, or start fewer processes (torchrun --nproc_per_node)",
        )
    resolved = torch.device(asked.type, index)
    try:
        backend.set_device(index)
        torch.zeros(1, device=resolved)
    except RuntimeError as error:
        raise SbkitError(f"device '{resolved}' was found but can't be used: {first_line(error)}",
                         hint="run with --device cpu, or repair the driver") from error
    if resolved.type == "cuda":
        attention_kernel.leave_cudnn()
    return resolved


def described(device: Device) -> str:
    """Describe a device by its name and memory, such as "NVIDIA H200, 140 GiB".

    >>> described("meta")
    'meta'
    """
    device = parse(device)
    name, size = device.type, 0
    if device.type == "cpu" and memory.can_bound():
        size = memory.total()
    elif hasattr(getattr(torch, device.type, None), "get_device_properties"):
        found = getattr(torch, device.type).get_device_properties(device)
        name, size = found.name, found.total_memory
    return f"{name}, {size / 2**30:.0f} GiB" if size else name


def parse(device: object) -> torch.device:
    """Return the device that any form of a name means, whether or not this machine has it."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise SbkitError(f"device {device!r} is not a device", hint="write cpu, cuda, cuda:0, mps or xpu:1")
    try:
        if isinstance(device, int) or device.strip().isdigit():
            return torch.device("cuda", int(device))
        return torch.device(device.strip())
    except RuntimeError as error:
        raise SbkitError(f"device '{device}' is not a device that torch knows",
                         hint="write cpu, cuda, cuda:0, mps or xpu:1") from error
