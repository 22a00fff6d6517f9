"""One step of a recogniser on a stream: a chunk of features and a state to log-probabilities and the next state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.streaming import layers, requirements
from sbkit.nn.streaming.layers import EncoderState
from sbkit.nn.streaming.requirements import AcousticModel


class StreamingEncoder(nn.Module):
    """Normalisation, front end, Conformer and CTC head of a recogniser as a pure function, for export.

    Chunk by chunk, its outputs equal those of the recogniser for the whole utterance with ``chunks``. It has no control
    flow that depends on data. Its modules are the recogniser's own.

    acoustic_model : with ``chunks``, and a front end that has ``forward_step``, such as CausalFrontEnd
    left : left context in encoder frames; None: the most that it was trained for
    """

    def __init__(self, acoustic_model: AcousticModel, left: int | None = None):
        super().__init__()
        requirements.check(requirements.for_step(acoustic_model))
        chunks = acoustic_model.chunks
        assert chunks is not None, "others are refused"
        self.left: int = chunks.config(chunks.sizes[0], left).left_context_size_frames()
        self.ahead: int = chunks.ahead
        """Lookahead: the last encoder frames of a chunk, with which the next one begins."""
        self.normalize, self.frontend = acoustic_model.normalize, acoustic_model.frontend
        self.encoder, self.head = acoustic_model.encoder, acoustic_model.head
        self.scores_tokens = acoustic_model.scores_tokens
        self.subsampling: int = acoustic_model.frontend.subsampling
        """Feature frames per encoder frame."""
        self._front = [part.shape[1:] for part in self.frontend.state(1)]

    def state(self, batch: int) -> EncoderState:
        """Return the initial state of ``batch`` streams."""
        return layers.initial_state(self.encoder, batch, self.left, sum(shape.numel() for shape in self._front))

    def forward(self, features: Tensor, frames: Tensor, state: EncoderState) -> tuple[Tensor, Tensor, EncoderState]:
        """Compute log-probabilities [B, T', V], or other outputs of the head, how many of T' are final [B], and the
        next state.

        A stream is fed chunks of equal size, each of which begins with the ``ahead`` frames of the one before, whose
        outputs weren't final. All outputs of its last chunk, which has fewer real frames, are final; its row must then
        start from the initial state. The state of a row without real frames (0 of ``frames``) doesn't change.

        features : [B, T, F] before normalisation; T is T' times ``subsampling``
        frames : [B] int64, how many of T are real; the others may have any values
        """
        real = lengths_to_mask(frames, features.shape[1])
        feats = features if self.normalize is None else self.normalize(features)
        feats = feats.masked_fill(~real[..., None], 0.0)
        parts = state.front.split([shape.numel() for shape in self._front], 1)
        before = tuple(part.unflatten(1, shape) for part, shape in zip(parts, self._front, strict=True))
        shift = feats.shape[1] - self.ahead * self.subsampling
        out, front_after = self.frontend.forward_step(feats[:, :shift], before)
        if self.ahead:  # these frames come again, so the state is that before them
            out = torch.cat([out, self.frontend.forward_step(feats[:, shift:], front_after)[0]], 1)
        front = torch.cat([part.flatten(1) for part in front_after], 1)
        counts = torch.div(frames + self.subsampling - 1, self.subsampling, rounding_mode="floor")
        x, after = layers.step(self.encoder, out.flatten(2), counts, state, self.ahead)
        advances = frames > 0  # rows without real frames keep their state
        after = EncoderState(*(torch.where(advances.view(-1, *(1,) * (new.dim() - 1)), new, old)
                               for new, old in zip(after._replace(front=front), state, strict=True)))
        outputs = self.head(x).float()
        final = counts - self.ahead * (frames == features.shape[1])
        return outputs.log_softmax(-1) if self.scores_tokens else outputs, final, after
