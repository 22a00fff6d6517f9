"""Cuts audio of any length at pauses into chunks for a model; keeps one chunk in memory at a time.

If a chunk has no pause, the cut goes through speech: then both chunks include some seconds beyond it, and each
contributes only the frames on its side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

#: Seconds between measurements of loudness, and over which they are averaged: the shortest pause.
_STEP, _PAUSE = 0.01, 0.2
#: A pause is this much quieter than the loud parts of its chunk (dB) ...
_BELOW = 25.0
#: ... and must be in the second half of it.
_FROM = 0.5
#: Seconds included beyond a cut through speech.
CONTEXT_SECONDS = 1.5


@dataclass
class Chunk:
    """A signal [S], and which frames of its output to use: ``keep`` of them after ``skip`` (None: all)."""

    signal: np.ndarray
    skip: int
    keep: int | None
    continues: bool = False
    """Whether it ends within speech, which continues in the next chunk."""


def cut(blocks: Iterable[np.ndarray], rate: int, frame_samples: int, chunk_seconds: float) -> Iterator[Chunk]:
    """Cut blocks [S] of a recording into chunks of at most ``chunk_seconds``.

    Cuts are aligned with the model's frames, so that the kept frames of all chunks are the frames of the recording.
    """
    size = max(int(chunk_seconds * rate) // frame_samples, 4) * frame_samples
    context = min(-(-int(CONTEXT_SECONDS * rate) // frame_samples), size // frame_samples // 4) * frame_samples
    waiting: list[np.ndarray] = []
    pending = done = 0  # samples in ``waiting``, and those at its start whose frames were returned
    for block in blocks:
        waiting.append(block)
        pending += len(block)
        while pending > size:
            signal = np.concatenate(waiting)
            (length, pause), beyond = _quietest(signal[done:size], rate, frame_samples), 0
            if not pause:  # the cut goes through speech, and must leave room for what is included beyond it
                beyond, (length, _) = context, _quietest(signal[done : size - context], rate, frame_samples)
            end = done + length
            yield Chunk(signal[: end + beyond], done // frame_samples, length // frame_samples, beyond > 0)
            first = max(end - beyond, 0)
            waiting, pending, done = [signal[first:]], len(signal) - first, end - first
    if pending > done:
        yield Chunk(np.concatenate(waiting), done // frame_samples, None)


def _quietest(signal: np.ndarray, rate: int, frame_samples: int) -> tuple[int, bool]:
    """Return the samples before the quietest point of the second half, in whole frames, and whether it is a pause."""
    step = round(_STEP * rate)
    count = len(signal) // step
    power = np.square(signal[: count * step].reshape(count, step)).mean(axis=1)
    width = round(_PAUSE / _STEP)
    if count <= width:
        return max(len(signal) // frame_samples, 1) * frame_samples, False
    total = np.concatenate([[0.0], np.cumsum(power, dtype=np.float64)])
    smooth = (total[width:] - total[:-width]) / width  # mean of steps i to i + width
    first = int(len(smooth) * _FROM)
    # Of equally quiet points (digital silence), the last gives the longest chunk.
    late = smooth[first:]
    place = first + len(late) - 1 - int(np.argmin(late[::-1]))
    loud = np.quantile(smooth, 0.95)
    pause = bool(smooth[place] <= loud * 10 ** (-_BELOW / 10))
    middle = (place + width / 2) * step
    frames = min(max(round(middle / frame_samples), 1), len(signal) // frame_samples)
    return frames * frame_samples, pause
