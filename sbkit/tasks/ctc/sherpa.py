"""A model for sherpa-onnx, which then runs it on phones, in browsers and in a dozen languages as it is.

sherpa-onnx hands most models Kaldi's features; the kind that it calls *omnilingual* gets the waveform, as a
bundle's models do. It changes what a model was trained on in three ways, and the graph meets each of them:

- the waveform is divided by its deviation: the model must not mind how loud a recording is;
- the waveform's mean is taken away. Speech is not symmetric, so that lifts silence off zero, and what was
  nothing becomes a constant that sounds. The graph puts silence back to zero (:func:`_level_of_silence`);
- a frame counts as 20 ms: longer ones are repeated, which changes nothing for CTC.

Tokens that are no text would be written out; they are made blanks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.export import features
from sbkit.export.graph import save, to_onnx, trace_module
from sbkit.export.layout import Config
from sbkit.tasks.ctc.graph import Graph

_FRAME_SECONDS = 0.02  # for sherpa-onnx's times
_EXAMPLE = (2, 24_000)
_STRETCH = 320  # samples whose mean and variance are looked at together
_NEVER = -1e4  # a log-probability
_QUIET = 1e-6  # variance, where that of the whole recording is 1, below which all stretches count alike


class _Wave(nn.Module):
    """Waveforms [B, S] alone, all of one length, to log-probabilities [B, T * repeats, V]."""

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
        # sherpa-onnx would write out the ends of a sentence; for CTC they are as good as blanks.
        nothing = log_probs.masked_fill(~(self.silent | self.blank), _NEVER).amax(-1, keepdim=True)
        log_probs = torch.where(self.blank, nothing, log_probs.masked_fill(self.silent, _NEVER))
        return log_probs.repeat_interleave(self.repeats, dim=1) if self.repeats > 1 else log_probs


def _level_of_silence(x: Tensor) -> Tensor:
    """Where a recording rests: the mean of its stretches, the quieter the weightier. [B, S] -> [B, 1]."""
    stretches = functional.pad(x, (0, _STRETCH))[:, None]  # so that there is one even of the shortest
    means = functional.avg_pool1d(stretches, _STRETCH, _STRETCH)[:, 0]
    variances = functional.avg_pool1d(stretches.square(), _STRETCH, _STRETCH)[:, 0] - means.square()
    whole = torch.arange(means.shape[1], device=x.device) < x.shape[1] // _STRETCH
    weights = (1 / (variances.clamp(min=0.0) + _QUIET)).masked_fill(~whole, 0.0)
    return (weights * means).sum(1, keepdim=True) / (weights.sum(1, keepdim=True) + _QUIET)


def check(graph: Graph, config: Config) -> None:
    """Refuse what sherpa-onnx would run otherwise than it was trained."""
    norm = graph.normalize
    alike = isinstance(norm, features.Normalization) and norm.sentence and norm.deviation
    if not alike and not getattr(graph.encoder, "makes_loudness_equal", False):
        raise SbkitError("sherpa-onnx makes every recording equally loud before the model hears it, and this model was "
                         "not trained to hear all of them alike", hint="train with normalize: norm_type: sentence")
    if config.sample_rate != 16_000:
        raise SbkitError(f"sherpa-onnx gives this kind of model 16000 samples a second; it takes {config.sample_rate}")


def write(graph: Graph, config: Config, path: Path) -> None:
    """Write the model; tokens.txt is the bundle's."""
    check(graph, config)
    repeats = config.frame_seconds / _FRAME_SECONDS
    whole = max(1, round(repeats))
    wave = _Wave(graph, whole if abs(repeats - whole) < 1e-6 else 1, config)
    program = trace_module(wave, (torch.randn(*_EXAMPLE) * 0.1,), {"x": (0, 1)})
    model = to_onnx(program, ["x"], ["logits"])
    save(model, path, {"model_type": "omnilingual-asr", "sample_rate": str(config.sample_rate),
                       "comment": "made by sbkit"},
         {"x": ("batch", "samples"), "logits": ("batch", "frames")})


def client(model: Path, tokens: Path) -> Any:
    """sherpa-onnx's own recogniser with the model in it."""
    try:
        import sherpa_onnx
    except ImportError:
        raise SbkitError("a model for sherpa-onnx is tried in sherpa-onnx before it is published",
                         hint="pip install sherpa-onnx") from None
    return sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(
        model=str(model), tokens=str(tokens), num_threads=torch.get_num_threads())


def transcribe(recognizer: Any, signal: Any, sample_rate: int) -> str:
    """What sherpa-onnx hears in a signal [S]."""
    stream = recognizer.create_stream()
    stream.accept_waveform(sample_rate, signal)
    recognizer.decode_stream(stream)
    return " ".join(stream.result.text.split())
