"""Count what would make the host wait for a GPU, on a machine that may have none."""

from __future__ import annotations

import contextlib
import traceback
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Operations whose result, or the size of it, has to be known on the host.
_WAITING = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.equal, aten.masked_select,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.nonzero_numpy,
}
# Methods that copy to the host and return a Python object or a CPU tensor.
_COPYING = ("cpu", "tolist", "__bool__", "__int__", "__float__", "__index__", "item")


class CountsHostSyncs(TorchDispatchMode):
    """Within it, reads of a tensor's value are counted."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


class HostSyncs(TorchDispatchMode):
    """Within it, each wait is noted in ``found`` with the lines that led to it.

    On a machine with a GPU, also turns ``torch.cuda.set_sync_debug_mode("error")`` on.
    """

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        for name in _COPYING:
            self._stack.enter_context(mock.patch.object(torch.Tensor, name, self._noting(name)))
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, *error):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self._stack.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = func.overloadpacket in _WAITING
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        repeats = func.overloadpacket is aten.repeat_interleave and (kwargs or {}).get("output_size") is None
        if waits or by_mask or repeats:
            self._note(str(func))
        return func(*args, **(kwargs or {}))

    def _noting(self, name):
        method = getattr(torch.Tensor, name)

        def noting(tensor, *args, **kwargs):
            self._note(f"Tensor.{name}")
            return method(tensor, *args, **kwargs)

        return noting

    def _note(self, what):
        lines = [line for line in traceback.extract_stack()[:-2] if "/torch/" not in line.filename]
        lines = [line for line in lines if not line.filename.endswith("host_syncs.py")]
        self.found.append(f"{what} at " + " < ".join(f"{x.filename}:{x.lineno}" for x in reversed(lines[-3:])))
