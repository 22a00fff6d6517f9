"""What fits is remembered by model, device, precision and memory, and recommended with a margin."""

from types import SimpleNamespace

import encoders
import pytest
import torch

from sbkit.nn.pretrained import Encoder
from sbkit.recipe import batch_size
from sbkit.tasks.ctc import CTC


def test_what_is_recommended_leaves_a_margin_and_is_no_more_than_a_step():
    assert batch_size.BatchSize(2, [10.0, 20.0], [12, 5], 400).seconds == 90
    assert batch_size.BatchSize(2, [10.0, 20.0], [30, 14], 200).seconds == 200
    assert batch_size.BatchSize(2, [10.0, 20.0], [3, 0], 200).seconds == 0


def test_results_are_kept_by_memory(tmp_path):
    path = tmp_path / "tune" / "x.json"
    assert batch_size.cached(path) == []
    few, many = batch_size.BatchSize(2.0, [1.0], [7], 100), batch_size.BatchSize(16.0, [1.0], [70], 100)
    for found in (many, batch_size.BatchSize(2.0, [1.0], [9], 100), few):
        batch_size.store(path, found)
    assert batch_size.cached(path) == [few, many]
    path.write_text('[{"gib": 2}]')
    assert batch_size.cached(path) == []
    path.write_text("{")
    assert batch_size.cached(path) == []


def test_they_are_kept_by_model_device_and_precision():
    def place(width=3, precision="fp32", **hparams):
        model = batch_size.model_of({"m": torch.nn.Linear(2, width)})
        return batch_size.result_file(model, CTC.Keys.read(hparams), precision, torch.device("cpu"))

    assert place() == place()
    averaged = place(ema=SimpleNamespace(decay=0.9))
    seconds_of_more_samples = place(sample_rate=48_000)
    assert len({place(), place(4), place(precision="bf16"), place(ctc_weight=0.3), averaged,
                seconds_of_more_samples}) == 6


@pytest.mark.parametrize("kind, option", [("wav2vec2-layer", {"freeze_front": False}), ("whisper", {"dropout": 0.1}),
                                          ("whisper", {"whole_window": True})])
def test_a_pretrained_encoder_is_another_with_options_that_take_another_amount_of_memory(tmp_path, kind, option):
    folder = str(encoders.make(tmp_path / "encoder", kind))
    plain, again, other = (Encoder(folder, **given) for given in ({}, {}, option))
    other.requires_grad_(False)
    again.requires_grad_(False)  # what a check does before it asks
    plain, again, other = (batch_size.model_of({"m": module}) for module in (plain, again, other))
    assert plain == again != other
