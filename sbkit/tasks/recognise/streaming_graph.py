"""A recogniser as a streaming graph: the samples of a chunk and a state to log-probabilities and the next state."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sbkit.export.graph import trace_module
from sbkit.export.layout import Streaming
from sbkit.nn.kaldi import FilterBank, framed
from sbkit.nn.streaming import requirements
from sbkit.nn.streaming.encoder import StreamingEncoder
from sbkit.nn.streaming.layers import EncoderState
from sbkit.tasks.recognise.recognizer import Recognizer

#: Names of inputs, and their dynamic dimensions.
INPUTS = {"samples": ("batch", "samples"), "frames": ("batch",), **dict.fromkeys(EncoderState._fields, ("batch",))}
_BATCH = 2  # for tracing; sizes of 0 and 1 would become constants


def outputs(scores: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the outputs, of which the first is ``scores``, and their dynamic dimensions."""
    return {scores: ("batch", "chunk"), "counts": ("batch",),
            **{f"next_{name}": ("batch",) for name in EncoderState._fields}}


class StreamingGraph(nn.Module):
    """One step of a recogniser on streams, as a function of their samples and states.

    Its parts are copied, so the recogniser isn't changed; raises if it can't run on a stream.
    """

    def __init__(self, recognizer: Recognizer):
        super().__init__()
        requirements.check(requirements.for_stream(recognizer))
        bank, chunks = recognizer.compute_features, recognizer.chunks
        assert isinstance(bank, FilterBank) and chunks is not None, "others are refused"
        self.bank = copy.deepcopy(bank).eval()
        self.step = copy.deepcopy(StreamingEncoder(recognizer)).eval()
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
        bank, state = self.bank, self.step.state(1)
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
