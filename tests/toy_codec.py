"""A bundle of a codec whose codes are levels: of each frame of 320 samples that of the first and of the one in its
middle, in 50 and in 20 steps from 0 to 1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx_text import FAR, write

from sbkit.codes import Books
from sbkit.export import layout
from sbkit.export.layout import CodecConfig

RATE = 16_000
STRIDE = 320
SIZES = (50, 20)
HASH = "c0dec" + "0" * 59
SIGNALS = "float[batch, samples] signals, int64[batch] lengths"
CODES = "int64[batch, t, 2] codes, int64[batch] frames"
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
    half = STRIDE // 2
    write(path, SIGNALS, CODES, """
        first = Slice(signals, none, far, one, stride)
        padded = Pad(signals, pads)
        middle = Slice(padded, half, far, one, stride)
        one_of = Unsqueeze(first, last)
        other_of = Unsqueeze(middle, last)
        both = Concat <axis = 2> (one_of, other_of)
        inside = Clip(both, low, high)
        places = Mul(inside, steps)
        rounded = Round(places)
        codes = Cast <to = 7> (rounded)
        more = Add(lengths, less)
        frames = Div(more, stride)
        """, none=[0], half=[half], one=[1], far=FAR, stride=[STRIDE], pads=[0, 0, 0, half], last=[-1], low=0.0,
          high=float(highest), less=[STRIDE - 1], steps=np.array(sizes) - 1.0)


def write_decoder(path: Path, sizes: tuple[int, int]) -> None:
    write(path, CODES, SIGNALS, """
        numbers = Cast <to = 1> (codes)
        levels = Div(numbers, steps)
        column = Unsqueeze(levels, last)
        held = Mul(column, ones)
        signals = Reshape(held, flat)
        lengths = Mul(frames, stride)
        """, steps=np.array(sizes) - 1.0, last=[-1], ones=np.ones(STRIDE // 2), flat=[0, -1], stride=[STRIDE])
