"""Cuts audio of any length at pauses into chunks for a model; keeps one chunk in memory at a time.

If a chunk has no pause, the cut goes through speech: then both chunks include some seconds beyond it, and each
contributes only the frames on its side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
#: Seconds before a chunk that the detector hears first: at the beginning of what it hears it takes music for speech.
_HEARD_SECONDS = 3.0
#: Seconds at the end of what it hears where a word that begins may not be marked yet: it first hears some frames of it,
#: and then marks some before it, too.
_UNSURE_SECONDS = 0.4
#: The log-probability of a token where nobody speaks.
_NEVER = -1e4


@dataclass
class Chunk:
    """A signal [S], and which frames of its output to use: ``keep`` of them after ``skip`` (None: all)."""

    signal: np.ndarray
    skip: int
    keep: int | None
    continues: bool = False
    """Whether it ends within speech, which continues in the next chunk."""
    spoken: np.ndarray | None = None
    """Whether somebody speaks in each of its frames, [T] bool; None: it is unknown, and the model decides."""

    @property
    def silent(self) -> bool:
        """Whether it is known that nobody speaks, so that the model needn't run."""
        return self.spoken is not None and not self.spoken.any()

    def output(self, log_probs: np.ndarray | None, blank_id: int, vocabulary: int) -> np.ndarray:
        """Return the model's output [T, V] with blanks where nobody speaks; None: it didn't run, being silent."""
        if self.spoken is None:
            assert log_probs is not None, "a chunk of which nothing is known runs"
            return log_probs
        silence = np.full(vocabulary, _NEVER, np.float32)
        silence[blank_id] = 0.0
        if log_probs is None:
            return np.tile(silence, (len(self.spoken), 1))
        at = np.minimum(np.arange(len(log_probs)), len(self.spoken) - 1)  # a model may output a frame more
        return np.where(self.spoken[at, None], log_probs, silence)


def cut(blocks: Iterable[np.ndarray], rate: int, frame_samples: int, chunk_seconds: float,
        detector: Callable[[np.ndarray, int], np.ndarray] | None = None) -> Iterator[Chunk]:
    """Cut blocks [S] of a recording into chunks of at most ``chunk_seconds``.

    detector : maps a waveform [S] and the samples of a frame to whether somebody speaks in each frame, [T] bool

    Cuts are aligned with the model's frames, so that the kept frames of all chunks are the frames of the recording.
    """
    size = max(int(chunk_seconds * rate) // frame_samples, 4) * frame_samples
    context = min(-(-int(CONTEXT_SECONDS * rate) // frame_samples), size // frame_samples // 4) * frame_samples
    unsure = -(-int(_UNSURE_SECONDS * rate) // frame_samples)
    heard: np.ndarray = np.zeros(0, np.float32)
    most_heard = int(_HEARD_SECONDS * rate) // frame_samples * frame_samples
    waiting: list[np.ndarray] = []
    pending = done = 0  # samples in ``waiting``, and those at its start whose frames were returned
    for block in blocks:
        waiting.append(block)
        pending += len(block)
        while pending > size:
            signal, spoken = np.concatenate(waiting), None
            if detector is not None:
                spoken = detector(np.concatenate([heard, signal[:size]]), frame_samples)[len(heard) // frame_samples:]
            gap = beyond = 0
            if spoken is not None:  # the frame in the middle of the longest gap in the second half, if there is one
                sure = spoken[done // frame_samples:-unsure]
                half = int(len(sure) * _FROM)
                edges = np.flatnonzero(np.diff(np.concatenate([[True], sure[half:], [True]])))
                starts, ends = edges[::2], edges[1::2]  # of gaps
                if len(starts):
                    longest = int(np.argmax(ends - starts))
                    gap = half + max(1, int(starts[longest] + ends[longest]) // 2)
            length, pause = (gap * frame_samples, True) if gap else _quietest(signal[done:size], rate, frame_samples)
            if not pause:  # the cut goes through speech, and must leave room for what is included beyond it
                beyond, (length, _) = context, _quietest(signal[done : size - context], rate, frame_samples)
            end = done + length
            yield Chunk(signal[: end + beyond], done // frame_samples, length // frame_samples, beyond > 0,
                        None if spoken is None else spoken[: (end + beyond) // frame_samples])
            first = max(end - beyond, 0)
            heard = np.concatenate([heard, signal[:first]])[-most_heard:]
            waiting, pending, done = [signal[first:]], len(signal) - first, end - first
    if pending > done:
        signal = np.concatenate(waiting)
        yield Chunk(signal, done // frame_samples, None, spoken=None if detector is None else detector(
            np.concatenate([heard, signal]), frame_samples)[len(heard) // frame_samples:])


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
