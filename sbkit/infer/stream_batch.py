"""The batch of one step: a window and a state of each of many streams in, log-probabilities and next states out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export.layout import Config
from sbkit.export.windows import Window
from sbkit.infer.interface import Interface

#: A stream's state: an array for each name in config.json, without the dimension of the batch.
State = list[np.ndarray]
_SAMPLES, _FRAMES, _LOG_PROBS, _COUNTS, _NEXT = "samples", "frames", "log_probs", "counts", "next_"


def interface(config: Config, chunk: int) -> Interface:
    """Return what a graph takes, by the example of a stream's first chunk of so many output frames, and gives."""
    assert config.streaming is not None, "asked of models that take streams"
    parts = config.streaming.state
    example: dict[str, np.ndarray] = {_SAMPLES: np.zeros((1, config.window(chunk)), np.float32),
                                      _FRAMES: np.zeros(1, np.int64)}
    example |= {name: np.zeros((1, *part["shape"]), part["type"]) for name, part in parts.items()}
    return Interface(example, [_LOG_PROBS, _COUNTS, *(_NEXT + name for name in parts)])


class StreamBatch:
    """Joins streams to what a graph for streams takes, and takes apart what it gives.

    Arguments
    ---------
    config : the bundle's
    max_streams : streams in one batch
    """

    def __init__(self, config: Config, max_streams: int):
        assert config.streaming is not None, "asked of models that take streams"
        self._vocabulary = config.vocabulary
        # Kept for all steps: fresh memory of this size would be zeroed by the system each time.
        self._states = [np.zeros((max_streams, *part["shape"]), part["type"])
                        for part in config.streaming.state.values()]

    def state(self) -> State:
        """Make the state of a stream that begins."""
        return [np.zeros(part.shape[1:], part.dtype) for part in self._states]

    def join(self, windows: Sequence[Window], states: Sequence[State]) -> list[np.ndarray]:
        """Return the inputs of a graph, which the next call overwrites.

        windows : of chunks of one size
        """
        rows = len(windows)
        for batch, parts in zip(self._states, zip(*states, strict=True), strict=True):
            np.stack(parts, out=batch[:rows])
        return [np.stack([window.samples for window in windows]),
                np.array([window.frames for window in windows], np.int64), *(batch[:rows] for batch in self._states)]

    def part(self, found: Sequence[np.ndarray], states: Sequence[State]) -> list[np.ndarray]:
        """Return log-probabilities [T, V] of each stream, and change its state to the next."""
        log_probs, counts, *after = found
        streams = len(states)
        if log_probs.ndim != 3 or {len(log_probs), *counts.shape} != {streams} \
                or [each.shape for each in after] != [(streams, *part.shape) for part in states[0]]:
            raise SbkitError(f"the graph for streams gives {[each.shape for each in found]} for {streams} streams",
                             hint="export it again")
        self._check(log_probs)
        for row, state in enumerate(states):
            for part, batch in zip(state, after, strict=True):
                part[...] = batch[row]
        # Copies: a view would keep the whole batch in memory for as long as one stream's search waits.
        return [row[:count].copy() for row, count in zip(log_probs, counts.tolist(), strict=True)]

    def _check(self, log_probs: np.ndarray) -> None:
        if log_probs.shape[2] != self._vocabulary:
            raise SbkitError(f"the graph for streams gives {log_probs.shape[2]} scores per frame, but there are "
                             f"{self._vocabulary} tokens", hint="do both come from the same export?")
