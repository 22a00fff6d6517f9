"""Exports a model for sherpa-onnx, which runs on phones, in browsers and from a dozen programming languages.

sherpa-onnx gives most models Kaldi's features, but the kind that it calls *omnilingual* gets the waveform, as a
bundle's other models do. It differs from training in four ways, for which the graph compensates:

- It divides the waveform by its standard deviation, so the model must not depend on how loud a recording is.
- It subtracts the waveform's mean. Speech is not symmetric, so silence is no longer zero but a constant, which the
  model doesn't know from training. The graph moves silence back to zero (:func:`_level_of_silence`). A recording whose
  silence was not at zero loses that offset, which is in the lowest bands of the features: so the transcripts of a weak
  model may differ.
- It assumes that a frame is 20 ms. Longer ones are repeated, which changes nothing for CTC.
- It outputs tokens that are no text. They become blanks.
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
from sbkit.export.parity import Comparison, Reference
from sbkit.tasks.ctc import readme
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.graph import Graph, reference
from sbkit.tasks.recognise.sherpa_stream import SAMPLE_RATE, SherpaStream, imported
from sbkit.tasks.recognise.streaming_graph import Compare

if TYPE_CHECKING:
    from sherpa_onnx import OnlineRecognizer

logger = logging.getLogger(__name__)

_FRAME_SECONDS = 0.02  # of a frame, in sherpa-onnx's word times
_STREAM_SUBSAMPLING = 4  # feature frames per frame, as its streams assume
_EXAMPLE = (2, 24_000)
_SEGMENT = 320  # samples that have one mean and one variance
_EPSILON = 1e-5  # that sherpa-onnx adds to a recording's variance
_NEVER = -1e4  # the log-probability of a token that can't occur
_QUIET = 1e-6  # variance of a segment, relative to the recording's, below which all have the same weight


class SherpaOutput(nn.Module):
    """Log-probabilities [B, T, V] to those for sherpa-onnx: [B, T * repeats, V] with blanks for tokens that are no
    text, such as the beginning and the end of a sentence.

    ``frame_seconds`` is the length of a frame that sherpa-onnx assumes.
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
        blank = log_probs.masked_fill(~(self.silent | self.blank), _NEVER).amax(-1, keepdim=True)
        log_probs = torch.where(self.blank, blank, log_probs.masked_fill(self.silent, _NEVER))
        return log_probs.repeat_interleave(self.repeats, dim=1) if self.repeats > 1 else log_probs


class _Wave(nn.Module):
    """Waveforms [B, S] of one length to log-probabilities [B, T * repeats, V]."""

    def __init__(self, graph: Graph, config: Config):
        super().__init__()
        self.model, self.output = graph, SherpaOutput(config, _FRAME_SECONDS)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.ones_like(x[:, 0], dtype=torch.int64) * x.shape[1]
        outputs: Tensor = self.output(self.model(x - _level_of_silence(x), lengths)[0])
        return outputs


def _level_of_silence(x: Tensor) -> Tensor:
    """Estimate a recording's level of silence: the mean of its segments, weighted by how quiet they are.

    [B, S] to [B, 1].
    """
    padded = functional.pad(x, (0, _SEGMENT))[:, None]  # so that even the shortest recording has a segment
    means = functional.avg_pool1d(padded, _SEGMENT, _SEGMENT)[:, 0]
    variances = functional.avg_pool1d(padded.square(), _SEGMENT, _SEGMENT)[:, 0] - means.square()
    whole = torch.arange(means.shape[1], device=x.device) < x.shape[1] // _SEGMENT
    weights = (1 / (variances.clamp(min=0.0) + _QUIET)).masked_fill(~whole, 0.0)
    return (weights * means).sum(1, keepdim=True) / (weights.sum(1, keepdim=True) + _QUIET)


class SherpaWhole(Target):
    """The recogniser for whole recordings; raises if sherpa-onnx would run it differently from its training."""

    name = layout.SHERPA

    def __init__(self, graph: Graph, acoustic_model: AcousticModel, compared: Compare, sample_rate: int):
        norm = graph.normalize
        normalized = isinstance(norm, features.Normalization) and norm.sentence and norm.deviation
        if not normalized and not getattr(graph.encoder, "normalizes_loudness", False):
            raise SbkitError("sherpa-mismatch", "sherpa-onnx makes all recordings equally loud, but this model wasn't "
                             "trained on such recordings", key="normalize",
                             hint="train with normalize: norm_type: sentence, or leave out --target sherpa")
        if sample_rate != 16_000:
            raise SbkitError("sherpa-mismatch", "sherpa-onnx gives this kind of model 16000 samples per second, but it "
                             f"takes {sample_rate}", key="sample_rate", hint="leave out --target sherpa")
        self.graph, self.acoustic_model, self.compared, self.sample_rate = graph, acoustic_model, compared, sample_rate

    def write(self, folder: Path, config: Config) -> None:
        """Write the model's file; sherpa-onnx also reads the bundle's tokens.txt."""
        wave = _Wave(self.graph, config)
        program = trace_module(wave, (torch.randn(*_EXAMPLE) * 0.1,), {"x": (0, 1)})
        save(to_onnx(program, ["x"], ["logits"]), folder / config.models[self.name],
             {"model_type": "omnilingual-asr", "sample_rate": str(self.sample_rate), "comment": "made by sbkit"},
             {"x": ("batch", "samples"), "logits": ("batch", "frames")})

    def compare(self, folder: Path, config: Config, comparison: Comparison) -> None:
        """Compare sherpa-onnx's words with the checkpoint's, on the original recording, where few may differ, and on
        the recording as sherpa-onnx changes it, where none may."""
        model = config.models[self.name]
        recognizer = imported().OfflineRecognizer.from_omnilingual_asr_ctc(
            model=str(folder / model), tokens=str(folder / layout.TOKENS), num_threads=torch.get_num_threads())

        def transcribe(signal: np.ndarray) -> str:
            stream = recognizer.create_stream()
            stream.accept_waveform(self.sample_rate, signal)
            recognizer.decode_stream(stream)
            return " ".join(stream.result.text.split())

        size = layout.size(folder, model)
        comparison.add_words(self.name, transcribe, size)
        run = reference(self.acoustic_model, config.min_samples)

        def as_changed(signal: np.ndarray) -> np.ndarray:
            """Change a waveform [S] like sherpa-onnx and then the graph, and compute the checkpoint's outputs."""
            x = torch.from_numpy(signal)[None]
            x = (x - x.mean()) / (x.var(correction=0) + _EPSILON).sqrt()
            return run((x - _level_of_silence(x))[0].numpy())

        changed = self.compared(comparison.clips, config, folder, Reference(as_changed))
        changed.add_words(self.name, transcribe, size, same_waveform=True)
        comparison.companions[self.name] = {"as it changes recordings": changed}
        for clip, ours, theirs in zip(comparison.clips.alone, comparison.texts, changed.texts, strict=True):
            if ours.split() != theirs.split():
                logger.warning("sherpa-onnx removes a recording's DC offset, so the transcript of %s is %r instead of "
                               "%r", clip.name, theirs, ours)

    def readme(self) -> str:
        return readme.sherpa(self.sample_rate)


class CTCStream(SherpaStream):
    """The recogniser for streams, as the kind that sherpa-onnx calls *nemo_ctc*.

    It assumes that a frame is 40 ms. Longer ones are repeated, which changes nothing for CTC. It outputs tokens that
    are no text. They become blanks.
    """

    output, section = "logits", readme.SHERPA_STREAM

    def __init__(self, acoustic_model: AcousticModel, milliseconds: int, compared: Compare):
        super().__init__(acoustic_model, milliseconds, compared)
        if self.graph.step.subsampling % _STREAM_SUBSAMPLING:
            raise SbkitError("sherpa-mismatch",
                             "sherpa-onnx assumes frames of 40 ms in a streaming model, but this model "
                             "has frames of "
                             f"{10 * self.graph.step.subsampling} ms",
                             hint="train with frames of 40 ms, or a multiple of that, or leave out --target sherpa")

    def output_layer(self, config: Config) -> tuple[nn.Module, int]:
        output = SherpaOutput(config, _STREAM_SUBSAMPLING * self.graph.bank.hop / SAMPLE_RATE)
        return output, output.repeats

    def open_recognizer(self, folder: Path) -> OnlineRecognizer:
        return imported().OnlineRecognizer.from_nemo_ctc(
            model=str(folder / layout.MODELS[self.name]), tokens=str(folder / layout.TOKENS), feature_dim=self.bands,
            num_threads=torch.get_num_threads())
