"""Which kernel attends on a card is known and told, and cuDNN's only where it is asked for."""

import logging
from types import SimpleNamespace

import pytest
import torch
from speechbrain.nnet.attention import MultiheadAttention, RelPosMHAXL, RoPEMHA
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sbkit.nn import attention_kernel
from sbkit.nn.attention_kernel import kernel
from sbkit.nn.fast.attention import padded
from sbkit.recipe.build import Built
from sbkit.recipe.cost_check import attention_remarks
from sbkit.recipe.source import Findings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("capability, dtype, head, options, name, fused", [
    ((8, 0), BF16, 48, {}, "memory-efficient", True),
    ((9, 0), BF16, 64, {}, "memory-efficient", True),
    ((9, 0), BF16, 36, {}, "math", False),
    ((9, 0), FP16, 36, {}, "math", False),
    ((9, 0), FP32, 36, {}, "memory-efficient", True),
    ((8, 6), FP32, 18, {}, "math", False),
    ((7, 5), FP32, 18, {}, "memory-efficient", True),
    ((7, 5), FP16, 36, {}, "math", False),
    ((7, 5), BF16, 64, {}, "math", False),
    ((9, 0), BF16, 64, {"cudnn": True}, "cuDNN's", True),
    ((9, 0), FP32, 64, {"cudnn": True}, "memory-efficient", True),
])
def test_a_head_size_gets_the_kernel_that_takes_it(capability, dtype, head, options, name, fused):
    found = kernel(capability, dtype, head, **options)
    assert (found.name, found.fused) == (name, fused)
    assert bool(found.fix) is not fused


def test_head_sizes_are_those_of_all_attention_layers():
    layers = [RoPEMHA(24, 3), RelPosMHAXL(32, 2), MultiheadAttention(2, 20), nn.Linear(4, 4)]
    assert attention_kernel.head_sizes([nn.ModuleList(layers)]) == [8, 10, 16]


@pytest.fixture
def card(monkeypatch):
    """A stand-in of a card of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda:0")


def test_a_run_is_told_of_it_and_warned_of_a_size_that_no_fused_kernel_takes(card, caplog):
    caplog.set_level(logging.INFO)
    attention_kernel.log_kernel([RoPEMHA(48, 1)], card, "bf16")
    attention_kernel.log_kernel([RoPEMHA(36, 1)], card, "bf16")
    attention_kernel.log_kernel([RoPEMHA(36, 1)], card, "bf16", accelerated=False)
    attention_kernel.log_kernel([RoPEMHA(36, 1)], torch.device("cpu"), "bf16")
    (good, odd, bad) = caplog.records
    assert odd.levelname == "INFO" and "memory-efficient kernel (heads of 36, padded: heads of 40" in odd.message
    assert good.levelname == "INFO" and "memory-efficient kernel (heads of 48" in good.message
    assert bad.levelname == "WARNING" and "d_model / nhead is a multiple of 8" in bad.message


@pytest.mark.parametrize("accelerate, warnings", [(True, 0), (False, 1)])
def test_the_check_of_a_recipe_tells_it_too(card, accelerate, warnings):
    findings = Findings()
    traced = SimpleNamespace(keys=SimpleNamespace(accelerate=accelerate), built=Built(findings, "."))
    (line,) = attention_remarks(traced, SimpleNamespace(roots={"model": RoPEMHA(36, 1)}), card, "bf16", findings)
    assert line.startswith("attention on cuda:0: torch's ") and len(findings) == warnings


@pytest.mark.parametrize("asked, after", [("", False), ("1", True)])
def test_cudnns_is_left_unless_asked_for(monkeypatch, asked, after):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        monkeypatch.setenv(attention_kernel.CUDNN, asked)
        attention_kernel.leave_cudnn()
        assert torch.backends.cuda.cudnn_sdp_enabled() is after
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("head", [36, 40, 5])
def test_padded_heads_attend_as_they_are(head):
    q, k, v = torch.randn(3, 2, 3, 9, head, dtype=torch.float64).requires_grad_().unbind()
    options = {"attn_mask": torch.rand(2, 1, 1, 9) > 0.2, "scale": head**-0.5}
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    found = padded(q, k, v, **options)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


class Operations(TorchDispatchMode):
    """The names of the operations that run; torch's own attention is made of smaller ones."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("head", [36, 48, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_the_kernel_that_runs_is_the_one_that_was_told(head, dtype):
    from sbkit.train import device

    card = device.resolve("cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    q, k, v = torch.randn(3, 2, 3, 64, head, device=card, dtype=dtype)
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool, device=card)
    with Operations() as ran:
        functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = kernel(torch.cuda.get_device_capability(card), dtype, head)
    attention = [name for name in ran.names if "scaled_dot_product" in name]
    fused = {"memory-efficient": ["aten._scaled_dot_product_efficient_attention.default"], "math": []}
    assert attention == fused.get(expected.name, attention), ran.names
