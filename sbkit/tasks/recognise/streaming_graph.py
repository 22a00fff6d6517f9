"""A recogniser as a streaming graph, from a chunk and a state to scores and the next state, and its comparison."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.clips import ComparisonClips
from sbkit.export.companion import Companion, OwnBundle
from sbkit.export.graph import trace_module
from sbkit.export.layout import Config, Streaming
from sbkit.export.padding import pad
from sbkit.export.parity import Comparison, Reference
from sbkit.export.runners import Call, Runner, open_runner
from sbkit.export.windows import Window, Windows
from sbkit.nn.chunks import ChunkConfig
from sbkit.nn.kaldi import FilterBank, framed
from sbkit.nn.streaming import requirements
from sbkit.nn.streaming.encoder import StreamingEncoder
from sbkit.nn.streaming.layers import EncoderState, encode_in_chunks
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.graph import reference

#: Names of inputs, and their dynamic dimensions.
INPUTS = {"samples": ("batch", "samples"), "frames": ("batch",), **dict.fromkeys(EncoderState._fields, ("batch",))}
_BATCH = 2  # for tracing; sizes of 0 and 1 would become constants
_EMPTY = Window(np.zeros(0, np.float32), 0)
#: Builds the comparison of a bundle's model with a reference on clips.
Compare = Callable[[ComparisonClips, OwnBundle, Path, Reference], Comparison]


def outputs(scores: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the outputs, of which the first is ``scores``, and their dynamic dimensions."""
    return {scores: ("batch", "chunk"), "counts": ("batch",),
            **{f"next_{name}": ("batch",) for name in EncoderState._fields}}


class StreamingGraph(nn.Module):
    """One step of a recogniser on streams, as a function of their samples and states.

    Its parts are copied, so the recogniser isn't changed; raises if it can't run on a stream.
    """

    def __init__(self, acoustic_model: AcousticModel):
        super().__init__()
        requirements.check(requirements.for_stream(acoustic_model))
        bank = acoustic_model.compute_features
        chunks = acoustic_model.chunks
        assert isinstance(bank, FilterBank) and chunks is not None, "others are refused"
        self.bank = copy.deepcopy(bank).eval()
        self.step = copy.deepcopy(StreamingEncoder(acoustic_model)).eval()
        self.chunks = list(chunks.sizes)
        self.requires_grad_(False)

    def forward(self, samples: Tensor, frames: Tensor, keys: Tensor, values: Tensor, convolution: Tensor, front: Tensor,
                seen: Tensor) -> tuple[Tensor, ...]:
        """Compute log-probabilities [B, C, V], how many of C are final [B], and the next state.

        samples : [B, S], the windows of a chunk
        frames : [B], real feature frames of the windows; 0: no new audio of this stream
        keys, values, convolution, front, seen : as in ``sbkit.nn.streaming.layers.EncoderState``
        """
        features = self.bank.from_frames(framed(samples, self.bank.size, self.bank.hop))
        log_probs, counts, state = self.step(features, frames, EncoderState(keys, values, convolution, front, seen))
        return log_probs, counts, *state

    def window(self, chunk: int) -> int:
        """Return the number of samples in the window of a chunk of encoder frames."""
        return chunk * self.step.subsampling * self.bank.hop + self.bank.size - self.bank.hop

    def described(self) -> Streaming:
        """Return its description for config.json, without its files."""
        bank = self.bank
        state = self.step.state(1)
        before = -bank.first
        after = 0 if bank.snip_edges else bank.size - bank.hop + bank.hop // 2 - before
        return Streaming(
            chunks=self.chunks, ahead=self.step.ahead, left=self.step.left, overlap=bank.size - bank.hop,
            before=before, after=after,
            state={name: {"type": str(part.dtype).removeprefix("torch."), "shape": list(part.shape[1:])}
                   for name, part in state._asdict().items()})

    def trace(self) -> torch.export.ExportedProgram:
        """Trace it with dynamic numbers of streams and sizes of chunks."""
        samples = self.window(max(2, self.chunks[-1]))
        full = (samples - self.bank.size) // self.bank.hop + 1
        example = (torch.randn(_BATCH, samples) * 0.1, torch.tensor([full, full - 1]), *self.step.state(_BATCH))
        open_: dict[str, tuple[int, ...]] = {name: (0, 1) if name == "samples" else (0,) for name in INPUTS}
        return trace_module(self, example, open_)


class Streams(Companion):
    """A recogniser's streaming graph; it is compared with whole utterances in chunks of each size.

    Raises if the recogniser can't run on a stream. ``scores`` is the name of the graph's first output.
    """

    name, files = "stream", layout.STREAMS
    inputs = INPUTS

    def __init__(self, acoustic_model: AcousticModel, scores: str, compare: Compare | None = None):
        self.acoustic_model = acoustic_model
        self.compare = compare
        self.outputs = outputs(scores)
        self.graph = StreamingGraph(acoustic_model)

    def trace(self) -> torch.export.ExportedProgram:
        return self.graph.trace()

    def describe(self, config: Config, files: Mapping[str, str]) -> None:
        config.streaming = self.graph.described()
        config.streaming.models = dict(files)

    def metadata(self, config: Config) -> dict[str, str]:
        return {**super().metadata(config), "subsampling_factor": str(config.subsampling),
                "vocab_size": str(config.vocabulary), "blank_id": str(config.blank_id),
                "chunks": ",".join(map(str, self.graph.chunks)), "left": str(self.graph.step.left),
                "ahead": str(self.graph.step.ahead)}

    def comparisons(self, clips: ComparisonClips, config: Config, folder: Path) -> Mapping[str, Comparison]:
        chunks = self.acoustic_model.chunks
        assert chunks is not None and self.compare is not None, "others are refused"
        check_steps(self.acoustic_model, torch.from_numpy(clips.alone[-1].signal))
        comparisons = {}
        for size in self.graph.chunks:
            in_chunks = Reference(reference(self.acoustic_model, chunks=chunks.config(size)))
            comparisons[_milliseconds(size, config)] = self.compare(clips, config, folder, in_chunks)
        return comparisons

    def runners(self, name: str, path: Path, config: Config) -> Mapping[str, Runner]:
        call = open_runner(name, path)
        return {_milliseconds(size, config): functools.partial(run, call, config, size) for size in self.graph.chunks}


def _milliseconds(chunk: int, config: Config) -> str:
    return f"{1000 * chunk * config.frame_seconds:g} ms"


@torch.no_grad()
def check_steps(acoustic_model: AcousticModel, signal: Tensor) -> None:
    """Raise unless the outputs for a clip [S] are the same step by step as in the chunks of training.

    The reference of a stream with lookahead is itself computed step by step, so the comparison with the graph can't
    detect this.
    """
    chunks = acoustic_model.chunks
    assert chunks is not None, "others are refused"
    config = ChunkConfig(chunks.sizes[-1], chunks.left[-1] // chunks.sizes[-1])
    feats, frames = acoustic_model.features(signal[None], torch.tensor([len(signal)]))
    trained, counts = acoustic_model.encode(feats, frames, config)
    embedded, _ = acoustic_model.embed(feats, frames)
    stepped = encode_in_chunks(acoustic_model.encoder, embedded, frames, acoustic_model.subsampling, config)
    expected, found = (acoustic_model.scores(states[:, : int(counts)]) for states in (trained, stepped))
    if not torch.allclose(expected, found, atol=1e-3, rtol=1e-3):
        raise SbkitError("not-streamable", "the encoder's outputs on a stream, step by step, differ from those in the "
                         f"chunks of its training by up to {float((expected - found).abs().max()):.2g}",
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
        samples, _ = pad([window.samples for window in current], windows.samples)
        log_probs, counts, *state = call(samples, np.array([window.frames for window in current]), *state)
        for parts, row, count in zip(outputs, log_probs, counts, strict=True):
            parts.append(row[:count])
    return [np.concatenate(parts) for parts in outputs]
