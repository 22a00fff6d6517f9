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
    requested = _default_type() if device is None or device == "" else parse(device)
    if requested.type == "cpu":
        return torch.device("cpu")
    if requested.type == "meta":
        raise SbkitError("bad-value", "device 'meta' holds no data, so nothing can be trained on it", hint="use cpu",
                         key="device")
    _refuse_unavailable(requested)
    if requested.type not in _NUMBERED:
        return requested

    backend = getattr(torch, requested.type)
    count = backend.device_count()
    index = _index_of_this_process(requested, count)
    if index >= count:
        raise SbkitError(
            "device-unavailable",
            f"device '{requested.type}:{index}' does not exist: this process sees {count} "
            f"{requested.type} device{'s' if count != 1 else ''} (numbered from 0)",
            hint="name another one, or start fewer processes (torchrun --nproc_per_node)",
            key="device",
        )
    resolved = torch.device(requested.type, index)
    try:
        backend.set_device(index)
        torch.zeros(1, device=resolved)
    except RuntimeError as error:
        raise SbkitError("device-unavailable", f"device '{resolved}' was found but can't be used: {first_line(error)}",
                         hint="run with --device cpu, or repair the driver", key="device") from error
    if resolved.type == "cuda":
        attention_kernel.leave_cudnn()
    return resolved


def _default_type() -> torch.device:
    """Return the accelerator of this machine without a number, or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu" if accelerator is None else accelerator.type)


def _refuse_unavailable(requested: torch.device) -> None:
    """Raise an error if this machine has no device of a type, or this torch doesn't know it."""
    backend = torch.backends.mps if requested.type == "mps" else getattr(torch, requested.type, None)
    is_known = hasattr(torch, requested.type)
    if is_known and getattr(backend, "is_available", lambda: False)():
        return
    reason = f"finds no '{requested.type}' device on this machine"
    if requested.type == "cuda":
        is_built = torch.version.cuda is not None or torch.version.hip is not None
        reason = "finds no working driver or card" if is_built else "is built without CUDA"
    raise SbkitError("device-unavailable", f"device '{requested}' can't be used: torch {torch.__version__} {reason}",
                     hint="run with --device cpu", key="device")


def _index_of_this_process(requested: torch.device, count: int) -> int:
    """Return the number of this process's device, of ``count`` that it sees: under a launcher, that of its local rank.

    A launcher may also show each process only its own device, which then has the number 0.
    """
    index = requested.index or 0
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None or (count == 1 and index == 0):
        return index
    if requested.index is None:
        return int(local_rank)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if processes > 1 and index != int(local_rank):
        logger.info("Process %s of this machine takes %s:%s, not %s, which %d processes would share.",
                    local_rank, requested.type, local_rank, requested, processes)
        return int(local_rank)
    return index


def described(device: Device) -> str:
    """Describe a device by its name and memory, such as "NVIDIA H200, 140 GiB".

    >>> described("meta")
    'meta'
    """
    device = parse(device)
    name = device.type
    size = 0
    if device.type == "cpu" and memory.can_bound():
        size = memory.total()
    elif hasattr(getattr(torch, device.type, None), "get_device_properties"):
        properties = getattr(torch, device.type).get_device_properties(device)
        name = properties.name
        size = properties.total_memory
    return f"{name}, {size / 2**30:.0f} GiB" if size else name


def parse(device: object) -> torch.device:
    """Return the device that any form of a name means, whether or not this machine has it."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise SbkitError("bad-value",
                         f"device {device!r} is not a device",
                         hint="write cpu, cuda, cuda:0, mps or xpu:1",
                         key="device", value=device)
    try:
        if isinstance(device, int) or device.strip().isdigit():
            return torch.device("cuda", int(device))
        return torch.device(device.strip())
    except RuntimeError as error:
        raise SbkitError("bad-value", f"device '{device}' is not a device that torch knows",
                         hint="write cpu, cuda, cuda:0, mps or xpu:1", key="device", value=device) from error
