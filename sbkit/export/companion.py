"""What a task adds for each further graph of its model, and for each file that another program runs as it is."""

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
OwnBundle = Any  # of a class that only a subclass of ``Exported`` knows


class Companion(ABC):
    """Another graph of a task's model, in the bundle beside the one from whole waveforms to tensors.

    It is written in each format of an export that it has a file for. Each is compared with the checkpoint in every way
    in which it can be run, such as by chunks of each size; batches must give what utterances alone do.
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
        """Write into the bundle's configuration what a program needs to know to run these files, one per format."""

    def metadata(self, config: OwnBundle) -> dict[str, str]:
        """Return the metadata to put into ONNX files, for runtimes that read it."""
        return {"sample_rate": str(config.sample_rate), "comment": "made by sbkit", **config.onnx_metadata()}

    @abstractmethod
    def comparisons(self, clips: ComparisonClips, config: OwnBundle, folder: Path) -> Mapping[str, Comparison]:
        """Run the checkpoint on the clips, for each way of running the graph."""

    @abstractmethod
    def runners(self, name: str, path: Path, config: OwnBundle) -> Mapping[str, Runner]:
        """Return functions that run a written format, for each way of running the graph."""


class Target(ABC):
    """A model for a program of others, in the bundle beside the task's own formats, as ``--target`` asks.

    The program itself runs it on the test clips before it is published.
    """

    #: What it is called while it is written and compared.
    name: str

    @abstractmethod
    def write(self, folder: Path, config: OwnBundle) -> None:
        """Write its file, and say in ``config.models`` that it is there."""

    @abstractmethod
    def compare(self, folder: Path, config: OwnBundle, comparison: Comparison) -> None:
        """Have the program run it on the clips, and add what it gave to the comparison or to its companions."""

    @abstractmethod
    def readme(self) -> str:
        """Write the section of README.md that shows how to run it."""
