"""Exports a model that was trained in chunks for sherpa-onnx's streams, as one of NeMo's kinds of models.

sherpa-onnx computes the features, and gives the model windows of one size and its last state: two tensors of floats of
any shape, zeros at first, and a number. This differs from a bundle's own streaming graph:

- Its features are NeMo's, since version 2.0.1. Normalisation is in the graph.
- It only gives the model whole windows, and the last one only if a frame follows it. So a stream must be followed by
  silence as long as a chunk, or its last frames are lost.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.companion import Target
from sbkit.export.graph import trace_module, write_onnx
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison, Reference
from sbkit.nn.chunks import Chunks
from sbkit.nn.streaming.encoder import StreamingEncoder
from sbkit.nn.streaming.layers import EncoderState
from sbkit.system.environment import version_of
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.graph import reference
from sbkit.tasks.recognise.streaming_graph import Compare, StreamingGraph

if TYPE_CHECKING:
    from sherpa_onnx import OnlineRecognizer

#: The first version with these features: all settings of FilterBank except ``n_mels``.
VERSION = "2.0.1"
_FEATURES = {"sample_rate": 16_000, "frame_length": 25.0, "frame_shift": 10.0, "low": 0.0, "high": 8000.0,
             "preemphasis": 0.97, "scale": 1.0, "snip_edges": False, "remove_dc": False, "window": "hann",
             "mel": "slaney"}
SAMPLE_RATE, _HOP = 16_000, 160
_MILLISECONDS = 640  # default size of a chunk
_BATCH = 2  # for tracing

#: Names of inputs, and their dynamic dimensions; their order matters to sherpa-onnx.
_CACHES = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
INPUTS = dict.fromkeys(("audio_signal", "length", *_CACHES), ("batch",))

#: A state as sherpa-onnx keeps it: [B, X, Y, Z] twice, and [B].
Caches = tuple[Tensor, Tensor, Tensor]


def packed(state: EncoderState) -> Caches:
    """Pack a state: keys and values [B, 2 L, left, D], the rest [B, 1, 1, N], and the numbers of frames seen [B]."""
    rest = torch.cat([state.convolution.flatten(1), state.front], 1)
    return torch.cat([state.keys, state.values], 1), rest[:, None, None], state.seen


def unpacked(caches: Caches, convolution: torch.Size) -> EncoderState:
    """Undo :func:`packed`; ``convolution`` is the shape of that part, without B."""
    attention, rest, seen = caches
    keys, values = attention.chunk(2, 1)
    size = convolution.numel()
    rest = rest.flatten(1)
    return EncoderState(keys, values, rest[:, :size].unflatten(1, convolution), rest[:, size:], seen)


class StreamStep(nn.Module):
    """One step of a recogniser on streams, from features and caches to its outputs and the next caches.

    output : the head's outputs [B, C, ...] to those that sherpa-onnx expects
    repeats : frames of the latter for each of the former
    """

    def __init__(self, step: StreamingEncoder, output: nn.Module, repeats: int):
        super().__init__()
        self.step, self.output, self.repeats = step, output, repeats
        self.convolution = step.state(1).convolution.shape[1:]

    def forward(self, audio_signal: Tensor, length: Tensor, cache_last_channel: Tensor, cache_last_time: Tensor,
                cache_last_channel_len: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs of C frames, how many of them are real [B], and the next caches.

        audio_signal : [B, F, T] features, of which ``length`` [B] frames are real
        cache_last_channel, cache_last_time, cache_last_channel_len : as :func:`packed` makes them
        """
        state = unpacked((cache_last_channel, cache_last_time, cache_last_channel_len), self.convolution)
        outputs, counts, after = self.step(audio_signal.transpose(1, 2), length, state)
        final = outputs.shape[1] - self.step.ahead  # sherpa-onnx has only full windows, and takes all outputs
        return self.output(outputs[:, :final]), counts.clamp(max=final) * self.repeats, *packed(after)


class SherpaStream(Target):
    """The recogniser for streams, in chunks of one size; raises if sherpa-onnx can't run it."""

    name = layout.SHERPA_STREAM
    output: ClassVar[str]
    """The name of the model's first output."""
    section: ClassVar[str]
    """The template of the section of README.md that shows how to run it."""

    def __init__(self, acoustic_model: AcousticModel, milliseconds: int, compared: Compare):
        graph = StreamingGraph(acoustic_model)
        bank = graph.bank
        settings = {**bank.settings, "high": bank.settings["high"] or bank.sample_rate / 2}
        other = ", ".join(f"{name}: {settings[name]}" for name, value in _FEATURES.items() if settings[name] != value)
        if other:
            raise SbkitError("sherpa-mismatch", "sherpa-onnx computes other features for streams than this model was "
                             f"trained on ({other})", key="compute_features",
                             hint="train with the compute_features of hparams/streaming.yaml, or leave "
                             "out --target sherpa")
        self.acoustic_model = acoustic_model
        self.graph = graph
        self.milliseconds = milliseconds
        self.compared = compared
        self.frames = milliseconds * SAMPLE_RATE // _HOP // 1000
        """Features of a window."""
        self.chunk = self.frames // graph.step.subsampling
        self.shift = self.frames - graph.step.ahead * graph.step.subsampling
        """Features from one window to the next."""
        self.bands = graph.bank.mel.shape[1]

    @property
    def tail(self) -> int:
        """Samples of silence that must follow a stream."""
        return self.frames * _HOP

    @abstractmethod
    def open_recognizer(self, folder: Path) -> OnlineRecognizer:
        """Open the written model with sherpa-onnx's own recogniser."""

    @abstractmethod
    def output_layer(self, config: Config) -> tuple[nn.Module, int]:
        """Return the last arguments of ``StreamStep``."""

    def facts(self, config: Config) -> dict[str, object]:
        """Return further metadata of this kind's file."""
        return {}

    def readme(self) -> str:
        return self.section.format(
            file=layout.MODELS[self.name], milliseconds=self.milliseconds, rate=SAMPLE_RATE, version=VERSION,
            tail=SAMPLE_RATE * self.milliseconds // 1000,
            bands="" if self.bands == 80 else f", feature_dim={self.bands}")

    def write(self, folder: Path, config: Config) -> None:
        """Write the model's file."""
        caches = packed(self.graph.step.state(_BATCH))
        example = (torch.randn(_BATCH, self.bands, self.frames), torch.tensor([self.frames, self.frames - 1]), *caches)
        step = StreamStep(self.graph.step, *self.output_layer(config))
        program = trace_module(step, example, dict.fromkeys(INPUTS, (0,)))
        facts = {"window_size": self.frames, "chunk_shift": self.shift,
                 "subsampling_factor": self.graph.step.subsampling, "vocab_size": config.vocabulary - 1,
                 **{f"{name}_dim{i}": size for name, cache in zip(_CACHES[:2], caches[:2], strict=True)
                    for i, size in enumerate(cache.shape[1:], 1)},
                 "comment": f"made by sbkit for sherpa-onnx {VERSION} or later", **self.facts(config)}
        outputs = dict.fromkeys((self.output, "lengths", *(f"{name}_next" for name in _CACHES)), ("batch",))
        write_onnx(program, folder / config.models[self.name], INPUTS, outputs,
                   {name: str(fact) for name, fact in facts.items()})

    def compare(self, folder: Path, config: Config, comparison: Comparison) -> None:
        """Compare sherpa-onnx's transcripts of clips, followed by silence, with the checkpoint's."""
        assert self.acoustic_model.chunks is not None, "others are refused"
        run = reference(self.acoustic_model, chunks=self.acoustic_model.chunks.config(self.chunk))

        def outputs(signal: np.ndarray) -> np.ndarray:
            """Compute the checkpoint's outputs for the windows that sherpa-onnx uses: a frame must follow each."""
            whole = with_silence(signal, self.tail)
            windows = (self.graph.bank.frames(len(whole)) - 1 - self.frames) // self.shift + 1
            return run(whole)[: windows * self.shift // self.graph.step.subsampling]

        streamed = self.compared(comparison.clips, config, folder, Reference(outputs))
        recognizer = self.open_recognizer(folder)
        streamed.add_words(layout.SHERPA, lambda signal: transcribe(recognizer, signal, self.tail),
                           layout.size(folder, config.models[self.name]), same_waveform=True)
        comparison.companions[self.name] = {f"{self.milliseconds} ms": streamed}


def chunk_milliseconds(chunks: Chunks, frame_seconds: float, milliseconds: int | None) -> int:
    """Return the chunk size, which the model must have been trained for; None: the size nearest to 640 ms."""
    sizes = chunks.in_milliseconds(frame_seconds)
    if milliseconds is None:
        return min(sizes, key=lambda each: abs(each - _MILLISECONDS))
    if milliseconds not in sizes:
        raise SbkitError("untrained-chunk", f"--chunk {milliseconds}: the model wasn't trained for chunks of "
                         f"{milliseconds} ms", key="chunk", value=milliseconds,
                         hint=f"it was trained for {', '.join(map(str, sizes))}")
    return milliseconds


def check_version() -> None:
    """Raise if the installed sherpa-onnx is too old to run such a model."""
    from packaging.version import Version

    version = version_of("sherpa-onnx")
    if version is not None and Version(version) < Version(VERSION):
        raise SbkitError("missing-package",
                         f"sherpa-onnx {version} computes other features for streams than this model "
                         f"was trained on: {VERSION} or later is needed", hint=f"pip install 'sherpa-onnx>={VERSION}'")


def imported() -> ModuleType:
    """Import sherpa-onnx, with which each model is tested."""
    try:
        import sherpa_onnx
    except ImportError:
        raise SbkitError("missing-package",
                         "sherpa-onnx is not installed, but is needed to test a model for it before it "
                         "is published", hint="pip install 'sbkit[sherpa]'") from None
    return sherpa_onnx


def transcribe(recognizer: OnlineRecognizer, signal: np.ndarray, tail: int) -> str:
    """Transcribe a signal [S], followed by silence, with sherpa-onnx."""
    stream = recognizer.create_stream()
    stream.accept_waveform(SAMPLE_RATE, with_silence(signal, tail))
    stream.input_finished()
    while recognizer.is_ready(stream):
        recognizer.decode_stream(stream)
    return " ".join(recognizer.get_result(stream).split())


def with_silence(signal: np.ndarray, tail: int) -> np.ndarray:
    """Append ``tail`` samples of silence to a signal [S]."""
    return np.concatenate([signal, np.zeros(tail, np.float32)])
