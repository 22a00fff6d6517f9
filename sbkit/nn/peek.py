"""Reads values of device tensors without blocking the host, by an asynchronous copy."""

from __future__ import annotations

import numpy as np
import torch

# Allocating pinned memory is expensive, so the buffers of finished peeks are reused.
_POOL: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}


class Peek:
    """A snapshot of ``tensor`` that is being copied to the host.

    On CUDA the copy is queued after the work queued so far, and ``ready`` checks without a sync whether it is done.
    On other devices the value is ready at once. The tensor may be overwritten as soon as the constructor returns.

    >>> Peek(torch.tensor([1.0, 2.0])).numpy().tolist()
    [1.0, 2.0]
    """

    __slots__ = ("_event", "_host", "_shape", "_value")

    def __init__(self, tensor: torch.Tensor):
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:  # numpy has none
            tensor = tensor.float()
        self._shape = tensor.shape
        self._event = None
        self._value: np.ndarray | None = None
        self._host: torch.Tensor | None
        if tensor.device.type == "cuda":
            spare = _POOL.setdefault((tensor.dtype, tensor.numel()), [])
            self._host = spare.pop() if spare else torch.empty(
                tensor.numel(), dtype=tensor.dtype, pin_memory=True
            )
            self._host.copy_(tensor.reshape(-1), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()

    @property
    def ready(self) -> bool:
        """Whether ``numpy()`` returns without waiting."""
        return self._event is None or self._event.query()

    def numpy(self) -> np.ndarray:
        """Return the value; waits for the copy if it isn't ready yet."""
        if self._value is None:
            host = self._host
            assert host is not None, "kept until _value is set"
            if self._event is not None:
                if not self._event.query():
                    self._event.synchronize()
                self._value = host.numpy().copy().reshape(self._shape)
                _POOL[(host.dtype, host.numel())].append(host)
                self._event = None
            else:
                self._value = host.numpy().reshape(self._shape)
            self._host = None
        return self._value

    def item(self) -> float | int:
        """Return the value of a one-element tensor as a Python number; waits like ``numpy()``."""
        return self.numpy().reshape(-1)[0].item()
