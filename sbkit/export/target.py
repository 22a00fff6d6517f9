"""What a task adds for each file that another program runs as it is: how it is written, and tried in that program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from sbkit.export.companion import OwnBundle
from sbkit.export.parity import Comparison


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
