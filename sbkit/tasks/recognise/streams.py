"""The streaming graph of a recogniser in its bundle: its description, and its comparison chunk by chunk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.clips import ComparisonClips
from sbkit.export.companion import Companion, OwnBundle
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison
from sbkit.export.runners import Call, Runner, open_runner
from sbkit.export.windows import Window, Windows
from sbkit.nn.chunks import ChunkConfig
from sbkit.nn.streaming.layers import encode_in_chunks
from sbkit.tasks.recognise import streaming_graph
from sbkit.tasks.recognise.graph import reference
from sbkit.tasks.recognise.recognizer import Recognizer

_EMPTY = Window(np.zeros(0, np.float32), 0)


#: Builds the comparison of a bundle's model with a function on clips.
Compare = Callable[[ComparisonClips, OwnBundle, Path, Callable[[np.ndarray], np.ndarray]], Comparison]


class Streams(Companion):
    """A recogniser's streaming graph; it is compared with whole utterances in chunks of each size.

    Raises if the recogniser can't run on a stream. ``scores`` is the name of the graph's first output.
    """

    name, files = "stream", layout.STREAMS
    inputs = streaming_graph.INPUTS

    def __init__(self, recognizer: Recognizer, scores: str, compare: Compare | None = None):
        self.recognizer, self.compare = recognizer, compare
        self.outputs = streaming_graph.outputs(scores)
        self.graph = streaming_graph.StreamingGraph(recognizer)

    def trace(self) -> torch.export.ExportedProgram:
        return self.graph.trace()

    def describe(self, config: Config, files: Mapping[str, str]) -> None:
        config.streaming = dataclasses.replace(self.graph.described(), models=dict(files))

    def metadata(self, config: Config) -> dict[str, str]:
        return {**super().metadata(config), "subsampling_factor": str(config.subsampling),
                "vocab_size": str(config.vocabulary), "blank_id": str(config.blank_id),
                "chunks": ",".join(map(str, self.graph.chunks)), "left": str(self.graph.step.left),
                "ahead": str(self.graph.step.ahead)}

    def comparisons(self, clips: ComparisonClips, config: Config, folder: Path) -> Mapping[str, Comparison]:
        chunks = self.recognizer.chunks
        assert chunks is not None and self.compare is not None, "others are refused"
        check_steps(self.recognizer, torch.from_numpy(clips.alone[-1].signal))
        return {_runner(config, size): self.compare(clips, config, folder,
                                                    reference(self.recognizer, chunks=chunks.config(size)))
                for size in self.graph.chunks}

    def runners(self, name: str, path: Path, config: Config) -> Mapping[str, Runner]:
        call = open_runner(name, path)
        return {_runner(config, size): functools.partial(run, call, config, size) for size in self.graph.chunks}


@torch.no_grad()
def check_steps(recognizer: Recognizer, signal: Tensor) -> None:
    """Raise unless the outputs for a clip [S] are the same step by step as in the chunks of training.

    The reference of a stream with lookahead is itself computed step by step, so the comparison with the graph can't
    detect this.
    """
    chunks = recognizer.chunks
    assert chunks is not None, "others are refused"
    config = ChunkConfig(chunks.sizes[-1], chunks.left[-1] // chunks.sizes[-1])
    feats, frames = recognizer.features(signal[None], torch.tensor([len(signal)]))
    trained, counts = recognizer.encode(feats, frames, config)
    stepped = encode_in_chunks(recognizer.encoder, recognizer.embed(feats, frames)[0], frames, recognizer.subsampling,
                               config)
    expected, found = (recognizer.scores(states[:, : int(counts)]) for states in (trained, stepped))
    if not torch.allclose(expected, found, atol=1e-3, rtol=1e-3):
        raise SbkitError("the encoder's outputs on a stream, step by step, differ from those in the chunks of its "
                         f"training by up to {float((expected - found).abs().max()):.2g}",
                         hint="your own code changes what its layers compute; without that it can run on a stream")


def run(call: Call, config: Config, chunk: int, signals: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a streaming graph on a batch of waveforms [S], each of which starts one step after the one before.

    Returns each one's log-probabilities [T, V].
    """
    windows = Windows(config, chunk)
    rows = [[_EMPTY] * i + windows.feed(signal) + windows.finish() for i, signal in enumerate(signals)]
    outputs: list[list[np.ndarray]] = [[] for _ in rows]
    assert config.streaming is not None, "only models for streams get here"
    state = [np.zeros((len(rows), *part["shape"]), part["type"]) for part in config.streaming.state.values()]
    for number in range(max(1, *map(len, rows))):
        current = [row[number] if number < len(row) else _EMPTY for row in rows]
        samples = np.zeros((len(rows), windows.samples), np.float32)
        for padded, window in zip(samples, current, strict=True):
            padded[: len(window.samples)] = window.samples
        log_probs, counts, *state = call(samples, np.array([window.frames for window in current]), *state)
        for parts, row, count in zip(outputs, log_probs, counts, strict=True):
            parts.append(row[:count])
    return [np.concatenate(parts) for parts in outputs]


def _runner(config: Config, size: int) -> str:
    return f"{1000 * size * config.frame_seconds:g} ms"
