"""One step of a recogniser on a stream: a chunk of features and a state to log-probabilities and the next state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.streaming import layers, requirements
from sbkit.nn.streaming.layers import EncoderState
from sbkit.nn.streaming.requirements import Recognizer


class StreamingEncoder(nn.Module):
    """Normalisation, front end, Conformer and CTC head of a recogniser as a pure function, for export.

    Chunk by chunk it gives what the recogniser gives for the whole utterance with ``chunks``. It has no control flow
    that depends on data. Its modules are the recogniser's own.

    recognizer : with ``chunks``, and a front end that has ``forward_step``, such as CausalFrontEnd
    left : left context in encoder frames; None: the most that it was trained for
    """

    def __init__(self, recognizer: Recognizer, left: int | None = None):
        super().__init__()
        requirements.refuse(requirements.of_step(recognizer))
        chunks = recognizer.chunks
        assert chunks is not None, "others are refused"
        self.left: int = chunks.config(chunks.sizes[0], left).left_context_size_frames()
        self.ahead: int = chunks.ahead
        """The last encoder frames of a chunk, which the next one begins with."""
        self.normalize, self.frontend = recognizer.normalize, recognizer.frontend
        self.encoder, self.head = recognizer.encoder, recognizer.head
        self.scores_tokens = recognizer.scores_tokens
        self.subsampling: int = recognizer.frontend.subsampling
        """Feature frames per encoder frame."""
        self._front = [part.shape[1:] for part in self.frontend.state(1)]

    def state(self, batch: int) -> EncoderState:
        """Make the state of ``batch`` streams that begin."""
        return layers.beginning(self.encoder, batch, self.left, sum(shape.numel() for shape in self._front))

    def forward(self, features: Tensor, frames: Tensor, state: EncoderState) -> tuple[Tensor, Tensor, EncoderState]:
        """Compute log-probabilities [B, T', V], or what else the head gives, how many of T' are said [B], and the next
        state.

        A stream is fed chunks of equal size, each of which begins with the frames that were ``ahead`` in the one before
        and that it didn't say. Its last one has fewer real frames and says all of them; after it, its row must begin
        anew. The state of a row without any (0 of ``frames``) stays as it is.

        features : [B, T, F] as they are computed, before normalisation; T is T' times ``subsampling``
        frames : [B] int64, how many of T are real; the others may have any values
        """
        there = lengths_to_mask(frames, features.shape[1])
        feats = features if self.normalize is None else self.normalize(features)
        x, front = self._in_front(feats.masked_fill(~there[..., None], 0.0), state.front)
        counts = torch.div(frames + self.subsampling - 1, self.subsampling, rounding_mode="floor")
        x, after = layers.step(self.encoder, x, counts, state, self.ahead)
        after = _moved(frames > 0, after._replace(front=front), state)
        found = self.head(x).float()
        said = counts - self.ahead * (frames == features.shape[1])
        return found.log_softmax(-1) if self.scores_tokens else found, said, after

    def _in_front(self, feats: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Run the front end: [B, T, F] and its packed state to [B, T', D], and its state for the next chunk."""
        parts = packed.split([shape.numel() for shape in self._front], 1)
        before = tuple(part.unflatten(1, shape) for part, shape in zip(parts, self._front, strict=True))
        moves = feats.shape[1] - self.ahead * self.subsampling
        x, after = self.frontend.forward_step(feats[:, :moves], before)
        if self.ahead:
            x = torch.cat([x, self.frontend.forward_step(feats[:, moves:], after)[0]], 1)
        return x.flatten(2), torch.cat([part.flatten(1) for part in after], 1)


def _moved(moves: Tensor, after: EncoderState, before: EncoderState) -> EncoderState:
    """Take the next state of rows [B] that move on, and the state before of those that don't."""
    return EncoderState(*(torch.where(moves.view(-1, *(1,) * (new.dim() - 1)), new, old)
                          for new, old in zip(after, before, strict=True)))
