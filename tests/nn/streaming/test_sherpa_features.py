"""What sherpa-onnx's OnlineRecognizer feeds a model of its kind nemo_ctc, against the features of our recipe.

The model here is a probe: it spells out its input, three digits for each number, in the tokens that it outputs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

from sbkit.recipe import load

BANDS, DIGITS, BASE = 80, 3, 256
OFFSET, SCALE = 32.0, 2.0 ** 18  # a number x is written as (x + OFFSET) * SCALE, a whole number of 24 bits
RECIPE = Path(__file__).parents[3] / "hparams" / "streaming.yaml"


def probe(path, window):
    """Write a model whose tokens are the digits of its features, doubled, plus 1 at every other place."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto as Type
    from onnx import helper, numpy_helper

    constants = {
        "offset": np.float64(OFFSET), "scale": np.float64(SCALE), "base": np.int64(BASE), "two": np.int64(2),
        "powers": BASE ** np.arange(DIGITS - 1, -1, -1), "ids": np.arange(2 * BASE + 1), "last": np.array([-1]),
        "rows": np.array([0, -1]), "zero": np.int64(0), "one": np.int64(1), "height": np.float32(100),
        "longer": np.int64(BANDS * DIGITS)}
    caches = {name: [1, 1, 1] for name in ("cache_last_channel", "cache_last_time")} | {"cache_last_channel_len": []}
    steps = [
        ("Transpose", "audio_signal", "frames", {"perm": [0, 2, 1]}), ("Cast", "frames", "wide", {"to": Type.DOUBLE}),
        ("Add", "wide offset", "positive"), ("Mul", "positive scale", "large"), ("Round", "large", "rounded"),
        ("Cast", "rounded", "whole", {"to": Type.INT64}), ("Unsqueeze", "whole last", "apart"),
        ("Div", "apart powers", "shifted"), ("Mod", "shifted base", "digits"), ("Reshape", "digits rows", "row"),
        ("Shape", "row", "shape"), ("Gather", "shape one", "count"), ("Range", "zero count one", "places"),
        ("Mod", "places two", "odd"), ("Mul", "row two", "doubled"), ("Add", "doubled odd", "tokens"),
        ("Unsqueeze", "tokens last", "column"), ("Equal", "column ids", "chosen"),
        ("Cast", "chosen", "one_hot", {"to": Type.FLOAT}), ("Mul", "one_hot height", "logits"),
        ("Mul", "length longer", "lengths"), *(("Identity", name, f"{name}_next") for name in caches)]

    def described(name, shape, kind=Type.FLOAT):
        return helper.make_tensor_value_info(name, kind, ["B", *shape])

    kinds = {name: Type.FLOAT if shape else Type.INT64 for name, shape in caches.items()}
    graph = helper.make_graph(
        [helper.make_node(kind, takes.split(), [gives], **(more[0] if more else {})) for kind, takes, gives, *more
         in steps], "probe",
        [described("audio_signal", [BANDS, "T"]), described("length", [], Type.INT64),
         *(described(name, shape, kinds[name]) for name, shape in caches.items())],
        [described("logits", ["U", 2 * BASE + 1]), described("lengths", [], Type.INT64),
         *(described(f"{name}_next", shape, kinds[name]) for name, shape in caches.items())],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    dims = {f"{name}_dim{i}": "1" for name in ("cache_last_channel", "cache_last_time") for i in (1, 2, 3)}
    helper.set_model_props(model, {"window_size": str(window), "chunk_shift": str(window), "subsampling_factor": "4",
                                   "vocab_size": str(2 * BASE), **dims})
    onnx.save(model, path)


def result_of(sherpa_onnx, folder, signal, window):
    """Return the features [T, F] that the probe was given for a waveform."""
    probe(folder / "probe.onnx", window)
    names = [f"t{i}" for i in range(2 * BASE)] + ["<blk>"]
    (folder / "tokens.txt").write_text("".join(f"{name} {i}\n" for i, name in enumerate(names)))
    recognizer = sherpa_onnx.OnlineRecognizer.from_nemo_ctc(
        model=str(folder / "probe.onnx"), tokens=str(folder / "tokens.txt"), num_threads=1)
    stream = recognizer.create_stream()
    stream.accept_waveform(16_000, signal.numpy())
    stream.input_finished()
    while recognizer.is_ready(stream):
        recognizer.decode_stream(stream)
    digits = np.array([int(token[1:]) // 2 for token in recognizer.get_result_all(stream).tokens])
    whole = digits.reshape(-1, BANDS, DIGITS) @ BASE ** np.arange(DIGITS - 1, -1, -1)
    return torch.from_numpy(whole / SCALE - OFFSET).float()


def wave(samples):
    """Noise of changing loudness around a level that isn't zero."""
    loud = 1.1 + torch.sin(torch.arange(samples) * 0.0012)
    return (0.1 * loud * torch.randn(samples, generator=torch.Generator().manual_seed(0)) + 0.05).clamp(-1, 1)


@pytest.mark.parametrize(("samples", "window"), [(16_000, 8), (1_680, 1)])
def test_they_are_what_sherpa_onnx_feeds_a_streaming_model(tmp_path, samples, window):
    """It gives a model no last window that isn't followed by a frame, so the end of a stream must be padded; the
    shorter waveform is mirrored in the last frame but one."""
    sherpa_onnx = pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed")
    if Version(sherpa_onnx.__version__) < Version("2.0.1"):
        pytest.skip("before 2.0.1, sherpa-onnx fed this kind of model Kaldi's own features")
    signal = wave(samples)
    found = result_of(sherpa_onnx, tmp_path, signal, window)
    features = load.load(RECIPE, {"output_folder": str(tmp_path)})["compute_features"]
    expected = features(signal[None])[0]
    assert len(found) == (len(expected) - 1) // window * window
    torch.testing.assert_close(found, expected[:len(found)], rtol=1e-4, atol=1e-4)
