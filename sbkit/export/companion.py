"""Further graphs of a task's model, and model files for other programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from sbkit.export.clips import ComparisonClips
from sbkit.export.parity import Comparison
from sbkit.export.runners import Runner

#: The result of ``Exported.config``: a ``layout.Bundle``.
OwnBundle = Any  # its class depends on the subclass of ``Exported``


class Companion(ABC):
    """Another graph of a task's model, in the bundle in addition to the one from whole waveforms to tensors.

    It is written in each format of an export that it has a file for. Each is compared with the checkpoint in every mode
    of running it, such as with chunks of each size; a batch must have the outputs of its utterances alone.
    """

    #: Its name in tables and in parity.json.
    name: ClassVar[str]
    #: Its file in each of the formats onnx, int8 and torch that it can be written in; int8 is made from onnx.
    files: ClassVar[Mapping[str, str]]
    #: Names of inputs and outputs, in order, and of their dynamic dimensions.
    inputs: ClassVar[Mapping[str, tuple[str, ...]]]
    outputs: Mapping[str, tuple[str, ...]]

    @abstractmethod
    def trace(self) -> torch.export.ExportedProgram:
        """Trace the graph with all of its dynamic dimensions."""

    @abstractmethod
    def describe(self, config: OwnBundle, files: Mapping[str, str]) -> None:
        """Add to the bundle's configuration what a program needs to run these files, one per format."""

    def metadata(self, config: OwnBundle) -> dict[str, str]:
        """Return the metadata to put into ONNX files, for runtimes that read it."""
        return {"sample_rate": str(config.sample_rate), "comment": "made by sbkit", **config.onnx_metadata()}

    @abstractmethod
    def comparisons(self, clips: ComparisonClips, config: OwnBundle, folder: Path) -> Mapping[str, Comparison]:
        """Run the checkpoint on the clips, for each mode of running the graph."""

    @abstractmethod
    def runners(self, name: str, path: Path, config: OwnBundle) -> Mapping[str, Runner]:
        """Return functions that run a written format, for each mode of running the graph."""


class Target(ABC):
    """A model file for another program (``--target``), in addition to the task's formats.

    The program itself runs it on the test clips before it is published.
    """

    #: Its name in the progress bar, in tables and in ``config.models``; ``layout.MODELS`` has its file.
    name: str

    @abstractmethod
    def write(self, folder: Path, config: OwnBundle) -> None:
        """Write its file."""

    @abstractmethod
    def compare(self, folder: Path, config: OwnBundle, comparison: Comparison) -> None:
        """Let the program run it on the clips, and add the results to the comparison or to its companions."""

    @abstractmethod
    def readme(self) -> str:
        """Write the section of README.md that shows how to run it."""
