"""A recogniser as one graph from waveforms to log-probabilities, traced with dynamic batch and time dimensions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.export import features
from sbkit.export.graph import trace_module
from sbkit.export.lobes import exportable
from sbkit.nn import recurrent
from sbkit.nn.lengths import LengthRule, N
from sbkit.tasks.recognise.acoustic_model import GUARD_FRAMES, AcousticModel

EXAMPLE = (2, 24_000)  # the batch that is traced; sizes of 0 and 1 would become constants
#: Names of outputs, and their dynamic dimensions.
OUTPUTS = {"log_probs": ("batch", "frames"), "frames": ("batch",)}
_UNUSED = ("decoder", "custom_tgt_module", "positional_encoding_decoder")  # of a transformer; an encoder needs none


class Graph(nn.Module):
    """A recogniser as one function of waveforms; an utterance's result does not depend on its batch.

    Its parts are copied, so the recogniser isn't changed.
    """

    frontend: nn.Module | None
    encoder: Any  # with whatever methods its class has

    def __init__(self, acoustic_model: AcousticModel):
        super().__init__()
        self.front_name = type(acoustic_model.compute_features).__name__
        self.features = None if acoustic_model.compute_features is None else \
            features.express(acoustic_model.compute_features, acoustic_model.hop_samples)
        self.normalize = features.normalization(acoustic_model.normalize)
        # The first or last may be None.
        parts: list[Any] = [acoustic_model.frontend, acoustic_model.encoder, acoustic_model.head]
        self.frontend, self.encoder, self.head = copy.deepcopy(nn.ModuleList(parts)).eval()
        for part in (self.frontend, self.encoder, self.head):
            if part is not None:
                exportable(part)
        self.factor, self.shift = closed_form(acoustic_model.frontend_rule)
        self.scores_tokens = acoustic_model.scores_tokens
        self.encodes, self.padding = hasattr(self.encoder, "encode"), acoustic_model.padding
        rule = acoustic_model.encoder_rule
        self.encoder_form = closed_form(rule) if self.padding and isinstance(rule, LengthRule) else None
        for name in _UNUSED:
            if self.encodes and hasattr(self.encoder, name):
                delattr(self.encoder, name)
        self.requires_grad_(False)

    def _after(self, frames: N) -> N:
        """Return the front end's number of output frames for input frames: an integer, a symbol or a tensor."""
        return (frames + self.shift) // self.factor

    def forward(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities [B, T, V], or other outputs of the head, or encoder states without a head, and
        frame counts [B] of waveforms [B, S] and sample counts [B]."""
        lengths = lengths.clamp(max=signals.shape[1])
        feats, frames = (signals, lengths) if self.features is None else self.features(signals, lengths)
        if self.normalize is not None:
            feats = self.normalize(feats, frames)
        inside = torch.arange(feats.shape[1], device=feats.device)[None, :] < frames[:, None]
        feats = feats.masked_fill(~(inside if self.features is None else inside[..., None]), 0.0)
        if self.frontend is not None:
            longest = self._after(feats.shape[1])
            feats = self.frontend(functional.pad(feats, (0, 0, 0, GUARD_FRAMES)))[:, :longest].flatten(2)
            frames = self._after(frames)
        if self.encodes:
            encoded = self.encoder.encode(feats, frames / feats.shape[1])
        else:
            encoded = recurrent.call(self.encoder, feats, frames, **self.padding)
            if self.encoder_form is not None:
                factor, shift = self.encoder_form
                encoded, frames = encoded[:, :(feats.shape[1] + shift) // factor], (frames + shift) // factor
            frames = self.encoder.frames(frames) if hasattr(self.encoder, "frames") else frames
        encoded = encoded[0] if isinstance(encoded, tuple) else encoded
        if self.head is not None:
            encoded = self.head(encoded).float()
        return encoded.log_softmax(-1) if self.head is not None and self.scores_tokens else encoded, frames


def closed_form(rule: LengthRule) -> tuple[int, int]:
    """Find (factor, shift) with ``rule(t) == (t + shift) // factor`` for every t above 0."""
    for shift in range(-4 * rule.factor, 4 * rule.factor):
        if all((t + shift) // rule.factor == rule.outputs[t] for t in range(1, len(rule.outputs))):
            return rule.factor, shift
    raise SbkitError("not-exportable", "the front end doesn't turn T frames into (T + a) // b, so its lengths can't be "
                     "exported", key="CNN", hint="use convolutions with padding 'same', which do")


def trace(graph: Graph) -> torch.export.ExportedProgram:
    """Trace the graph with dynamic batch and time dimensions."""
    batch, samples = EXAMPLE
    example = (torch.randn(batch, samples) * 0.1, torch.tensor([samples, samples * 2 // 3]))
    program = trace_module(graph, example, {"signals": (0, 1), "lengths": (0,)})
    if isinstance(graph.features, features.TracedFeatures):
        features.refuse_transforms(program, graph.front_name)
    return program


def reference(acoustic_model: AcousticModel, at_least: int = 1,
              chunks: DynChunkTrainConfig | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from a waveform [S] to the checkpoint's log-probabilities [T, V], or other outputs of its head.

    at_least : shorter waveforms are padded with zeros to this many samples, as in every runtime
    chunks : the context of frames; None: the whole utterance
    """

    @torch.no_grad()
    def run(signal: np.ndarray) -> np.ndarray:
        signals = torch.from_numpy(signal)[None]
        signals = torch.nn.functional.pad(signals, (0, max(0, at_least - len(signal))))
        outputs, frames = acoustic_model.outputs(signals, torch.tensor([len(signal)]), chunks)
        return outputs[0, : int(frames[0])].numpy()

    return run
