"""A bundle whose voice plays a tone for each symbol: 80 ms at (300 + 100 id) Hz, and silence for a space."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
from onnx_text import write

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
each = Cast <to = 7> (at_least)
samples = Mul(each, frame)
audio_lengths = Mul(samples, lengths)
longest = ReduceMax <keepdims = 0> (audio_lengths)
at = Range(zero, longest, one)
row = Unsqueeze(at, first)
column = Unsqueeze(samples, last)
beyond = Div(row, column)
shape = Shape(text)
width = Gather(shape, one)
final = Sub(width, one)
which = Min(beyond, final)
ids = GatherElements <axis = 1> (text, which)
above = Mul(ids, step)
hertz = Add(above, lowest)
turns = Mul(hertz, row)
part = Mod(turns, rate)
float = Cast <to = 1> (part)
angle = Mul(float, turn)
tone = Sin(angle)
on = Gather(loud, ids)
sounding = Mul(tone, on)
gain = Gather(gains, speaker)
gain_column = Unsqueeze(gain, last)
endless = Mul(sounding, gain_column)
ends = Unsqueeze(audio_lengths, last)
inside = Less(row, ends)
mask = Cast <to = 1> (inside)
audio = Mul(endless, mask)
symbols = Range(zero, width, one)
symbol_row = Unsqueeze(symbols, first)
length_column = Unsqueeze(lengths, last)
there = Less(symbol_row, length_column)
counted = Cast <to = 7> (there)
each_column = Unsqueeze(each, last)
durations = Mul(counted, each_column)
"""


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
    write(path, "int64[batch, symbols] text, int64[batch] lengths, int64[batch] speaker, float[batch] speed",
          "float[batch, samples] audio, int64[batch] audio_lengths, int64[batch, symbols] durations", _GRAPH,
          zero=0, one=1, rate=rate, lowest=_LOWEST, step=_STEP, frame=FRAME, gains=GAINS, few=1.0,
          loud=[0.0, 0.0, *([1.0] * (len(SYMBOLS) - 2))], frames=float(FRAMES), turn=2 * np.pi / rate, first=[0],
          last=[1])


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
