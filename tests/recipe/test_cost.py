"""The cost estimate warns of a micro-batch that the GPU has no room for, where the recipe sets its size."""

import dataclasses
import sys

import pytest
import torch
from written import SMALL

from sbkit.data import rate
from sbkit.data.manifest import Manifest
from sbkit.recipe import arguments, cost, speed
from sbkit.recipe.batch_size import BatchSize
from sbkit.recipe.check import check
from sbkit.recipe.price import PriceRequest
from sbkit.recipe.source import Findings, Node, Place
from sbkit.system import memory

WRITTEN = Node(60, Place("recipe.yaml", 3), "max_batch_seconds")
BATCHING = Node({"max_batch_seconds": Node(60, Place("recipe.yaml", 9), "batching.max_batch_seconds", source=WRITTEN)},
                Place("recipe.yaml", 8), "batching", "!new:sbkit.data.plan.Batching")


@pytest.fixture
def needs_nine(monkeypatch):
    """An estimate for 9 GiB on a GPU with 8."""
    monkeypatch.setattr(cost, "memory_of", lambda device: 8 * cost.GIB)
    return cost.CostEstimate(1, 0, cost.GIB, cost.BatchCost(3, 20.0, 8 * cost.GIB, 1e9), None, "cuda")


def warnings(made, *given):
    findings = Findings()
    made.check_fits(findings, *given)
    return [str(finding) for finding in findings]


@pytest.mark.parametrize("batching, place", [
    (BATCHING, "recipe.yaml:3"), (Node({}, Place("recipe.yaml", 8), "batching"), "command line"),
    (None, "command line"),
])
def test_a_micro_batch_that_is_too_large_is_blamed_on_the_value_that_batching_has(needs_nine, batching, place):
    (warning,) = warnings(needs_nine, batching)
    assert warning == (
        f"{place}: warning: max_batch_seconds: a micro-batch of 60 s needs about 9.00 GiB, cuda has 8.00 GiB; set "
        "max_batch_seconds to 43 s or less: the optimizer steps stay the same, with more micro-batches [too-large]")


def test_a_micro_batch_that_the_memory_of_the_machine_cannot_hold_is_told_on_a_cpu(needs_nine, monkeypatch):
    monkeypatch.setattr(memory, "total", lambda: 8 << 30)
    (warning,) = warnings(dataclasses.replace(needs_nine, device="cpu"), BATCHING)
    assert "needs about 9.00 GiB, cpu has 8.00 GiB; set max_batch_seconds to 43 s or less" in warning


def test_where_not_even_one_utterance_fits_adapters_are_named(needs_nine):
    (warning,) = warnings(dataclasses.replace(needs_nine, weights=6 * cost.GIB), BATCHING)
    assert "not even one utterance of 20 s fits" in warning and "docs/how-to/finetune.md#adapters" in warning


@pytest.mark.parametrize(("card", "full", "says"), [
    (8, 2, "3.33 GiB for the whole encoder, 2.16 GiB for adapters; cuda has 8.00 GiB: train the whole encoder"),
    (8, 7, "cuda has 8.00 GiB: train adapters, or try a lower max_duration"), (1, 7, "cuda has 1.00 GiB: neither fits"),
    (None, 6, "the whole encoder fits from 16 GB on: where it fits, train the whole encoder"),
    (None, 500, "fits on no single GPU, adapters from 16 GB on")])
def test_memory_decides_between_the_whole_encoder_and_adapters(monkeypatch, card, full, says):
    monkeypatch.setattr(cost, "memory_of", lambda device: card and card * cost.GIB)
    made = cost.CostEstimate(1, 0, cost.GIB, cost.BatchCost(3, 20.0, 5 * cost.GIB // 2, 1e9), None, "cuda",
                             full_weights=full * cost.GIB, adapter_weights=cost.GIB)
    assert any(says in remark for remark in cost.section(made).remarks)
    assert not any("adapters" in remark for remark in cost.section(dataclasses.replace(made, full_weights=0)).remarks)


@pytest.mark.parametrize("most, seconds", [(120.0, 72), (60.0, 60), (59.0, 59)])
def test_one_that_was_tried_and_fits_is_not(needs_nine, most, seconds):
    tried = BatchSize(gib=8.0, edges=[20.0], fits=[4], most=most)
    assert tried.seconds == seconds and (warnings(needs_nine, BATCHING, [tried]) == []) == (seconds >= 60)


@pytest.mark.parametrize("audio, shown", [
    ((), {"time for 100 hours of audio, one cpu": "50 h"}),
    ((2000.0, 1, 10), {"time of an epoch, 2,000 h of audio, one cpu": "1,000 h",
                       "time of the run, 10 epochs, one cpu": "10,000 h"}),
    ((0.03, 33, 4), {"time of an epoch, 59 min of audio, 33 times 1.8 min, one cpu": "30 min",
                     "time of the run, 4 epochs, one cpu": "2 h"}),
])
def test_times_are_those_of_an_epoch_and_of_the_run_however_often_it_goes_through_its_corpus(audio, shown):
    made = cost.CostEstimate(1, 0, cost.GIB, cost.BatchCost(3, 20.0, 8 * cost.GIB, 1e9), 50.0, "cpu")
    section = cost.section(made, (), *audio)
    assert {what: much for what, much in section.rows if what.startswith("time")} == shown
    assert section.values["audio_hours_per_epoch"] == (audio[0] * audio[1] if audio else None)


@pytest.mark.parametrize(("planned", "expected"), [
    ((None, None), ["the largest micro-batch that max_batch_seconds allows, 116 s of audio, takes 2.3 s; the times "
                    "scale this to all audio"]),
    ((0.02, 15.0), ["a micro-batch of typical utterances, 15 s of audio, takes 0.3 s"])])
def test_what_was_measured_is_one_line(planned, expected):
    measured = cost.StepMeasurement("cpu", 116.0, 2.3, None, *planned)
    made = cost.CostEstimate(1, 0, cost.GIB, cost.BatchCost(3, 20.0, 8 * cost.GIB, 1e9), 2.0, "cpu", measured)
    remarks = cost.section(made).remarks
    assert remarks == [f"measured on cpu: {each}" for each in expected]


@pytest.mark.long
@pytest.mark.slow
def test_a_step_on_a_gpu_takes_at_least_as_long_as_its_launches(tmp_path, monkeypatch):
    for module in speed, sys.modules["sbkit.recipe.cost_check"]:
        monkeypatch.setattr(module, "limits_of", lambda device, precision: speed.Speed(989e12, 3.35e12))
    Manifest(ids=["a", "b"], durations=[5.0, 10.0], wavs=["a.wav"] * 2, texts=["a", "b"]).write(tmp_path / "train.csv")

    def checked(*words, reads=1e9):
        monkeypatch.setattr(rate, "measure", lambda reader: rate.ReadingRate(reads, "wav", 2))
        request = arguments.parse([str(SMALL), "--corpus.folder", str(tmp_path), "--batching.step_seconds", "15",
                                   "--num_workers", "1", *words])
        report = check(request.path, request.overrides, run_opts=request.run_opts)
        seconds = report.sections["cost"].values["hours_per_100_hours"] / 100 * 15
        return seconds, "slow-reading" in {each.code for each in report.warnings}

    launched = ["--device", "cuda", "--graphs", "false"]
    launching, _ = checked(*launched)
    assert launching > 100 * speed.LAUNCH_MS / 1000, "which a micro-batch of 40 s has, too"
    for words in (["--device", "cpu"], ["--device", "cuda"]):
        assert checked(*words)[0] < launching / 10
    for factor, slow in (0.9, True), (1.1, False):
        assert checked(*launched, reads=factor * 15 / launching)[1] == slow


@pytest.mark.parametrize("audio, seconds", [(15.0, 0.0375), (60.0, 0.0375), (120.0, 0.075), (0.1, 0.0375)])
def test_each_micro_batch_is_launched_however_little_audio_it_has(audio, seconds):
    kernels = [(10**6, 10**6)] * 1146
    made = cost.CostEstimate(1, 0, cost.GIB, cost.BatchCost(3, 20.0, cost.GIB, 1e9, kernels=kernels), None, "cuda",
                             launch_seconds=0.0375)
    assert made.least_step_seconds(audio, speed.Speed(989e12, 3.35e12)) == pytest.approx(seconds)


@pytest.mark.slow
def test_torchscript_is_tried_before_anything_is_prepared():
    request = arguments.parse([str(SMALL), "--jit"])
    report = check(request.path, request.overrides, run_opts=request.run_opts)
    assert "TorchScript can't take" in report.errors[0].message and report.errors[0].key == "--jit"
    request = arguments.parse([str(SMALL), "--jit", "--compile"])  # which replaces it
    assert check(request.path, request.overrides, run_opts=request.run_opts).errors == []


@pytest.mark.slow
def test_a_card_that_is_not_here_and_a_corpus_that_is_not_prepared_are_said():
    request = arguments.parse([str(SMALL), "--device", "cuda"])
    report = check(request.path, request.overrides, run_opts=request.run_opts, pricing=PriceRequest(2.5))
    assert ("no-device" in {each.code for each in report.warnings}) != torch.cuda.is_available()
    assert any(note.startswith("the price: the corpus is not prepared") for note in report.notes)
    assert "price" not in report.sections


@pytest.mark.slow
@pytest.mark.parametrize("named, counted", [("ConformerEncoderLayer", True), ("ConformerEncoderLayers", False)])
def test_layers_that_are_none_are_not_counted_on(tmp_path, named, counted):
    report = check(SMALL, {"output_folder": str(tmp_path), "activation_checkpointing": [named]})
    assert [error.key for error in report.errors] == ["activation_checkpointing"] * (not counted)
    inexact = report.sections["cost"].values["inexact"]
    assert inexact == ["activation_checkpointing needs less memory than is counted here"] * counted
