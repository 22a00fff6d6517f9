"""Copies of states for a checkpoint that is written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def snapshot(state: T, tensors: bool = True) -> tuple[T, Callable[[], None]]:
    """Copy a state to the CPU; return the copy, and a function to call before reading it.

    tensors : whether to copy tensors, too

    Copies from a GPU go to pinned memory in stream order. So training may change the weights right away, and only the
    caller of the returned function waits.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    devices: set[torch.device] = set()

    def walk(value: Any) -> Any:  # of the same type as the value
        if isinstance(value, torch.Tensor) and not tensors:
            return value
        if isinstance(value, torch.Tensor):
            is_strided = value.layout == torch.strided
            # Tied weights stay one tensor in the file, as with torch.save.
            key: tuple[Any, ...] = ()
            if is_strided and type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel():
                key = (value.data_ptr(), value.device, value.shape, value.stride(), value.dtype)
            if key in copies:
                return copies[key]
            if value.device.type == "cpu" or not is_strided:
                copied = value.detach().clone().cpu()
            else:
                devices.add(value.device)
                is_pinned = value.device.type == "cuda"
                copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=is_pinned)
                copied.copy_(value.detach(), non_blocking=is_pinned)
            if key:
                copies[key] = copied
            return copied
        if isinstance(value, dict):
            new = copy.copy(value)  # keeps the class, and the _metadata of an OrderedDict
            for name, item in value.items():
                new[name] = walk(item)
            return new
        if type(value) in (list, tuple):
            return type(value)(map(walk, value))
        return copy.deepcopy(value)

    copied = walk(state)
    events = [torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"]

    def ready() -> None:
        for event in events:
            event.synchronize()

    return copied, ready
