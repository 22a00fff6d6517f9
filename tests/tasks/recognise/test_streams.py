"""A run that learnt in chunks gets its streaming graph into the bundle, behind the same gate as all others."""

from __future__ import annotations

import json
import re
from unittest import mock

import numpy as np
import pytest
import soundfile
import torch
from refusals import refused
from streaming_bundles import exported, put_for_traces
from streaming_recognisers import agrees
from streaming_runs import trained

import sbkit.infer
from sbkit.errors import SbkitError
from sbkit.export import layout, source
from sbkit.export.bundle import ExportRequest, export
from sbkit.export.layout import Config
from sbkit.export.runners import open_runner
from sbkit.export.windows import Windows
from sbkit.tasks.recognise import streaming_graph
from sbkit.tasks.recognise.streaming_graph import StreamingGraph

pytestmark = pytest.mark.slow  # each export takes some seconds

WAYS = ["320 ms", "640 ms"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return exported(tmp_path_factory)


@pytest.fixture(scope="module")
def made(shared):
    return shared.bundle


@pytest.fixture
def traced_before(made, monkeypatch):
    put_for_traces(made, monkeypatch)


def test_the_bundle_has_it_in_every_format_and_says_how_to_run_it(made):
    names = {path.name for path in made.iterdir()}
    config = Config.read(made)
    assert set(layout.STREAMS.values()) <= names and config.streaming.models == layout.STREAMS
    assert set(config.files) == names - {"config.json"}
    assert (config.streaming.chunks, config.streaming.left, config.streaming.ahead) == ([8, 16], 64, 4)
    readme = (made / "README.md").read_text()
    assert "### Streams" in readme and "`stream.onnx`, `stream.int8.onnx`, `stream.pt2`" in readme
    assert "640 C + 240 samples" in readme and "320, 640 ms" in readme and "stream, 640 ms, onnx" in readme


def test_its_readme_shows_how_to_run_it_without_sbkit(made, monkeypatch, tmp_path, capsys):
    signal = 0.1 * np.random.default_rng(1).standard_normal(40_000).astype(np.float32)
    soundfile.write(tmp_path / "clip.wav", signal, 16_000, subtype="FLOAT")
    readme = (made / "README.md").read_text().replace("clip.wav", str(tmp_path / "clip.wav"))
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    monkeypatch.chdir(made)
    given = {}
    programs = [block for block in blocks if not re.search("sbkit|speechbrain|sherpa|microphone", block)]
    exec("\n".join(block for block in programs if "\ndef " in block), given)  # functions that the others use
    for program in programs:
        if "\ndef " not in program:
            exec(program, dict(given))  # each by itself
    with sbkit.infer.load(made, model="onnx", device="cpu") as model:
        whole, stream = model.transcribe(tmp_path / "clip.wav").text, model.stream()
        live = stream.text([word for result in stream(signal) for word in result.settled])
    assert capsys.readouterr().out.splitlines() == [whole] * 2 + [live] * 2
    config = Config.read(made)
    for length in (1, 90, 640, 2_000, *range(10_200, 10_400, 40), 40_000):
        for chunk in config.streaming.chunks:
            ours = Windows(config, chunk)
            expected = [*ours.feed(signal[:length]), *ours.finish()]
            found = list(given["windows"](signal[:length], chunk))
            assert [frames for _, frames in found] == [window.frames for window in expected]
            np.testing.assert_array_equal([each for each, _ in found], [window.samples for window in expected])


@pytest.mark.parametrize("name", ["onnx", "torch"])
def test_what_is_written_gives_what_the_checkpoint_does_for_any_batch_and_chunk(shared, name):
    acoustic_model = source.open_run(shared.run).exported.acoustic_model
    run = open_runner(name, shared.bundle / layout.STREAMS[name])
    agrees(run, acoustic_model, Config.read(shared.bundle), atol=1e-3)


def test_layers_that_compute_something_else_by_steps_are_refused(shared):
    acoustic_model = source.open_run(shared.run).exported.acoustic_model
    signal = 0.1 * torch.randn(60_000, generator=torch.Generator().manual_seed(1))
    streaming_graph.check_steps(acoustic_model, signal)
    first_layer = acoustic_model.encoder.encoder.layers[0]
    first_layer.register_forward_hook(lambda layer, given, out: (out[0].roll(1, -1), out[1]))
    with refused("not-streamable"):
        streaming_graph.check_steps(acoustic_model, signal)


def test_parity_is_of_every_format_and_chunk(made):
    facts = json.loads((made / "parity.json").read_text())
    assert list(facts["stream"]) == WAYS
    for way in WAYS:
        formats = facts["stream"][way]
        assert list(formats) == ["checkpoint", "onnx", "int8", "torch"]
        for name in ("onnx", "torch"):
            assert formats[name]["difference"] <= 1e-3 and formats[name]["batch_difference"] <= 1e-3
            assert formats[name]["words_changed"] == 0
            assert formats[name]["bytes"] == (made / layout.STREAMS[name]).stat().st_size


def test_a_format_of_it_that_does_something_else_keeps_all_from_being_published(
        shared, traced_before, tmp_path, monkeypatch):
    def spoiled(name, path):
        call = open_runner(name, path)

        def other(*inputs):
            log_probs, counts, *state = call(*inputs)
            return [log_probs, counts, *(part * 0 for part in state)]  # it forgets

        return other

    monkeypatch.setattr(streaming_graph, "open_runner", spoiled)
    with pytest.raises(SbkitError, match=r"nothing was published:\n  stream, 320 ms, onnx: log-probabilities differ"):
        export(ExportRequest(shared.run, tmp_path / "b", formats=["onnx"], clips=2))
    assert list(tmp_path.iterdir()) == []


def test_eight_bits_alone_leave_no_other_file(shared, traced_before, tmp_path):
    assert export(ExportRequest(shared.run, tmp_path / "b", formats=["int8"], clips=2)) == 0
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "README.md", "config.json", "model.int8.onnx", "parity.json", "stream.int8.onnx", "tokens.txt"}


def test_a_model_that_cannot_stream_is_exported_for_whole_recordings(
        shared, traced_before, tmp_path, monkeypatch, caplog):
    (tmp_path / "run").mkdir()
    run = trained(tmp_path / "run", shared.data, Transformer={"attention_type": "RelPosMHAXL"}, chunks={"lookahead": 0})
    told = "for whole recordings only: this model can't run on a stream: its attention is RelPosMHAXL"
    assert source.open_run(run).exported.companions == () and told in caplog.text
    caplog.clear()
    # The shared run in its place, whose graph of whole recordings is there already.
    refused = mock.Mock(side_effect=SbkitError("cannot-stream", "this model can't run on a stream"))
    monkeypatch.setattr(StreamingGraph, "__init__", refused)
    assert export(ExportRequest(shared.run, tmp_path / "b", formats=["onnx"], clips=2)) == 0
    assert "for whole recordings only: this model can't run on a stream" in caplog.text
    assert Config.read(tmp_path / "b").streaming is None and not (tmp_path / "b" / "stream.onnx").exists()
