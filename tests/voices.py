"""A bundle whose voice plays a tone for each symbol: 80 ms at (300 + 100 id) Hz, and silence for a space."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import numpy as np

from sbkit.export import layout
from sbkit.export.layout import VoiceConfig

SYMBOLS = ["<pad>", " ", *"abcdefghijklmnopqrstuvwxyz", *".,!?'"]
SPEAKERS = ["anna", "ben"]
GAINS = (0.5, 0.25)
RATE = 16_000
FRAME = 320
FRAMES = 4
SYMBOL_SECONDS = FRAMES * FRAME / RATE
_LOWEST, _STEP = 300, 100
_SLOWEST = 0.25
_HOPS = 4  # of what listens, in a frame
_GRAPH = """
long = Div(frames, speed)
rounded = Round(long)
at_least = Max(rounded, few)
each = Cast(at_least)
samples = Mul(each, frame)
audio_lengths = Mul(samples, lengths)
longest = ReduceMax(audio_lengths)
at = Range(zero, longest, one)
row = Unsqueeze(at, first)
column = Unsqueeze(samples, last)
beyond = Div(row, column)
shape = Shape(text)
width = Gather(shape, one)
final = Sub(width, one)
which = Min(beyond, final)
ids = GatherElements(text, which)
above = Mul(ids, step)
hertz = Add(above, lowest)
turns = Mul(hertz, row)
part = Mod(turns, rate)
float = Cast(part)
angle = Mul(float, turn)
tone = Sin(angle)
on = Gather(loud, ids)
sounding = Mul(tone, on)
gain = Gather(gains, speaker)
gain_column = Unsqueeze(gain, last)
endless = Mul(sounding, gain_column)
ends = Unsqueeze(audio_lengths, last)
inside = Less(row, ends)
mask = Cast(inside)
audio = Mul(endless, mask)
symbols = Range(zero, width, one)
symbol_row = Unsqueeze(symbols, first)
length_column = Unsqueeze(lengths, last)
there = Less(symbol_row, length_column)
counted = Cast(there)
each_column = Unsqueeze(each, last)
durations = Mul(counted, each_column)
"""
_FLOAT, _INT64 = {"to": 1}, {"to": 7}
_OPTIONS = {"each": _INT64, "float": _FLOAT, "mask": _FLOAT, "counted": _INT64, "longest": {"keepdims": 0},
            "ids": {"axis": 1}}


def make(folder: Path, torch_too: bool = False, rate: int = RATE, **changes) -> Path:
    """Write the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(folder / "model.onnx", rate)
    options = {"sample_rate": rate, "language": "en", "symbols": SYMBOLS, "speakers": SPEAKERS, "max_symbols": 60,
               "frame_seconds": FRAME / rate, "models": {"onnx": "model.onnx"}}
    config = VoiceConfig(**(options | changes))
    if torch_too:
        write_torch(folder / "model.pt2", rate)
        config.models["torch"] = "model.pt2"
    config.files = {path.name: layout.fingerprint(path) for path in folder.iterdir() if path.name != layout.CONFIG}
    (folder / layout.CONFIG).write_text(config.to_json())
    return folder


def heard(samples: np.ndarray, speed: float = 1.0, rate: int = RATE) -> str:
    """The text that samples [S] are the tones of; silence of any length is one space."""
    hop = rate * FRAME // RATE // _HOPS
    windows = np.lib.stride_tricks.sliding_window_view(samples, 2 * hop)[::hop]
    peaks = np.abs(np.fft.rfft(windows * np.hanning(2 * hop), 16 * hop))
    pitch = peaks.argmax(axis=1) * rate / (16 * hop)
    power = np.square(windows).mean(axis=1)
    ids = np.round((pitch - _LOWEST) / _STEP).astype(int).clip(2, len(SYMBOLS) - 1)
    ids[power < power.max() / 2] = 1  # less than half of a window sounds
    text = ""
    for index, run in groupby(ids):
        count = round(len(list(run)) / (_HOPS * round(FRAMES / speed)))
        text += SYMBOLS[index] * count if index > 1 else " "
    return " ".join(text.split())


def write_onnx(path: Path, rate: int) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    loud = np.array([0.0, 0.0, *([1.0] * (len(SYMBOLS) - 2))], dtype=np.float32)
    whole = {"zero": 0, "one": 1, "rate": rate, "lowest": _LOWEST, "step": _STEP, "frame": FRAME}
    constants = {name: np.array(value, dtype=np.int64) for name, value in whole.items()}
    constants |= {"loud": loud, "gains": np.array(GAINS, dtype=np.float32), "few": np.array(1.0, dtype=np.float32),
                  "frames": np.array(FRAMES, dtype=np.float32), "turn": np.array(2 * np.pi / rate, dtype=np.float32),
                  "first": np.array([0], dtype=np.int64), "last": np.array([1], dtype=np.int64)}
    nodes = [helper.make_node(kind, parts, [name], **_OPTIONS.get(name, {}))
             for name, kind, *parts in (re.findall(r"\w+", line) for line in _GRAPH.split("\n") if line)]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "tones", [
        info("text", TensorProto.INT64, ["batch", "symbols"]), info("lengths", TensorProto.INT64, ["batch"]),
        info("speaker", TensorProto.INT64, ["batch"]), info("speed", TensorProto.FLOAT, ["batch"]),
    ], [
        info("audio", TensorProto.FLOAT, ["batch", "samples"]), info("audio_lengths", TensorProto.INT64, ["batch"]),
        info("durations", TensorProto.INT64, ["batch", "symbols"]),
    ], [numpy_helper.from_array(value, name) for name, value in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def write_torch(path: Path, rate: int) -> None:
    import torch

    from sbkit.export import graph

    class Tones(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("gains", torch.tensor(GAINS))

        def forward(self, text, lengths, speaker, speed):
            each = (FRAMES / speed).round().clamp(min=1).long()
            at = torch.arange(text.shape[1] * round(FRAMES / _SLOWEST) * FRAME, device=text.device)
            which = (at[None] // (each * FRAME)[:, None]).clamp(max=text.shape[1] - 1)
            ids = text.gather(1, which)
            tone = torch.sin(2 * np.pi / rate * ((_LOWEST + _STEP * ids) * at % rate).float())
            inside = (ids > 1) & (at < (lengths * each * FRAME)[:, None])
            there = torch.arange(text.shape[1], device=text.device) < lengths[:, None]
            return tone * inside * self.gains[speaker][:, None], lengths * each * FRAME, there * each[:, None]

    example = (torch.ones(2, 7, dtype=torch.long), torch.tensor([7, 3]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    dynamic = {"text": (0, 1), "lengths": (0,), "speaker": (0,), "speed": (0,)}
    graph.write_torch(graph.trace_module(Tones(), example, dynamic), path)
