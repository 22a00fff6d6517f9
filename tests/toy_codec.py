"""A bundle of a codec whose codes are levels: of each frame of 320 samples that of the first and of the one in its
middle, in 50 and in 20 steps from 0 to 1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sbkit.codes import Books
from sbkit.export import layout
from sbkit.export.layout import CodecConfig

RATE = 16_000
STRIDE = 320
SIZES = (50, 20)
HASH = "c0dec" + "0" * 59
BOOKS = Books(SIZES, RATE / STRIDE, RATE, HASH)


def make(folder: Path, graph_sizes: tuple[int, int] = SIZES, highest: float = 1.0, **changes) -> Path:
    """Write the bundle.

    graph_sizes : of the books that the graph really has
    highest : the level at which it clips samples
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_encoder(folder / "model.onnx", graph_sizes, highest)
    write_decoder(folder / "decoder.onnx", graph_sizes)
    options = {"sample_rate": RATE, "codec": HASH, "books": list(SIZES), "stride": STRIDE, "context": 0,
               "models": {"onnx": "model.onnx"}, "decoders": {"onnx": "decoder.onnx"}}
    config = CodecConfig(**(options | changes))
    config.files = {path.name: layout.fingerprint(path) for path in folder.iterdir() if path.name != layout.CONFIG}
    (folder / layout.CONFIG).write_text(config.to_json())
    return folder


def drawn(frames: int, seed: int = 0) -> np.ndarray:
    """Draw codes [T, 2]."""
    return np.random.default_rng(seed).integers(0, SIZES, (frames, 2))


def sound(codes: np.ndarray) -> np.ndarray:
    """The samples [S] that have these codes [T, 2], as the decoder makes them."""
    levels = np.array(codes) / (np.array(SIZES) - 1)
    return np.repeat(levels.reshape(-1), STRIDE // 2).astype(np.float32)


def write_encoder(path: Path, sizes: tuple[int, int], highest: float) -> None:
    from onnx import TensorProto, helper

    half = STRIDE // 2
    constants = {
        "none": np.array([0], np.int64), "half": np.array([half], np.int64), "one": np.array([1], np.int64),
        "far": np.array([np.iinfo(np.int64).max], np.int64), "stride": np.array([STRIDE], np.int64),
        "pads": np.array([0, 0, 0, half], np.int64), "last": np.array([-1], np.int64),
        "low": np.array(0, np.float32), "high": np.array(highest, np.float32), "less": np.array([STRIDE - 1], np.int64),
        "steps": np.array(sizes, np.float32) - 1,
    }
    node = helper.make_node
    nodes = [
        node("Slice", ["signals", "none", "far", "one", "stride"], ["first"]),
        node("Pad", ["signals", "pads"], ["padded"]),
        node("Slice", ["padded", "half", "far", "one", "stride"], ["middle"]),
        node("Unsqueeze", ["first", "last"], ["one_of"]), node("Unsqueeze", ["middle", "last"], ["other_of"]),
        node("Concat", ["one_of", "other_of"], ["both"], axis=2), node("Clip", ["both", "low", "high"], ["inside"]),
        node("Mul", ["inside", "steps"], ["places"]), node("Round", ["places"], ["rounded"]),
        node("Cast", ["rounded"], ["codes"], to=TensorProto.INT64),
        node("Add", ["lengths", "less"], ["more"]), node("Div", ["more", "stride"], ["frames"]),
    ]
    value = helper.make_tensor_value_info
    _save(path, nodes, constants, [
        value("signals", TensorProto.FLOAT, ["batch", "samples"]), value("lengths", TensorProto.INT64, ["batch"]),
    ], [value("codes", TensorProto.INT64, ["batch", "t", 2]), value("frames", TensorProto.INT64, ["batch"])])


def write_decoder(path: Path, sizes: tuple[int, int]) -> None:
    from onnx import TensorProto, helper

    constants = {
        "steps": np.array(sizes, np.float32) - 1, "last": np.array([-1], np.int64),
        "ones": np.ones(STRIDE // 2, np.float32), "flat": np.array([0, -1], np.int64),
        "stride": np.array([STRIDE], np.int64),
    }
    node = helper.make_node
    nodes = [
        node("Cast", ["codes"], ["numbers"], to=TensorProto.FLOAT), node("Div", ["numbers", "steps"], ["levels"]),
        node("Unsqueeze", ["levels", "last"], ["column"]), node("Mul", ["column", "ones"], ["held"]),
        node("Reshape", ["held", "flat"], ["signals"]), node("Mul", ["frames", "stride"], ["lengths"]),
    ]
    value = helper.make_tensor_value_info
    _save(path, nodes, constants, [
        value("codes", TensorProto.INT64, ["batch", "t", 2]), value("frames", TensorProto.INT64, ["batch"]),
    ], [value("signals", TensorProto.FLOAT, ["batch", "samples"]), value("lengths", TensorProto.INT64, ["batch"])])


def _save(path: Path, nodes, constants, inputs, outputs) -> None:
    import onnx
    from onnx import helper, numpy_helper

    graph = helper.make_graph(nodes, "levels", inputs, outputs,
                              [numpy_helper.from_array(constant, name) for name, constant in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
