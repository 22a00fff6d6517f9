"""Exports a model for sherpa-onnx, which runs on phones, in browsers and from a dozen programming languages.

sherpa-onnx gives most models Kaldi's features, but the kind that it calls *omnilingual* gets the waveform, as a
bundle's other models do. It differs from training in four ways, which the graph makes up for:

- It divides the waveform by its standard deviation, so the model must not depend on how loud a recording is.
- It subtracts the waveform's mean. Speech is not symmetric, so silence is no longer zero but a constant, which the
  model has never heard. The graph moves silence back to zero (:func:`_level_of_silence`).
- It counts each frame as 20 ms. Longer ones are repeated, which changes nothing for CTC.
- It writes out tokens that are no text. They become blanks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.export import features
from sbkit.export.graph import save, to_onnx, trace_module
from sbkit.export.layout import Config
from sbkit.tasks.ctc.graph import Graph

if TYPE_CHECKING:
    from sherpa_onnx import OfflineRecognizer

_FRAME_SECONDS = 0.02  # of a frame, in sherpa-onnx's word times
_EXAMPLE = (2, 24_000)
_STRETCH = 320  # samples in a stretch that has one mean and one variance
_NEVER = -1e4  # the log-probability of a token that can't occur
_QUIET = 1e-6  # variance of a stretch, relative to the recording's, below which all count alike


class _Wave(nn.Module):
    """Waveforms [B, S] of one length to log-probabilities [B, T * repeats, V]."""

    blank: Tensor
    silent: Tensor

    def __init__(self, graph: Graph, repeats: int, config: Config):
        super().__init__()
        self.model, self.repeats = graph, repeats
        ids = torch.arange(config.vocabulary)
        self.register_buffer("blank", ids == config.blank_id)
        self.register_buffer("silent", torch.isin(ids, torch.tensor(config.silent_ids, dtype=torch.int64)))

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.ones_like(x[:, 0], dtype=torch.int64) * x.shape[1]
        log_probs = self.model(x - _level_of_silence(x), lengths)[0]
        # Without this, sherpa-onnx would write out the beginning and the end of a sentence.
        nothing = log_probs.masked_fill(~(self.silent | self.blank), _NEVER).amax(-1, keepdim=True)
        log_probs = torch.where(self.blank, nothing, log_probs.masked_fill(self.silent, _NEVER))
        return log_probs.repeat_interleave(self.repeats, dim=1) if self.repeats > 1 else log_probs


def _level_of_silence(x: Tensor) -> Tensor:
    """Estimate a recording's level of silence: the mean of its stretches, weighted by how quiet they are.

    [B, S] to [B, 1].
    """
    stretches = functional.pad(x, (0, _STRETCH))[:, None]  # so that even the shortest recording has one
    means = functional.avg_pool1d(stretches, _STRETCH, _STRETCH)[:, 0]
    variances = functional.avg_pool1d(stretches.square(), _STRETCH, _STRETCH)[:, 0] - means.square()
    whole = torch.arange(means.shape[1], device=x.device) < x.shape[1] // _STRETCH
    weights = (1 / (variances.clamp(min=0.0) + _QUIET)).masked_fill(~whole, 0.0)
    return (weights * means).sum(1, keepdim=True) / (weights.sum(1, keepdim=True) + _QUIET)


def check(graph: Graph, config: Config) -> None:
    """Raise if sherpa-onnx would run the model differently from how it was trained."""
    norm = graph.normalize
    alike = isinstance(norm, features.Normalization) and norm.sentence and norm.deviation
    if not alike and not getattr(graph.encoder, "makes_loudness_equal", False):
        raise SbkitError("sherpa-onnx makes all recordings equally loud, and this model was not trained on recordings "
                         "like that", hint="train with normalize: norm_type: sentence")
    if config.sample_rate != 16_000:
        raise SbkitError(f"sherpa-onnx gives this kind of model 16000 samples a second, but it takes "
                         f"{config.sample_rate}", hint="leave out --target sherpa")


def write(graph: Graph, config: Config, path: Path) -> None:
    """Write the model's file; sherpa-onnx also reads the bundle's tokens.txt."""
    check(graph, config)
    repeats = config.frame_seconds / _FRAME_SECONDS
    whole = max(1, round(repeats))
    wave = _Wave(graph, whole if abs(repeats - whole) < 1e-6 else 1, config)
    program = trace_module(wave, (torch.randn(*_EXAMPLE) * 0.1,), {"x": (0, 1)})
    model = to_onnx(program, ["x"], ["logits"])
    save(model, path, {"model_type": "omnilingual-asr", "sample_rate": str(config.sample_rate),
                       "comment": "made by sbkit"},
         {"x": ("batch", "samples"), "logits": ("batch", "frames")})


def client(model: Path, tokens: Path) -> OfflineRecognizer:
    """Open a model with sherpa-onnx's own recogniser."""
    try:
        import sherpa_onnx
    except ImportError:
        raise SbkitError("sherpa-onnx is not installed, and a model for it is tested with it before it is published",
                         hint="pip install sherpa-onnx") from None
    return sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(
        model=str(model), tokens=str(tokens), num_threads=torch.get_num_threads())


def transcribe(recognizer: OfflineRecognizer, signal: np.ndarray, sample_rate: int) -> str:
    """Transcribe a signal [S] with sherpa-onnx."""
    stream = recognizer.create_stream()
    stream.accept_waveform(sample_rate, signal)
    recognizer.decode_stream(stream)
    return " ".join(stream.result.text.split())
