"""Bundles whose config.json and graph don't belong together: refused when they are opened, not in mid-request."""

import shutil

import bundles
import numpy as np
import onnx
import pytest
import toy_codec
import voices
from refusals import refused

import sbkit.infer
from sbkit.export import layout
from sbkit.infer.voice_engine import SpeechInput


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A voice and a codec whose graphs say what they are."""
    folder = tmp_path_factory.mktemp("bundles")
    for bundle in (voices.make(folder / "voice", torch_too=True), toy_codec.make(folder / "codec")):
        config = layout.read(bundle)
        for file in bundle.glob("*.onnx"):
            model = onnx.load(file)
            onnx.helper.set_model_props(model, config.onnx_metadata() | {"comment": "made by sbkit"})
            onnx.save(model, file)
    return folder


def lying(folder, to, **changes):
    return bundles.change(shutil.copytree(folder, to), **({"files": {}} | changes))


@pytest.fixture(scope="module")
def voice(made):
    with sbkit.infer.load(lying(made / "voice", made / "true"), model="onnx", device="cpu") as loaded:
        yield loaded


def opened(bundle, **options):
    sbkit.infer.load(bundle, device="cpu", **options).close()


@pytest.mark.parametrize("kind", ["voice", "codec"])
def test_a_consistent_bundle_opens(made, tmp_path, kind):
    opened(lying(made / kind, tmp_path / "b"))


@pytest.mark.parametrize("kind, changes", [
    ("voice", {"symbols": [*voices.SYMBOLS, "é"]}), ("voice", {"symbols": [voices.SYMBOLS[0], *voices.SYMBOLS[:0:-1]]}),
    ("voice", {"symbols": voices.SYMBOLS[:5]}), ("voice", {"speakers": ["ben", "anna"]}),
    ("voice", {"sample_rate": 48_000}), ("codec", {"books": [4000, 4000]}), ("codec", {"codec": "0" * 64}),
    ("codec", {"stride": 160}),
])
def test_a_graph_with_other_metadata_is_refused(made, tmp_path, kind, changes):
    with refused("mismatched-bundle"):
        opened(lying(made / kind, tmp_path / "b", **changes))


@pytest.mark.parametrize("model, changes", [
    ("onnx", {"speakers": ["anna", "ben", "eve"]}), ("onnx", {"symbols": [*voices.SYMBOLS, "é"]}),
    ("torch", {"speakers": ["anna", "ben", "eve"]}),
])
def test_without_metadata_the_last_symbol_and_voice_are_tried(tmp_path, model, changes):
    bundle = voices.make(tmp_path / "v", torch_too=model == "torch", **changes)
    with refused("mismatched-bundle", wording=False):
        opened(bundle, model=model)


@pytest.mark.parametrize("line, message", [
    (SpeechInput([9999]), "ids of symbols must be whole numbers from 1 to 32"), (SpeechInput([-1]), "ids of symbols"),
    (SpeechInput([2, 0, 2]), "ids of symbols"), (SpeechInput([1.5]), "ids of symbols"),
    (SpeechInput([33]), "ids of symbols"),
    (SpeechInput([2], speaker=2), "speaker must be a whole number from 0 to 1, not 2"),
    (SpeechInput([2], speaker=-1), "speaker"),
    (SpeechInput([2], speed=0.0), "speed must be"), (SpeechInput([2], speed=float("nan")), "speed must be"),
])
def test_a_line_that_no_voice_can_speak_is_refused_before_anything_runs(voice, line, message):
    with pytest.raises(ValueError, match=message):
        voice.engine.submit([SpeechInput(np.array([2, 3])), line])


@pytest.mark.parametrize("make, at", [
    (voices.make, (0,)), (toy_codec.make, (0,)), (toy_codec.make, (1,)), (bundles.make, (0,)),
])
def test_a_graph_that_outputs_too_few_rows_is_refused(tmp_path, make, at):
    """Its outputs are cut behind what the graph computes."""
    bundle = make(tmp_path / "b")
    path = sorted(bundle.glob("*.onnx"), key=lambda file: file.name, reverse=True)[-1 if at == (1,) else 0]
    model = onnx.load(path)
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["uncut" if name == output else name for name in node.output]
    for name, value in (("cut_0", [0]), ("cut_axis", [0])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), name))
    model.graph.node.append(onnx.helper.make_node("Slice", ["uncut", "cut_0", "cut_0", "cut_axis"], [output]))
    path.write_bytes(model.SerializeToString())
    bundles.change(bundle, files={})
    with refused("mismatched-bundle"):
        opened(bundle)
