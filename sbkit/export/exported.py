"""What a task gives to be exported: a graph with named inputs and outputs, and how two of its outputs are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.export import graph, layout, readme
from sbkit.export.clips import Clips
from sbkit.export.parity import Comparison
from sbkit.export.runners import RUNNERS, Runner, each

INPUTS = {"signals": ("batch", "samples"), "lengths": ("batch",)}
#: What ``Exported.config`` gave: a ``layout.Bundle``, whose class a task that derives from ``Exported`` knows.
OwnBundle = Any
_EXAMPLE = (2, 24_000)  # a batch that is traced; sizes of 0 and 1 would count as constants


@dataclass
class Exported:
    """A model of which no more is known than that it makes tensors of waveforms.

    A task whose model is more than that (words, audio) derives from it and says how it is run, looked at and told of.
    """

    graph: nn.Module
    """In evaluation mode on the CPU in fp32: waveforms [B, S] and sample counts [B] to tensors. Each utterance comes
    out of a batch as it does alone."""
    outputs: Mapping[str, tuple[str, ...]]
    """Names of what it gives and of their open dimensions, ``{"scores": ("batch",)}``. An output that is called as an
    open dimension says, of each utterance, how much of that is real."""
    sample_rate: int
    language: str | None = None
    labels: Sequence[str] = field(default_factory=list)
    """What the last dimension of the first output stands for: the largest is what a person is told."""
    examples: tuple[Tensor, ...] | None = None
    """A batch to trace by, where noise of one and a half seconds won't do."""

    #: What ``--target`` may add.
    targets: ClassVar[tuple[str, ...]] = ()

    @property
    def formats(self) -> tuple[str, ...]:
        """Those that it can be written in."""
        return layout.ONNX, layout.INT8, layout.TORCH

    @property
    def judges_words(self) -> bool:
        """Whether a person reads something off its output, by which weights of eight bits can be judged."""
        return bool(self.labels)

    def trace(self) -> torch.export.ExportedProgram:
        """The graph with batch and time left open."""
        batch, samples = _EXAMPLE
        example = self.examples or (torch.randn(batch, samples) * 0.1, torch.tensor([samples, samples * 2 // 3]))
        return graph.trace_module(self.graph.eval(), example, {"signals": (0, 1), "lengths": (0,)})

    def config(self, program: torch.export.ExportedProgram, clips: Clips) -> layout.Bundle:
        """What config.json says of it, but for files and where it comes from."""
        del clips
        shown = [name for name in self.outputs if name not in {part for dims in self.outputs.values() for part in dims}]
        return layout.Graph(
            sample_rate=self.sample_rate, language=self.language, min_samples=graph.least_samples(program),
            outputs=list(self.outputs), labels=list(self.labels),
            lengths={name: self.outputs[name][1] for name in shown if len(self.outputs[name]) > 1
                     and self.outputs[name][1] in self.outputs})

    def write_beside(self, folder: Path, config: OwnBundle) -> None:
        """Files that all formats share."""

    def metadata(self, config: OwnBundle) -> dict[str, str]:
        """What an ONNX file says of itself, for runtimes that look there."""
        return {"sample_rate": str(config.sample_rate), "comment": "made by sbkit"}

    def write(self, name: str, folder: Path, config: OwnBundle, title: str) -> None:
        """Write one of the task's own formats."""
        raise SbkitError(f"there is no way to write {name}")

    def runner(self, name: str, folder: Path, config: OwnBundle) -> Runner:
        """A written format as a function."""
        return RUNNERS[name](folder / layout.MODELS[name], self.outputs, config.min_samples)

    def reference(self, config: OwnBundle) -> Callable[[np.ndarray], np.ndarray]:
        """Waveform [S] to what the checkpoint itself gives for it, alone."""
        @torch.no_grad()
        def run(signal: np.ndarray) -> np.ndarray:
            batch = torch.from_numpy(signal)[None]
            batch = nn.functional.pad(batch, (0, max(0, config.min_samples - len(signal))))
            found = self.graph(batch, torch.tensor([len(signal)]))
            return each(self.outputs, [value.numpy() for value in (found if isinstance(found, tuple) else (found,))])[0]

        return run

    def comparison(self, clips: Clips, config: OwnBundle, folder: Path) -> Comparison:
        """What the formats are held against."""
        del folder
        text = (lambda output: str(self.labels[int(output.argmax())])) if self.labels else None
        return Comparison(clips, self.reference(config), config.sample_rate, text)

    def compare_own(self, name: str, folder: Path, config: OwnBundle, comparison: Comparison, size: int) -> None:
        """Try a target of the task's own, which may give something else than the graph does."""
        raise SbkitError(f"there is no way to run {name}")

    def readme(self, name: str, config: OwnBundle, comparison: Comparison) -> str:
        """README.md of the bundle."""
        return readme.text(name, config, comparison)
