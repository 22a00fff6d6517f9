"""The export of an enhancer: a graph from waveforms to waveforms, and one for streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.export import graph, layout, readme
from sbkit.export.clips import ComparisonClips
from sbkit.export.companion import Companion
from sbkit.export.exported import Exported
from sbkit.export.parity import Comparison, Reference
from sbkit.export.runners import Runner, open_runner
from sbkit.nn.enhance import Enhancer

OUTPUTS = {"enhanced": ("batch", "enhanced_lengths"), "enhanced_lengths": ("batch",)}
#: Pieces of a stream in which it is compared, in seconds.
PIECES = (0.1, 1.0)
_EXAMPLE = (2, 40)  # streams and frames to trace the streaming graph with


class WholeEnhancer(nn.Module):
    """The graph from noisy signals [B, S] and lengths [B] to enhanced ones."""

    def __init__(self, enhancer: Enhancer):
        super().__init__()
        self.enhancer = enhancer

    def forward(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.enhancer(signals, lengths), lengths.clone()


class EnhancerStep(nn.Module):
    """The graph from pieces of streams [B, T, hop] and their states to enhanced pieces and the next states."""

    def __init__(self, enhancer: Enhancer):
        super().__init__()
        self.enhancer = enhancer

    def forward(self, pieces: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        sound, *after = self.enhancer.step(pieces.flatten(1), state)
        return sound.unflatten(1, (pieces.shape[1], pieces.shape[2])), *after


class EnhancerStreams(Companion):
    """The streaming graph; it is compared with whole clips in pieces of several sizes."""

    name, files = "stream", layout.STREAMS

    def __init__(self, exported: ExportedEnhancer):
        self.exported, self.enhancer = exported, exported.enhancer
        self.names = [f"state_{i}" for i in range(len(self.enhancer.state(1)))]
        state = dict.fromkeys(self.names, ("batch",))
        self.inputs = {"pieces": ("batch", "frames"), **state}  # type: ignore[misc]  # each enhancer has its own
        self.outputs = {"enhanced": ("batch", "frames"), **{f"next_{name}": ("batch",) for name in state}}

    def trace(self) -> torch.export.ExportedProgram:
        batch, frames = _EXAMPLE
        pieces = torch.randn(batch, frames, self.enhancer.hop) * 0.1
        return graph.trace_module(EnhancerStep(self.enhancer).eval(), (pieces, *self.enhancer.state(batch)),
                                  {"pieces": (0, 1), "state": [(0,)] * len(self.names)})

    def describe(self, config: layout.EnhancerConfig, files: Mapping[str, str]) -> None:
        config.streams = dict(files)

    def comparisons(self, clips: ComparisonClips, config: layout.EnhancerConfig, folder: Path
                    ) -> Mapping[str, Comparison]:
        reference = Reference(self.exported.reference(config))
        return {f"{seconds:g} s": Comparison(clips, reference, config.sample_rate)
                for seconds in PIECES}

    def runners(self, name: str, path: Path, config: layout.EnhancerConfig) -> Mapping[str, Runner]:
        call = open_runner(name, path)

        def runner(frames: int) -> Runner:
            def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
                count = -(-(max(map(len, signals)) + config.delay) // (config.hop * frames))
                batch = np.zeros((len(signals), count, frames, config.hop), np.float32)
                for row, signal in zip(batch.reshape(len(signals), -1), signals, strict=True):
                    row[: len(signal)] = signal
                state = [np.zeros((len(signals), *part["shape"]), np.float32) for part in config.state.values()]
                pieces = []
                for i in range(count):
                    sound, *state = call(batch[:, i], *state)
                    pieces.append(sound)
                whole = np.concatenate(pieces, axis=1).reshape(len(signals), -1)[:, config.delay:]
                return [row[: len(signal)] for row, signal in zip(whole, signals, strict=True)]

            return run

        return {f"{seconds:g} s": runner(max(1, round(seconds * config.sample_rate / config.hop)))
                for seconds in PIECES}


@dataclass
class ExportedEnhancer(Exported):
    """An enhancer to export."""

    enhancer: Enhancer = field(kw_only=True)

    formats = layout.ONNX, layout.TORCH  # the sound quality of int8 isn't measured

    @classmethod
    def of(cls, enhancer: Enhancer, sample_rate: int) -> ExportedEnhancer:
        """Export an enhancer in evaluation mode, which isn't changed."""
        return cls(WholeEnhancer(enhancer), OUTPUTS, sample_rate, enhancer=enhancer)

    @property
    def companions(self) -> Sequence[Companion]:
        return (EnhancerStreams(self),)

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> layout.EnhancerConfig:
        state = {f"state_{i}": {"type": "float32", "shape": list(part.shape[1:])}
                 for i, part in enumerate(self.enhancer.state(1))}
        return layout.EnhancerConfig(**vars(super().config(program, clips)), hop=self.enhancer.hop,
                                     delay=self.enhancer.delay, state=state)

    def readme(self, name: str, config: layout.EnhancerConfig, comparison: Comparison,
               of_targets: Sequence[str] = ()) -> str:
        return readme.text(name, config, comparison, [_USE.format(name=name, config=config), *of_targets])


_USE = """### Files and streams

`sbkit enhance {name} clip.mp3 --to enhanced`. `stream.onnx` is a step: pieces [batch, frames, {config.hop}] and a
state, zeros at first, to enhanced pieces, delayed by {config.delay} samples, and the next state.
"""
