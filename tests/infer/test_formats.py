"""Which format of a bundle is run: a program of torch, which can run code, is opened only by its name."""

import json

import bundles
import onnx
import onnxruntime
import pytest
import soundfile
import toy_codec
import voices
from refusals import refused

import sbkit.infer
from sbkit import cli
from sbkit.export import layout
from sbkit.infer import StreamEngine, formats


def of_torch_alone(folder):
    """The same bundle, with a program of torch as its only model; it must not be opened, so it is empty."""
    values = json.loads((folder / layout.CONFIG).read_text())
    values["models"] = {"torch": "model.pt2"}
    if "decoders" in values:
        values["decoders"] = {"torch": "decoder.pt2"}
    if "streaming" in values:
        values["streaming"]["models"] = {"torch": "stream.pt2"}
    for file in ("model.pt2", "decoder.pt2", "stream.pt2"):
        (folder / file).write_bytes(b"not to be opened")
    (folder / layout.CONFIG).write_text(json.dumps(values))
    return folder


@pytest.fixture
def made(tmp_path):
    return {"recogniser": of_torch_alone(bundles.make(tmp_path / "recogniser", streams=True)),
            "voice": of_torch_alone(voices.make(tmp_path / "voice")),
            "codec": of_torch_alone(toy_codec.make(tmp_path / "codec"))}


@pytest.mark.parametrize("kind", ["recogniser", "voice", "codec"])
def test_auto_never_opens_a_torch_program(made, kind):
    with refused("torch-only-bundle") as error:
        sbkit.infer.load(made[kind], device="cpu")
    assert error.value.hint == "if you trust its author, choose it: --model torch, or model='torch' in Python"
    with refused("damaged-bundle"):
        sbkit.infer.load(made[kind], device="cpu", model="torch")


def test_auto_never_opens_a_torch_program_for_streams(made):
    with refused("torch-only-bundle"):
        StreamEngine(made["recogniser"], device="cpu")


@pytest.mark.parametrize("command", [
    ["transcribe", "recogniser", "a.wav"], ["listen", "recogniser", "-"], ["serve", "recogniser", "--port", "0"],
    ["speak", "voice", "ab", "--to", "said.wav"],
])
def test_no_command_opens_a_torch_program_by_default(made, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    soundfile.write("a.wav", bundles.say("ab"), bundles.RATE)
    assert cli.main(command) == 2
    assert "[torch-only-bundle]" in capsys.readouterr().err


def test_a_torch_program_does_not_replace_a_missing_onnx_runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(formats.util, "find_spec", lambda name: name != "onnxruntime" or None)
    with refused("missing-package"):
        formats.choose(tmp_path, {"torch": "model.pt2", "onnx": "model.onnx"}, formats.AUTO)
    assert formats.choose(tmp_path, {"torch": "model.pt2", "onnx": "model.onnx"}, "torch") == "torch"


def of_another_model(bundle, model: bytes):
    """Put it in the bundle, whose config.json then says nothing of the model's size."""
    (bundle / "model.onnx").write_bytes(model)
    bundles.change(bundle, files={})


@pytest.mark.parametrize("version, code, length", [
    (onnxruntime.__version__, "damaged-bundle", b"\x08"),
    ("1.23.2", "wrong-version", b"\x08"),
    ("1.23.2", "wrong-version", b"\x88\x00")])  # protobuf takes that as 8, too
@pytest.mark.parametrize("named", ["../secret", "link"])
def test_external_weights_outside_the_folder_are_refused(tmp_path, monkeypatch, version, code, named, length):
    """ONNX Runtime refuses it since 1.24; earlier ones would read the file, so such a model isn't given to them."""
    bundle = bundles.make(tmp_path / "bundle")
    (tmp_path / "secret").write_bytes(bytes(4096))
    (bundle / "link").symlink_to(tmp_path / "secret")
    model = onnx.load(bundle / "model.onnx")
    weights = next(each for each in model.graph.initializer if each.name == "tokens")
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=named)
    of_another_model(bundle, model.SerializeToString().replace(b"\x08location", length + b"location"))
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with refused(code, wording=False):  # it has the words of ONNX Runtime
        sbkit.infer.load(bundle, device="cpu")


def test_a_node_named_location_is_not_taken_for_external_weights(tmp_path, monkeypatch):
    bundle = bundles.make(tmp_path / "bundle")
    model = onnx.load(bundle / "model.onnx")
    model.graph.node[0].name = "a location"
    of_another_model(bundle, model.SerializeToString())
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    with sbkit.infer.load(bundle, device="cpu"):
        pass
