"""How many kernels a step of the flagship starts: on a GPU each costs the host time, so their number may not grow."""

import pytest
import test_no_host_sync
import torch
from test_no_host_sync import FROM, TO, waits
from torch.utils._python_dispatch import TorchDispatchMode

from sbkit.tasks.ctc import CTC

#: Of a step of two micro-batches with one encoder layer, as counted with torch 2.11; one more layer or loss adds some.
MOST = {"fp32": 660, "bf16": 730}
_FREE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::detach", "aten::lift_fresh"}


class Kernels(TorchDispatchMode):
    """Names of the operations that are started, views left out."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if not (func.is_view or name in _FREE):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.__version__.startswith("2.11"), reason="another torch has other kernels")
@pytest.mark.parametrize("precision", MOST)
def test_a_step_starts_no_more_kernels_than_it_did(tmp_path, monkeypatch, precision):
    monkeypatch.setattr(test_no_host_sync, "HostSyncs", Kernels)
    found = waits(CTC, tmp_path, monkeypatch, number_of_epochs=1, precision=precision)
    count = len(found) / (TO - FROM)
    most = sorted({(found.count(name) // (TO - FROM), name) for name in found}, reverse=True)[:12]
    assert 0.8 * MOST[precision] < count <= MOST[precision], f"{count:.0f} kernels a step, most of them {most}"
