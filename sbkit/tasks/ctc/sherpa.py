"""Exports a model for sherpa-onnx, which runs on phones, in browsers and from a dozen programming languages.

sherpa-onnx gives most models Kaldi's features, but the kind that it calls *omnilingual* gets the waveform, as a
bundle's other models do. It differs from training in four ways, which the graph makes up for:

- It divides the waveform by its standard deviation, so the model must not depend on how loud a recording is.
- It subtracts the waveform's mean. Speech is not symmetric, so silence is no longer zero but a constant, which the
  model has never heard. The graph moves silence back to zero (:func:`_level_of_silence`). A recording whose silence was
  not at zero loses that offset, which the checkpoint hears in its lowest bands: so a weak model may hear other words.
- It counts each frame as 20 ms. Longer ones are repeated, which changes nothing for CTC.
- It writes out tokens that are no text. They become blanks.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.export import features, layout
from sbkit.export.companion import Target
from sbkit.export.graph import save, to_onnx, trace_module
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison
from sbkit.tasks.ctc import readme
from sbkit.tasks.recognise.graph import Graph, reference
from sbkit.tasks.recognise.recognizer import Recognizer
from sbkit.tasks.recognise.sherpa_stream import SAMPLE_RATE, SherpaStream, imported
from sbkit.tasks.recognise.streams import Compare

if TYPE_CHECKING:
    from sherpa_onnx import OfflineRecognizer, OnlineRecognizer

logger = logging.getLogger(__name__)

_FRAME_SECONDS = 0.02  # of a frame, in sherpa-onnx's word times
_FRAMES_COUNTED = 4  # features of what its streams count as a frame
_EXAMPLE = (2, 24_000)
_STRETCH = 320  # samples in a stretch that has one mean and one variance
_MIN_VARIANCE = 1e-5  # that sherpa-onnx adds to a recording's
_NEVER = -1e4  # the log-probability of a token that can't occur
_QUIET = 1e-6  # variance of a stretch, relative to the recording's, below which all count alike


class SherpaOutput(nn.Module):
    """Log-probabilities [B, T, V] as sherpa-onnx is to write them out: [B, T * repeats, V] with blanks for tokens that
    are no text, such as the beginning and the end of a sentence.

    ``frame_seconds`` is what sherpa-onnx counts a frame as.
    """

    blank: Tensor
    silent: Tensor

    def __init__(self, config: Config, frame_seconds: float):
        super().__init__()
        repeats = config.frame_seconds / frame_seconds
        whole = max(1, round(repeats))
        self.repeats = whole if abs(repeats - whole) < 1e-6 else 1
        ids = torch.arange(config.vocabulary)
        self.register_buffer("blank", ids == config.blank_id)
        self.register_buffer("silent", torch.isin(ids, torch.tensor(config.silent_ids, dtype=torch.int64)))

    def forward(self, log_probs: Tensor) -> Tensor:
        nothing = log_probs.masked_fill(~(self.silent | self.blank), _NEVER).amax(-1, keepdim=True)
        log_probs = torch.where(self.blank, nothing, log_probs.masked_fill(self.silent, _NEVER))
        return log_probs.repeat_interleave(self.repeats, dim=1) if self.repeats > 1 else log_probs


class _Wave(nn.Module):
    """Waveforms [B, S] of one length to log-probabilities [B, T * repeats, V]."""

    def __init__(self, graph: Graph, config: Config):
        super().__init__()
        self.model, self.written = graph, SherpaOutput(config, _FRAME_SECONDS)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.ones_like(x[:, 0], dtype=torch.int64) * x.shape[1]
        written: Tensor = self.written(self.model(x - _level_of_silence(x), lengths)[0])
        return written


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


class SherpaWhole(Target):
    """The recogniser for whole recordings; one that sherpa-onnx would run differently from its training is refused."""

    name = layout.SHERPA

    def __init__(self, graph: Graph, recognizer: Recognizer, compared: Compare, sample_rate: int):
        norm = graph.normalize
        alike = isinstance(norm, features.Normalization) and norm.sentence and norm.deviation
        if not alike and not getattr(graph.encoder, "makes_loudness_equal", False):
            raise SbkitError("sherpa-onnx makes all recordings equally loud, but this model wasn't trained on such "
                             "recordings",
                             hint="train with normalize: norm_type: sentence, or leave out --target sherpa")
        if sample_rate != 16_000:
            raise SbkitError(f"sherpa-onnx gives this kind of model 16000 samples a second, but it takes {sample_rate}",
                             hint="leave out --target sherpa")
        self.graph, self.recognizer, self.compared, self.sample_rate = graph, recognizer, compared, sample_rate

    def write(self, folder: Path, config: Config) -> None:
        """Write the model's file; sherpa-onnx also reads the bundle's tokens.txt."""
        wave = _Wave(self.graph, config)
        program = trace_module(wave, (torch.randn(*_EXAMPLE) * 0.1,), {"x": (0, 1)})
        config.models[self.name] = layout.MODELS[self.name]
        save(to_onnx(program, ["x"], ["logits"]), folder / config.models[self.name],
             {"model_type": "omnilingual-asr", "sample_rate": str(self.sample_rate), "comment": "made by sbkit"},
             {"x": ("batch", "samples"), "logits": ("batch", "frames")})

    def compare(self, folder: Path, config: Config, comparison: Comparison) -> None:
        """Compare the words that sherpa-onnx hears with the checkpoint's, few of which may change because the recording
        does, and with those of the checkpoint that is given the recording as sherpa-onnx changes it, of which none may.
        """
        model = config.models[self.name]
        recognizer = imported().OfflineRecognizer.from_omnilingual_asr_ctc(
            model=str(folder / model), tokens=str(folder / layout.TOKENS), num_threads=torch.get_num_threads())

        def transcribe(signal: np.ndarray) -> str:
            return _transcribe(recognizer, signal, self.sample_rate)

        size = layout.size(folder, model)
        comparison.add_words(self.name, transcribe, size)
        run = reference(self.recognizer, config.min_samples)
        heard = self.compared(comparison.clips, config, folder, lambda signal: run(_as_changed(signal)))
        heard.other_words = 0.0
        heard.add_words(self.name, transcribe, size)
        comparison.companions[self.name] = {"as it changes recordings": heard}
        for clip, ours, theirs in zip(comparison.clips.alone, comparison.texts, heard.texts, strict=True):
            if ours.split() != theirs.split():
                logger.warning("sherpa-onnx removes a recording's DC offset, so the transcript of %s is %r instead of "
                               "%r", clip.name, theirs, ours)

    def readme(self) -> str:
        return readme.sherpa(self.sample_rate)


def _as_changed(signal: np.ndarray) -> np.ndarray:
    """Change a waveform [S] as sherpa-onnx does, and the graph after it."""
    given = torch.from_numpy(signal)[None]
    given = (given - given.mean()) / (given.var(correction=0) + _MIN_VARIANCE).sqrt()
    return (given - _level_of_silence(given))[0].numpy()


class CTCStream(SherpaStream):
    """The recogniser for streams, as the kind that sherpa-onnx calls *nemo_ctc*.

    It counts each frame as 40 ms. Longer ones are repeated, which changes nothing for CTC. It writes out tokens that
    are no text. They become blanks.
    """

    output, section = "logits", readme.SHERPA_STREAM

    def __init__(self, recognizer: Recognizer, milliseconds: int, compared: Compare):
        super().__init__(recognizer, milliseconds, compared)
        if self.graph.step.subsampling % _FRAMES_COUNTED:
            raise SbkitError("sherpa-onnx assumes frames of 40 ms in a streaming model, but this model has frames of "
                             f"{10 * self.graph.step.subsampling} ms",
                             hint="train with frames of 40 ms, or a multiple of that, or leave out --target sherpa")

    def written(self, config: Config) -> tuple[nn.Module, int]:
        output = SherpaOutput(config, _FRAMES_COUNTED * self.graph.bank.hop / SAMPLE_RATE)
        return output, output.repeats

    def opened(self, folder: Path) -> OnlineRecognizer:
        return imported().OnlineRecognizer.from_nemo_ctc(
            model=str(folder / layout.MODELS[self.name]), tokens=str(folder / layout.TOKENS), feature_dim=self.bands,
            num_threads=torch.get_num_threads())


def _transcribe(recognizer: OfflineRecognizer, signal: np.ndarray, sample_rate: int) -> str:
    stream = recognizer.create_stream()
    stream.accept_waveform(sample_rate, signal)
    recognizer.decode_stream(stream)
    return " ".join(stream.result.text.split())
