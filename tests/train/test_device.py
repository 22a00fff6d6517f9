"""Devices: every form of a name, and one clear error for what can't be used."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from sbkit.train import device as devices
from sbkit.train.options import clean, pick


@pytest.mark.parametrize("form, kind", [
    ("cpu", "cpu"), ("cuda", "cuda"), ("cuda:0", "cuda"), ("cuda:10", "cuda"), ("mps", "mps"), ("xpu:1", "xpu"),
    (torch.device("cuda", 3), "cuda"), (torch.device("cpu"), "cpu"), (1, "cuda"), ("1", "cuda"), (" cpu ", "cpu"),
])
def test_any_form_of_a_name_is_understood(form, kind):
    assert devices.parse(form).type == kind


@pytest.mark.parametrize("form", ["gpu", "cuda:x", "cuda:-3", True, 1.5, object()])
def test_an_invalid_device_is_an_error(form):
    with refused("bad-value", key="device", wording=type(form) is not object):
        devices.parse(form)


@pytest.mark.parametrize("form", ["cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_is_always_there(form):
    assert devices.resolve(form) == torch.device("cpu")


@pytest.mark.skipif("torch.cuda.is_available()", reason="needs a machine without a GPU")
@pytest.mark.parametrize("form, code", [
    ("cuda", "device-unavailable"), ("cuda:10", "device-unavailable"), ("xpu:1", "device-unavailable"),
    ("meta", "bad-value"),
    (torch.device("cuda:0"), "device-unavailable")])
def test_a_device_that_is_not_there_is_one_error_that_says_what_to_do(form, code):
    with refused(code, key="device", wording=False) as error:  # it names torch's version and build
        devices.resolve(form)
    assert "cpu" in error.value.hint


class Cards:
    """Stands in for ``torch.cuda`` with some cards."""

    def __init__(self, count):
        self.count, self.current = count, None

    def is_available(self):
        return True

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.current = index


@pytest.fixture
def cards(monkeypatch):
    def give(count, **environment):
        fake = Cards(count)
        monkeypatch.setattr(torch, "cuda", fake)
        monkeypatch.setattr(devices.torch, "zeros", lambda *a, device: None)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        return fake

    return give


@pytest.mark.parametrize("count, environment, asked, got", [
    (12, {}, "cuda", "cuda:0"),
    (12, {}, "cuda:10", "cuda:10"),
    (8, {"LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}, "cuda", "cuda:3"),
    (8, {"LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}, "cuda:0", "cuda:3"),
    (8, {"LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}, "cuda:3", "cuda:3"),
    (8, {"LOCAL_RANK": 3, "WORLD_SIZE": 8}, "cuda:0", "cuda:3"),  # a launcher that doesn't say how many are here
    (8, {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}, "cuda:5", "cuda:5"),
    (1, {"LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}, "cuda", "cuda:0"),  # SLURM shows each process its own
])
def test_each_process_of_a_machine_gets_its_card(cards, count, environment, asked, got):
    fake = cards(count, **environment)
    assert devices.resolve(asked) == torch.device(got)
    assert fake.current == torch.device(got).index


@pytest.mark.parametrize("count, environment, asked", [
    (2, {}, "cuda:2"), (2, {"LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}, "cuda"),
])
def test_a_card_that_does_not_exist_is_an_error_with_the_number_there_are(cards, count, environment, asked):
    cards(count, **environment)
    with refused("device-unavailable", key="device"):
        devices.resolve(asked)


def test_a_checkpoint_interval_on_the_command_line_beats_the_recipes_other():
    opts, hparams = clean({"ckpt_interval_steps": 5, "device": "cpu"}, {"ckpt_interval_minutes": 10})
    assert (pick(opts, hparams, "ckpt_interval_steps"), hparams["ckpt_interval_minutes"]) == (5, 0)
    with refused("conflicting-options"):
        clean({"device": "cpu"}, {"ckpt_interval_minutes": 10, "ckpt_interval_steps": 5})


def test_precision_auto_becomes_one_that_the_device_has():
    opts, hparams = clean({"device": "cpu"}, {"precision": "auto"})
    assert hparams["precision"] in ("fp32", "bf16")
    opts, _ = clean({"device": "cpu", "precision": "auto"}, None)
    assert opts.precision in ("fp32", "bf16")


def test_a_device_is_described_by_its_name_and_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(name="A card", total_memory=80 << 30))
    assert devices.described("cuda:1") == "A card, 80 GiB"
    assert devices.described("cpu").startswith("cpu")


@pytest.mark.gpu
def test_a_card_is_described_by_its_name_and_memory():
    assert re.fullmatch(r".+, \d+ GiB", devices.described("cuda"))
