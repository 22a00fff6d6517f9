"""A bundle whose model says what a signal's level spells: each frame of 40 ms at level k/50 is the token k.

Its streaming graph says each frame's token one frame later, so that what it says first of a chunk comes from its
state.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from onnx_text import FAR, write

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


def change(folder: Path, **changes) -> Path:
    """Change values of a bundle's config.json."""
    path = folder / layout.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


_SCORES = """
    column = Unsqueeze(loud, last)
    off = Sub(column, tokens)
    square = Mul(off, off)
    sharpened = Mul(square, sharp)
    scores = LogSoftmax <axis = -1> (sharpened)
"""


def write_onnx(path: Path, width: int, scores: str = "log_probs") -> None:
    write(path, "float[batch, samples] signals, int64[batch] lengths",
          f"float[batch, t, {width}] {scores}, int64[batch] frames", """
        padded = Pad(signals, pads)
        every = Slice(padded, zero, far, one, frame)
        loud = Mul(every, levels)
        """ + _SCORES.replace("scores =", f"{scores} =") + """
        whole = Div(lengths, frame)
        frames = Add(whole, one)
        """, pads=[0, 0, 0, FRAME], zero=[0], one=[1], frame=[FRAME], far=FAR, last=[-1], levels=LEVELS,
          tokens=np.arange(float(width)), sharp=-20.0)


def write_stream_onnx(path: Path, scores: str = "log_probs") -> None:
    write(path, "float[batch, samples] samples, int64[batch] frames, float[batch, 1] level, int64[batch] seen",
          f"float[batch, chunk, {len(PIECES)}] {scores}, int64[batch] counts, float[batch, 1] next_level, "
          "int64[batch] next_seen", """
        every = Slice(samples, begin, end, one, frame)
        line = Concat <axis = 1> (level, every)
        late = Slice(line, zero, last, one, one)
        newest = Slice(line, last, far, one, one)
        loud = Mul(late, levels)
        """ + _SCORES.replace("scores =", f"{scores} =") + """
        more = Add(frames, three)
        counts = Div(more, four)
        moves = Greater(frames, none)
        rows = Unsqueeze(moves, last)
        next_level = Where(rows, newest, level)
        next_seen = Add(seen, counts)
        """, begin=[BEFORE], end=[BEFORE - OVERLAP], one=[1], frame=[FRAME], last=[-1], far=FAR, zero=[0], none=0,
          three=3, four=4, levels=LEVELS, tokens=np.arange(float(len(PIECES))), sharp=-20.0)


def _write_prediction(path: Path) -> None:
    write(path, "int64[rows, 2] tokens", f"float[rows, {len(PIECES)}] predicted", """
        spoken = Gather <axis = 1> (tokens, last)
        predicted = Gather(table, spoken)
        """, last=-1, table=np.diag(np.full(len(PIECES), -100.0)))


def _write_joiner(path: Path) -> None:
    """Of all that is unlikely, the blank is the likeliest."""
    row = f"float[rows, {len(PIECES)}]"
    write(path, f"{row} encoded, {row} predicted", f"{row} scores", """
        likely = Max(encoded, least)
        scores = Add(likely, predicted)
        """, least=[-8.0] + [-15.0] * (len(PIECES) - 1))


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
