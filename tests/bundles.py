"""A bundle whose model says what a signal's level spells: each frame of 40 ms at level k/50 is the token k."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sbkit.export import layout
from sbkit.export.layout import Config
from sbkit.export.vocabulary import write_tokens

PIECES = ["<blk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
FRAME = 640
RATE = 16_000
LEVELS = 50.0


def spell(text: str, hold: int = 2) -> list[int]:
    """Frames of a text: each character for ``hold`` frames, a blank between, a space before each word."""
    ids = []
    for word in text.split():
        for character in "▁" + word:
            ids += [PIECES.index(character)] * hold + [0]
    return ids


def say(text: str, hold: int = 2) -> np.ndarray:
    """The signal that spells a text [S]."""
    return voiced(spell(text, hold))


def voiced(ids: list[int]) -> np.ndarray:
    """The signal [S] of labels by frame; a frame's level is read at its beginning."""
    return np.repeat(np.array(ids, dtype=np.float32) / LEVELS, FRAME)


def make(folder: Path, width: int | None = None, torch_too: bool = False, **changes) -> Path:
    """Write the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(folder / "model.onnx", width or len(PIECES))
    write_tokens(folder / layout.TOKENS, PIECES, 0)
    options = {"sample_rate": RATE, "hop_samples": 160, "subsampling": 4, "vocabulary": len(PIECES), "language": "en",
               "silent_ids": [1, 2], "chunk_seconds": 20.0, "models": {"onnx": "model.onnx"}}
    config = Config(**(options | changes))
    if torch_too:
        write_torch(folder / "model.pt2")
        config.models["torch"] = "model.pt2"
    config.files = {path.name: layout.fingerprint(path) for path in folder.iterdir() if path.name != layout.CONFIG}
    (folder / layout.CONFIG).write_text(config.to_json())
    return folder


def write_onnx(path: Path, width: int) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    constants = {
        "pads": np.array([0, 0, 0, FRAME], dtype=np.int64), "zero": np.array([0], dtype=np.int64),
        "one": np.array([1], dtype=np.int64), "frame": np.array([FRAME], dtype=np.int64),
        "far": np.array([np.iinfo(np.int64).max], dtype=np.int64), "last": np.array([-1], dtype=np.int64),
        "levels": np.array(LEVELS, dtype=np.float32), "tokens": np.arange(width, dtype=np.float32),
        "sharp": np.array(-20.0, dtype=np.float32),
    }
    nodes = [
        helper.make_node("Pad", ["signals", "pads"], ["padded"]),
        helper.make_node("Slice", ["padded", "zero", "far", "one", "frame"], ["every"]),
        helper.make_node("Mul", ["every", "levels"], ["loud"]),
        helper.make_node("Unsqueeze", ["loud", "last"], ["column"]),
        helper.make_node("Sub", ["column", "tokens"], ["off"]),
        helper.make_node("Mul", ["off", "off"], ["square"]),
        helper.make_node("Mul", ["square", "sharp"], ["scores"]),
        helper.make_node("LogSoftmax", ["scores"], ["log_probs"], axis=-1),
        helper.make_node("Div", ["lengths", "frame"], ["whole"]),
        helper.make_node("Add", ["whole", "one"], ["frames"]),
    ]
    graph = helper.make_graph(
        nodes, "level", [
            helper.make_tensor_value_info("signals", TensorProto.FLOAT, ["batch", "samples"]),
            helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]),
        ], [
            helper.make_tensor_value_info("log_probs", TensorProto.FLOAT, ["batch", "t", width]),
            helper.make_tensor_value_info("frames", TensorProto.INT64, ["batch"]),
        ], [numpy_helper.from_array(value, name) for name, value in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def write_torch(path: Path) -> None:
    import torch

    from sbkit.export import graph

    class Level(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("tokens", torch.arange(len(PIECES)).float())

        def forward(self, signals, lengths):
            every = torch.nn.functional.pad(signals, (0, FRAME))[:, ::FRAME]
            inside = torch.arange(every.shape[1], device=signals.device) < lengths[:, None] // FRAME + 1
            scores = -20.0 * (every.masked_fill(~inside, 0.0)[..., None] * LEVELS - self.tokens).square()
            return scores.log_softmax(-1), lengths // FRAME + 1

    example = (torch.rand(2, 4 * FRAME), torch.tensor([4 * FRAME, FRAME]))
    program = graph.trace_module(Level(), example, {"signals": (0, 1), "lengths": (0,)})
    graph.write_torch(program, path)
