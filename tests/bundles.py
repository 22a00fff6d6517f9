"""A bundle whose model says what a signal's level spells: each frame of 40 ms at level k/50 is the token k.

Its graph for streams says each frame's token one frame later, so that what it says first of a chunk comes from its
state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sbkit.export import layout
from sbkit.export.layout import Config, Streaming
from sbkit.export.vocabulary import write_tokens

PIECES = ["<blk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
FRAME = 640
RATE = 16_000
LEVELS = 50.0
OVERLAP, BEFORE = 240, 120  # as those of Kaldi's frames of 25 ms


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


def make_transducer(folder: Path, streams: bool = True) -> Path:
    """Write the same model as a transducer, whose states are the scores: none says the last token again."""
    from sbkit.export.layout import JOINER, PREDICTION, TransducerConfig

    folder.mkdir(parents=True, exist_ok=True)
    _write_prediction(folder / PREDICTION)
    _write_joiner(folder / JOINER)
    return make(folder, streams=streams, kind=TransducerConfig, scores="states", joint_size=len(PIECES), context=2,
                decoder=PREDICTION, joiner=JOINER)


def make(folder: Path, width: int | None = None, torch_too: bool = False, streams: bool = False,
         kind: type[Config] = Config, scores: str = "log_probs", **changes) -> Path:
    """Write the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(folder / "model.onnx", width or len(PIECES), scores)
    write_tokens(folder / layout.TOKENS, PIECES, 0)
    options = {"sample_rate": RATE, "hop_samples": 160, "subsampling": 4, "vocabulary": len(PIECES), "language": "en",
               "silent_ids": [1, 2], "chunk_seconds": 20.0, "models": {"onnx": "model.onnx"}}
    config = kind(**(options | changes))
    if torch_too:
        write_torch(folder / "model.pt2")
        config.models["torch"] = "model.pt2"
    if streams:
        write_stream_onnx(folder / "stream.onnx", scores)
        config.streaming = Streaming(
            chunks=[4, 8, 16], left=1, overlap=OVERLAP, before=BEFORE, after=80 + OVERLAP - BEFORE,
            state={"level": {"type": "float32", "shape": [1]}, "seen": {"type": "int64", "shape": []}},
            models={"onnx": "stream.onnx"})
        if torch_too:
            write_stream_torch(folder / "stream.pt2")
            config.streaming.models["torch"] = "stream.pt2"
    config.files = {path.name: layout.fingerprint(path) for path in folder.iterdir() if path.name != layout.CONFIG}
    (folder / layout.CONFIG).write_text(config.to_json())
    return folder


def write_onnx(path: Path, width: int, scores: str = "log_probs") -> None:
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
        helper.make_node("Mul", ["square", "sharp"], ["sharpened"]),
        helper.make_node("LogSoftmax", ["sharpened"], [scores], axis=-1),
        helper.make_node("Div", ["lengths", "frame"], ["whole"]),
        helper.make_node("Add", ["whole", "one"], ["frames"]),
    ]
    graph = helper.make_graph(
        nodes, "level", [
            helper.make_tensor_value_info("signals", TensorProto.FLOAT, ["batch", "samples"]),
            helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]),
        ], [
            helper.make_tensor_value_info(scores, TensorProto.FLOAT, ["batch", "t", width]),
            helper.make_tensor_value_info("frames", TensorProto.INT64, ["batch"]),
        ], [numpy_helper.from_array(value, name) for name, value in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def write_stream_onnx(path: Path, scores: str = "log_probs") -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    constants = {
        "begin": np.array([BEFORE], np.int64), "end": np.array([BEFORE - OVERLAP], np.int64),
        "one": np.array([1], np.int64), "frame": np.array([FRAME], np.int64), "minus": np.array([-1], np.int64),
        "far": np.array([np.iinfo(np.int64).max], np.int64), "zero": np.array([0], np.int64),
        "none": np.array(0, np.int64), "three": np.array(3, np.int64), "four": np.array(4, np.int64),
        "levels": np.array(LEVELS, np.float32), "tokens": np.arange(len(PIECES), dtype=np.float32),
        "sharp": np.array(-20.0, np.float32),
    }
    node = helper.make_node
    nodes = [
        node("Slice", ["samples", "begin", "end", "one", "frame"], ["every"]),
        node("Concat", ["level", "every"], ["line"], axis=1),
        node("Slice", ["line", "zero", "minus", "one", "one"], ["late"]),
        node("Slice", ["line", "minus", "far", "one", "one"], ["last"]),
        node("Mul", ["late", "levels"], ["loud"]), node("Unsqueeze", ["loud", "minus"], ["column"]),
        node("Sub", ["column", "tokens"], ["off"]), node("Mul", ["off", "off"], ["square"]),
        node("Mul", ["square", "sharp"], ["sharpened"]), node("LogSoftmax", ["sharpened"], [scores], axis=-1),
        node("Add", ["frames", "three"], ["more"]), node("Div", ["more", "four"], ["counts"]),
        node("Greater", ["frames", "none"], ["moves"]), node("Unsqueeze", ["moves", "minus"], ["rows"]),
        node("Where", ["rows", "last", "level"], ["next_level"]), node("Add", ["seen", "counts"], ["next_seen"]),
    ]
    value, number, real = helper.make_tensor_value_info, TensorProto.INT64, TensorProto.FLOAT
    graph = helper.make_graph(nodes, "late", [
        value("samples", real, ["batch", "samples"]), value("frames", number, ["batch"]),
        value("level", real, ["batch", 1]), value("seen", number, ["batch"]),
    ], [
        value(scores, real, ["batch", "chunk", len(PIECES)]), value("counts", number, ["batch"]),
        value("next_level", real, ["batch", 1]), value("next_seen", number, ["batch"]),
    ], [numpy_helper.from_array(constant, name) for name, constant in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _write_prediction(path: Path) -> None:
    from onnx import TensorProto, helper

    table = np.diag(np.full(len(PIECES), -100.0, np.float32))
    nodes = [helper.make_node("Gather", ["tokens", "last"], ["spoken"], axis=1),
             helper.make_node("Gather", ["table", "spoken"], ["predicted"])]
    _save(path, nodes, {"last": np.array(-1, np.int64), "table": table},
          [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["rows", 2])], "predicted")


def _write_joiner(path: Path) -> None:
    """Of all that is unlikely, the blank is the likeliest."""
    from onnx import TensorProto, helper

    least = np.full(len(PIECES), -15.0, np.float32)
    least[0] = -8.0
    nodes = [helper.make_node("Max", ["encoded", "least"], ["likely"]),
             helper.make_node("Add", ["likely", "predicted"], ["scores"])]
    _save(path, nodes, {"least": least},
          [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", len(PIECES)])
           for name in ("encoded", "predicted")], "scores")


def _save(path: Path, nodes: list, constants: dict[str, np.ndarray], inputs: list, output: str) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["rows", len(PIECES)])]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs,
                              [numpy_helper.from_array(value, name) for name, value in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def write_stream_torch(path: Path) -> None:
    import torch

    from sbkit.export import graph

    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("tokens", torch.arange(len(PIECES)).float())

        def forward(self, samples, frames, level, seen):
            line = torch.cat([level, samples[:, BEFORE:BEFORE - OVERLAP:FRAME]], 1)
            scores = -20.0 * (line[:, :-1, None] * LEVELS - self.tokens).square()
            counts = torch.div(frames + 3, 4, rounding_mode="floor")
            return (scores.log_softmax(-1), counts, torch.where(frames[:, None] > 0, line[:, -1:], level),
                    seen + counts)

    example = (torch.rand(2, 4 * FRAME + OVERLAP), torch.tensor([16, 15]), torch.rand(2, 1), torch.tensor([0, 3]))
    program = graph.trace_module(Late(), example, {"samples": (0, 1), "frames": (0,), "level": (0,), "seen": (0,)})
    graph.write_torch(program, path)


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
