"""A look at a tensor shows what it held then, and costs no host sync."""

from __future__ import annotations

import pytest
import torch

from sbkit.nn.peek import Peek


def test_it_shows_what_the_tensor_held_when_looked_at():
    tensor = torch.tensor([1.0, 2.0])
    peek = Peek(tensor)
    tensor.zero_()
    assert peek.ready
    assert peek.numpy().tolist() == [1.0, 2.0]
    assert peek.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_any_type_and_gradients(dtype):
    tensor = torch.ones((), dtype=dtype)
    if tensor.is_floating_point():
        tensor.requires_grad_()
    assert Peek(tensor).item() == 1


@pytest.mark.gpu
def test_no_host_sync_on_a_gpu():
    tensor = torch.arange(4.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        peeks = [Peek(tensor + i) for i in range(10)]
        assert all(isinstance(peek.ready, bool) for peek in peeks)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(values=True)
def test_it_shows_what_a_card_held_when_looked_at():
    tensor = torch.arange(4.0, device="cuda")
    peeks = [Peek(tensor + i) for i in range(10)]
    tensor.zero_()
    assert [peek.numpy()[0] for peek in peeks] == list(range(10))
