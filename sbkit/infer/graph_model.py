"""A bundle whose model gives tensors: recordings in, named arrays out, and what the largest stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.device import Placement
from sbkit.infer.engine import Engine
from sbkit.infer.recordings import Recording

#: A model that makes one thing of a whole recording holds all of it at once.
MOST_SECONDS = 600.0
#: The longest that a compiled model is made for.
USUAL_SECONDS = 20.0


@dataclass
class Output:
    """What a model gives for one recording."""

    outputs: dict[str, np.ndarray]
    """By name; padding is cut off."""
    label: str | None = None
    """What the largest value of the first output stands for, where the bundle says it."""


class GraphEngine(Engine):
    """Named arrays of waveforms."""

    config: layout.Graph  # type: ignore[assignment]  # of another kind of bundle

    def run(self, signals: Sequence[np.ndarray]) -> list[Any]:
        """Waveforms [S] to arrays by name; waits for its turn."""
        return self.submit(signals).result()

    def _read(self) -> None:
        self.config = layout.Graph.read(self.folder)

    def _at_once(self) -> float:
        return USUAL_SECONDS

    def _outputs(self) -> Sequence[str]:
        return self.config.outputs

    def _check_width(self, path: Path) -> None:
        width, labels = self._ready.width, self.config.labels
        if labels and width is not None and width != len(labels):
            raise SbkitError(f"{path} gives {width} values and {layout.CONFIG} has {len(labels)} labels",
                             hint="do both come from the same export?")

    def _apart(self, found: Sequence[np.ndarray], count: int) -> list[Any]:
        named = dict(zip(self.config.outputs, found, strict=True))
        lengths = self.config.lengths
        return [{name: value[row, : int(named[lengths[name]][row])] if name in lengths else value[row]
                 for name, value in named.items()} for row in range(count)]


class GraphModel:
    """A model that is ready to use; any number of threads may call it."""

    def __init__(self, engine: GraphEngine):
        self.engine = engine

    @property
    def running(self) -> Placement:
        """The device that was asked for, and the one it runs on."""
        return self.engine.running

    def run(self, audio: Any) -> Output | list[Output]:
        """Run the model on a recording of any format, or on a list of such, which come back in the same order.

        audio : a path, the bytes of a file, a binary file, or float samples [S] at the model's rate
        """
        several = isinstance(audio, list)
        signals = [self._samples(each) for each in (audio if several else [audio])]
        found = [self._output(each) for each in self.engine.run(signals)]
        return found if several else found[0]

    def _samples(self, audio: Any) -> np.ndarray:
        recording = audio if isinstance(audio, Recording) else Recording(audio)
        rate = self.engine.config.sample_rate
        if recording.seconds(rate) > MOST_SECONDS:
            raise SbkitError(f"{recording.name} has {recording.seconds(rate):.0f} s, and this model takes a recording "
                             f"as a whole, up to {MOST_SECONDS:g} s", hint="cut it up")
        return np.concatenate(list(recording.blocks(rate)))

    def _output(self, outputs: dict[str, np.ndarray]) -> Output:
        labels = self.engine.config.labels
        first = outputs[self.engine.config.outputs[0]]
        return Output(outputs, labels[int(first.argmax())] if labels else None)

    def close(self) -> None:
        """Release the model."""
        self.engine.close()

    def __enter__(self) -> GraphModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
