"""hparams/streaming.yaml: statistics on their way from the corpus to the model, and what the check says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from run_folders import corpus
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from streaming_runs import RECIPE, SMALL, brain, prepared, recipe, trained

from sbkit.errors import SbkitError
from sbkit.recipe.check import check
from sbkit.recipe.overrides import from_python
from sbkit.recipe.source import Findings
from sbkit.runs import initial, restore
from sbkit.tasks import feature_statistics as statistics
from sbkit.tasks.ctc.exported import ExportedCTC
from sbkit.tasks.recognise import chunk_check
from sbkit.tasks.recognise.streaming_graph import StreamingGraph

# Each takes a fraction of a second, and there are many.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_trials")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("streaming") / "data", train=6, dev=2, test=2)


def test_every_rank_has_the_statistics_before_it_trains(data, tmp_path):
    made = prepared(tmp_path, data)
    norm = brain(made).acoustic_model.normalize
    assert norm.known and made.task.is_prepared(made.keys)
    manifest = made.keys.corpus.load()["train"]
    settings = statistics.FeatureSettings(made.keys.compute_features, 160, 16_000)
    mean, deviation, _, _ = statistics.compute(settings, manifest)
    torch.testing.assert_close(norm.mean.double(), torch.from_numpy(mean), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.deviation.double(), torch.from_numpy(deviation), rtol=1e-6, atol=1e-6)


def test_a_model_whose_corpus_is_not_prepared_takes_stand_ins_alone(data, tmp_path):
    made = recipe(tmp_path, data)
    assert not made.task.is_prepared(made.keys)
    found = brain(made)
    with refused("no-statistics"):
        found.acoustic_model.outputs(torch.randn(1, 16_000), torch.tensor([16_000]))
    batch = found.dummy_batch(2, 1.0, noise=True)
    assert found.acoustic_model.outputs(batch.signals, batch.signal_lengths)[0].isfinite().all()


def test_a_run_with_checkpoints_computes_nothing(data, tmp_path, monkeypatch):
    """It goes on with what it was trained with, whatever its corpus is now."""
    found = brain(prepared(tmp_path, data))
    found.checkpointer.save_checkpoint(meta={"WER": 50.0, "epoch": 1})
    found.checkpointer.wait()
    statistics.path_of(found.keys.normalize).unlink()
    monkeypatch.setattr(statistics, "compute", None)
    again = brain(prepared(tmp_path, data))
    again.checkpointer.recover_if_possible()
    assert torch.equal(again.acoustic_model.normalize.mean, found.acoustic_model.normalize.mean)
    again.acoustic_model.outputs(torch.randn(1, 16_000), torch.tensor([16_000]))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run with a checkpoint, whose statistics are not those of its corpus."""
    return trained(tmp_path_factory.mktemp("run"), data)


def test_what_is_scored_and_exported_has_those_of_its_checkpoint(run):
    made, found = restore.load_run(run, "cpu")
    assert found.acoustic_model.normalize.mean.unique().tolist() == [-5.0]
    assert ExportedCTC.of(found.acoustic_model, made.keys, run).formats == ("onnx", "int8", "torch"), \
        "SpeechBrain gives features no lengths"


def test_a_run_takes_those_of_what_it_starts_from(run, data, tmp_path):
    made = prepared(tmp_path, data, init_from=str(run))
    started, apart = brain(made), brain(prepared(tmp_path, data, init_from=str(run), init_leave=["normalize"]))
    assert started.acoustic_model.normalize.mean.unique().tolist() != [-5.0]
    for each in (started, apart):
        initial.load(each)
    assert started.acoustic_model.normalize.mean.unique().tolist() == [-5.0]
    assert apart.acoustic_model.normalize.mean.unique().numel() > 1


def test_features_with_other_steps_than_the_key_says_are_refused(tmp_path):
    given = {"hop_length": 12.5, "compute_features": {"frame_shift": 10.0}}
    report = check(RECIPE, {**SMALL, **given, "output_folder": str(tmp_path)})
    assert any((error.code, error.key) == ("shape-mismatch", "hop_length") for error in report.errors), report.errors


@torch.no_grad()
def test_the_check_tries_the_front_end_whatever_its_weights_are(data, tmp_path):
    """A check builds layers without initialising them."""
    made, findings = recipe(tmp_path, data), Findings()
    for weight in made.keys.CNN.parameters():
        weight.data.fill_(torch.nan)
    built = SimpleNamespace(nodes={"CNN": from_python({}, "CNN")})
    assert chunk_check.check_front_end(made.keys, built, findings) and not findings
    made.keys.CNN = ConvolutionFrontEnd((8, 10, 80), 2, 1, [4, 4], [5, 5], [2, 2], [1, 1], [False, False])
    assert not chunk_check.check_front_end(made.keys, built, findings)
    assert "depend on features of later frames" in findings[0].message


@pytest.mark.parametrize("changes", [
    {}, {"Transformer": {"attention_type": "RelPosMHAXL"}, "chunks": {"lookahead": 0}},
    {"compute_features": {"frame_length": 8.0}}])
def test_the_check_warns_of_just_what_the_export_refuses(data, tmp_path, changes):
    warned = [str(each) for each in check(RECIPE, {**SMALL, **changes, "output_folder": str(tmp_path)}).warnings]
    made = prepared(tmp_path, data, **changes)
    try:
        StreamingGraph(brain(made).acoustic_model)
    except SbkitError as error:
        (line,) = warned
        assert error.message.removeprefix("this model can't run on a stream: ") in line
    else:
        assert not changes and not warned
