"""Cuts a stream's samples into the windows for its graph. Needs only numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sbkit.export.layout import Config


class Window(NamedTuple):
    """The input of a graph for one chunk."""

    samples: np.ndarray
    """``[S]`` float32."""
    frames: int
    """Valid feature frames; fewer than in others only in a stream's last window."""


class Windows:
    """The windows of one stream, as its samples arrive. Keeps less than two windows of samples.

    config : of a streaming model
    chunk : output frames of a chunk, one of the model's sizes
    """

    def __init__(self, config: Config, chunk: int):
        assert config.streaming is not None, "only for streaming models"
        self.hop = config.hop_samples
        self.before = config.streaming.before
        self.after = config.streaming.after
        self.size = self.hop + config.streaming.overlap
        """Samples of a feature frame."""
        self.samples = config.window(chunk)
        """Samples of a window."""
        self.frames = chunk * config.subsampling
        """Feature frames of a full window."""
        self.moves = self.frames - config.streaming.ahead * config.subsampling
        """Feature frames from the first of a full window to the first of the next."""
        self.seconds = self.moves * self.hop / config.sample_rate
        """Seconds that a full window adds."""
        self.reset()

    def reset(self) -> None:
        """Begin another stream."""
        self.received = 0
        """Samples received."""
        self.next_frame = 0
        """The first feature frame of the next window."""
        self._kept = np.zeros(0, np.float32)
        self._start = 0  # the first of the samples that are kept

    @property
    def wanted(self) -> int:
        """How many more samples the next window needs."""
        return self._first() + self.samples - self.received

    def feed(self, samples: np.ndarray) -> list[Window]:
        """Take the next samples [N], any number of them, and return the windows that they complete."""
        self._kept = np.concatenate([self._kept, np.asarray(samples, np.float32)])
        self.received += len(samples)
        windows = []
        while self.wanted <= 0:
            windows.append(self._next(self.frames))
        # What neither the next window nor the mirror image at the end will need is dropped.
        start = min(self._first(), self.received - self.size)
        if start > self._start:
            self._kept = self._kept[start - self._start:].copy()
            self._start = start
        return windows

    def finish(self) -> list[Window]:
        """Return the windows that remain at the stream's end; then another one may begin."""
        windows = []
        frames_left = (self.before + self.received + self.after - self.size) // self.hop + 1 - self.next_frame
        while frames_left > 0:
            windows.append(self._next(min(frames_left, self.frames)))
            if frames_left < self.frames:
                break
            frames_left -= self.moves
        self.reset()
        return windows

    def _first(self) -> int:
        """Return the index of the next window's first sample; below 0: in the mirror image."""
        return self.next_frame * self.hop - self.before

    def _next(self, frames: int) -> Window:
        window = np.zeros(self.samples, np.float32)
        first = self._first()
        used = (frames - 1) * self.hop + self.size
        if first >= 0 and first + used <= self.received:
            window[:used] = self._kept[first - self._start:][:used]
        else:
            indices = np.arange(first, first + used) % (2 * self.received)
            indices = np.minimum(indices, 2 * self.received - 1 - indices)  # beyond an end: its mirror image
            window[:used] = self._kept[indices - self._start]
        self.next_frame += self.moves
        return Window(window, frames)
