"""What a program expects of a graph: the names of its inputs, with an example of each, and of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sbkit.errors import SbkitError


@dataclass(frozen=True)
class Interface:
    """The inputs of a graph, in their order and each with an example to prove with that it runs, and its outputs."""

    inputs: Mapping[str, np.ndarray]
    outputs: Sequence[str]

    def check(self, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Refuse a file that has others."""
        if (list(inputs), list(outputs)) != (list(self.inputs), list(self.outputs)):
            raise SbkitError(f"{path} takes {list(inputs)} and gives {list(outputs)}; it must take "
                             f"{list(self.inputs)} and give {list(self.outputs)}",
                             hint="do its files come from the same export?")
