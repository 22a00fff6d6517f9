"""Bundles with random weights, as large as real ones: a small encoder, and a streaming recogniser."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sbkit.export import layout
from sbkit.export.layout import Config
from sbkit.export.vocabulary import write_tokens

if TYPE_CHECKING:
    from sbkit.tasks.recognise.acoustic_model import AcousticModel

RATE, FRAME = 16_000, 640
LETTERS = ["<blk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
STREAMING = Path(__file__).resolve().parents[3] / "hparams" / "streaming.yaml"
#: Scores added to those of the blank and of a word's start, so that random weights say about as much as speakers do.
_BLANK, _START = 5.0, 2.0
_FORMATS = (layout.ONNX, layout.INT8)


def feed_forward(folder: Path, width: int, layers: int) -> Path:
    """Make a model with random weights, as large as a small encoder: feed-forward layers over frames of 40 ms."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    values = {"frame": np.array([0, -1, FRAME], dtype=np.int64), "whole": np.array([FRAME], dtype=np.int64),
              "pads": np.array([0, 0, 0, FRAME - 1], dtype=np.int64), "zero": np.array([0], dtype=np.int64),
              "one": np.array([1], dtype=np.int64)}
    nodes = [  # pad to whole frames, and cut into them
        helper.make_node("Pad", ["signals", "pads"], ["padded"]),
        helper.make_node("Shape", ["padded"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["long"]),
        helper.make_node("Div", ["long", "whole"], ["count"]),
        helper.make_node("Mul", ["count", "whole"], ["end"]),
        helper.make_node("Slice", ["padded", "zero", "end", "one"], ["fitting"]),
        helper.make_node("Reshape", ["fitting", "frame"], ["x0"]),
        helper.make_node("Add", ["lengths", "lengths_up"], ["up"]),
        helper.make_node("Div", ["up", "whole"], ["frames"]),
    ]
    values["lengths_up"] = np.array([FRAME - 1], dtype=np.int64)

    def dense(name: str, rows: int, columns: int) -> str:
        values[name] = (rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
        return name

    nodes.append(helper.make_node("MatMul", ["x0", dense("in", FRAME, width)], ["y0"]))
    for i in range(layers):
        nodes += [helper.make_node("MatMul", [f"y{i}", dense(f"a{i}", width, 4 * width)], [f"h{i}"]),
                  helper.make_node("Relu", [f"h{i}"], [f"r{i}"]),
                  helper.make_node("MatMul", [f"r{i}", dense(f"b{i}", 4 * width, width)], [f"o{i}"]),
                  helper.make_node("Add", [f"y{i}", f"o{i}"], [f"y{i + 1}"])]
    nodes += [helper.make_node("MatMul", [f"y{layers}", dense("out", width, len(LETTERS))], ["scores"]),
              helper.make_node("LogSoftmax", ["scores"], ["log_probs"], axis=-1)]
    graph = helper.make_graph(
        nodes, "bench",
        [helper.make_tensor_value_info("signals", TensorProto.FLOAT, ["b", "s"]),
         helper.make_tensor_value_info("lengths", TensorProto.INT64, ["b"])],
        [helper.make_tensor_value_info("log_probs", TensorProto.FLOAT, ["b", "t", len(LETTERS)]),
         helper.make_tensor_value_info("frames", TensorProto.INT64, ["b"])],
        [numpy_helper.from_array(value, name) for name, value in values.items()])
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
              folder / "model.onnx")
    write_tokens(folder / layout.TOKENS, LETTERS, 0)
    return _described(folder, Config(sample_rate=RATE, hop_samples=160, subsampling=4, vocabulary=len(LETTERS),
                                     language="en", models={layout.ONNX: "model.onnx"}))


def streaming(folder: Path) -> Path:
    """Make a recogniser of hparams/streaming.yaml, at its size, with graphs for recordings and for streams."""
    from sbkit.export import graph
    from sbkit.export.exported import INPUTS
    from sbkit.tasks.recognise.graph import OUTPUTS, Graph, trace
    from sbkit.tasks.recognise.streaming_graph import Streams

    with tempfile.TemporaryDirectory() as aside:
        model = _acoustic_model(Path(aside))
    folder.mkdir(parents=True)
    config = Config(sample_rate=RATE, hop_samples=model.hop_samples, subsampling=model.subsampling,
                    vocabulary=len(LETTERS), language="en", models={each: layout.MODELS[each] for each in _FORMATS})
    graph.write_onnx(trace(Graph(model)), folder / layout.MODELS[layout.ONNX], INPUTS, OUTPUTS, {})
    live = Streams(model, layout.OUTPUTS[0])
    graph.write_onnx(live.trace(), folder / layout.STREAMS[layout.ONNX], live.inputs, live.outputs, {})
    for files in (layout.MODELS, layout.STREAMS):
        graph.quantize(folder / files[layout.ONNX], folder / files[layout.INT8])
    live.describe(config, {each: layout.STREAMS[each] for each in _FORMATS})
    write_tokens(folder / layout.TOKENS, LETTERS, 0)
    return _described(folder, config)


def _acoustic_model(folder: Path) -> AcousticModel:
    """Build the model of the recipe as shipped; ``folder`` gets the files that a run would have."""
    import torch

    from sbkit.nn.global_norm import GlobalNorm
    from sbkit.recipe import load
    from sbkit.tasks.recognise.acoustic_model import AcousticModel

    torch.manual_seed(0)
    given = {"output_folder": str(folder), "output_neurons": len(LETTERS)}
    recipe = load.open_recipe(STREAMING, given)
    model = AcousticModel.of(recipe.keys, recipe.hparams["ctc_lin"])
    norm: GlobalNorm = recipe.hparams["normalize"]
    norm.set_statistics(torch.full((80,), -5.0), torch.full((80,), 2.0))
    head = recipe.hparams["ctc_lin"].w
    head.weight.data.normal_(std=1.0)
    head.bias.data.zero_()
    head.bias.data[:2] = torch.tensor([_BLANK, _START])
    for module in recipe.hparams["modules"].values():
        module.eval()
    return model


def without_streams(bundle: Path, folder: Path) -> Path:
    """Copy a bundle without its streaming graph, so that live audio is decoded as the tail of a recording."""
    config = Config.read(bundle)
    left = set(config.streaming.models.values()) if config.streaming else set()
    shutil.copytree(bundle, folder, ignore=lambda _, names: left & set(names))
    config.streaming = None
    config.files = {name: facts for name, facts in config.files.items() if name not in left}
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
    return folder


def _described(folder: Path, config: Config) -> Path:
    config.files = {path.name: layout.fingerprint(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
    return folder
