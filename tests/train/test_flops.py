"""Utilisation: operations of a known product are counted right, once, and set against the device's."""

from types import SimpleNamespace

import pytest
import torch

from sbkit.recipe import speed
from sbkit.train import flops


def batch(seconds=4.0, weight=1.0):
    return SimpleNamespace(padded_seconds=seconds, weight=weight)


def product(rows=30):
    weight = torch.randn(10, 20, requires_grad=True)
    (torch.randn(rows, 10) @ weight).sum().backward()


def test_the_first_batch_is_counted_forward_and_backward(monkeypatch):
    monkeypatch.setattr(flops, "peak_of", lambda device, precision: (1e6, "a test"))
    use = flops.Utilisation(torch.device("cpu"), "fp32")
    assert use.share(4.0, 1.0) is None
    with use.counted(batch()):
        product()
    assert use.per_second == 2 * (2 * 30 * 10 * 20) / 4.0  # forward, and the weight's gradient
    with use.counted(batch()):
        product(rows=3000)
    assert use.per_second == 6000.0, "the second is not counted"
    assert use.share(100.0, 2.0) == pytest.approx(6000 * 50 / 1e6)
    assert use.line(100.0, 2.0) == "30 % of a test in use"


@pytest.mark.parametrize("odd", [SimpleNamespace(), batch(weight=0.0), batch(seconds=0.0)])
def test_what_says_nothing_about_audio_is_not_counted(odd):
    use = flops.Utilisation(torch.device("cpu"), "fp32")
    with use.counted(odd):
        product()
    assert use.per_second is None and use.share(1.0, 1.0) is None


def test_a_gpu_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, expected in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
                           ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert speed.peak_of(torch.device("cuda"), "bf16")[0] == expected


def test_the_speed_of_a_cpu_is_measured():
    found, how = speed.peak_of(torch.device("cpu"), "fp32")
    assert found > 1e8 and how == "a large matrix product"
    assert speed.speed_of(torch.device("mps"), "fp32") is None
