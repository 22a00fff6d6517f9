"""Numbers on the device: written in place, and only if one has changed."""

import copy

import torch

from sbkit.nn.device_numbers import DeviceNumbers

CPU, META = torch.device("cpu"), torch.device("meta")


def test_tensors_stay_and_are_written_only_if_a_number_changes():
    numbers = DeviceNumbers([1.0, 0.1])
    numbers.write([0.3, 0.1])
    one, other = numbers.on(CPU)
    assert [one.item(), other.item()] == torch.tensor([0.3, 0.1]).tolist() and one.dtype == torch.float32
    before = one._version
    numbers.write((0.3, 0.1))
    assert one._version == before
    copied = copy.deepcopy(numbers)
    numbers.write([0.3, 0.2])
    assert other == torch.tensor(0.2) and numbers.on(CPU)[1] is other and copied.on(CPU)[1] == torch.tensor(0.1)
    copied.write([5.0, 6.0])
    assert copied.on(CPU)[1] == 6


def test_they_follow_to_another_device():
    numbers = DeviceNumbers([0.1], torch.float64)
    assert numbers.on(META)[0].device == META
    numbers.write([0.7])
    assert numbers.on(CPU)[0].item() == 0.7
