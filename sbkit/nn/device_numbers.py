"""Numbers that change between steps, in tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceNumbers:
    """Numbers that the host changes between steps, as tensors that the kernels of a step read.

    A kernel that is given the number itself has it in its launch, which a captured step would repeat. Nothing is copied
    unless a number has changed, and nothing waits for the copy.

    >>> numbers = DeviceNumbers([0.5, 2.0])
    >>> half, two = numbers.on(torch.device("cpu"))
    >>> numbers.write([0.25, 2.0])
    >>> half
    tensor(0.2500)
    """

    def __init__(self, numbers: Sequence[float], dtype: torch.dtype = torch.float32):
        self.numbers = tuple(numbers)
        self.dtype = dtype
        self._device: torch.device | None = None  # as it was requested: cuda is not cuda:0

    def write(self, numbers: Sequence[float]) -> None:
        """Replace the numbers by as many others, also in the tensors that ``on`` has returned."""
        if self.numbers == tuple(numbers):
            return
        self.numbers = tuple(numbers)
        if self._device is not None:
            # Each copy has pinned memory of its own, which torch reuses only once the copy is done.
            pinned = self._device.type == "cuda" and torch.cuda.is_available()
            self._whole.copy_(torch.tensor(self.numbers, dtype=self.dtype, pin_memory=pinned), non_blocking=True)

    def on(self, device: torch.device) -> Sequence[Tensor]:
        """Return a scalar tensor of each; always the same ones, unless the device is another than before."""
        if device != self._device:
            self._device = device
            self._whole = torch.tensor(self.numbers, dtype=self.dtype, device=device)
            self._scalars = self._whole.unbind()
        return self._scalars
