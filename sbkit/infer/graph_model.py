"""Bundles whose model gives tensors: recordings in, named arrays and the best label out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.bundle_engine import Loaded
from sbkit.infer.engine import Engine
from sbkit.infer.recordings import Recording, Source

#: Longest recording in seconds: a model that maps a whole recording to one result holds all of it.
MAX_SECONDS = 600.0
#: Longest recording in seconds that a model is compiled for.
USUAL_SECONDS = 20.0


@dataclass
class Output:
    """A model's output for one recording."""

    outputs: dict[str, np.ndarray]
    """The arrays by name, without padding."""
    label: str | None = None
    """The label of the largest value of the first output, if the bundle has labels."""


class GraphEngine(Engine):
    """Computes named arrays from waveforms."""

    config: layout.GraphConfig  # type: ignore[assignment]  # another kind of bundle

    def run(self, signals: Sequence[np.ndarray]) -> list[Any]:
        """Map waveforms [S] to arrays by name; waits for its turn."""
        return self.submit(signals).result()

    def _read(self) -> None:
        self.config = layout.GraphConfig.read(self.folder)

    def _at_once(self) -> float:
        return USUAL_SECONDS

    def _outputs(self) -> Sequence[str]:
        return self.config.outputs

    def _check_width(self, path: Path) -> None:
        width, labels = self._ready.width, self.config.labels
        if labels and width is not None and width != len(labels):
            raise SbkitError(f"{path} gives {width} values, but {layout.CONFIG} has {len(labels)} labels",
                             hint="do both come from the same export?")

    def _apart(self, found: Sequence[np.ndarray], count: int) -> list[Any]:
        named = dict(zip(self.config.outputs, found, strict=True))
        lengths = self.config.lengths
        return [{name: value[row, : int(named[lengths[name]][row])] if name in lengths else value[row]
                 for name, value in named.items()} for row in range(count)]


class GraphModel(Loaded[GraphEngine]):
    """A loaded model, which any number of threads may call."""

    def run(self, audio: Source | list[Source]) -> Output | list[Output]:
        """Run the model on a recording of any format, or on a list; the results keep the order.

        audio : a path, the bytes of a file, a binary file, or float samples [S] at the model's rate
        """
        signals = [self._samples(each) for each in (audio if isinstance(audio, list) else [audio])]
        found = [self._output(each) for each in self.engine.run(signals)]
        return found if isinstance(audio, list) else found[0]

    def _samples(self, audio: Source) -> np.ndarray:
        recording = audio if isinstance(audio, Recording) else Recording(audio)
        rate = self.engine.config.sample_rate
        if recording.seconds(rate) > MAX_SECONDS:
            raise SbkitError(f"{recording.name} has {recording.seconds(rate):.0f} s, but this model takes a recording "
                             f"as a whole, up to {MAX_SECONDS:g} s", hint="split it")
        return np.concatenate(list(recording.blocks(rate)))

    def _output(self, outputs: dict[str, np.ndarray]) -> Output:
        labels = self.engine.config.labels
        first = outputs[self.engine.config.outputs[0]]
        return Output(outputs, labels[int(first.argmax())] if labels else None)
