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
#: Seconds before a chunk that the detector gets first: it takes music at the beginning of its input for speech.
_LEAD_SECONDS = 3.0
#: Seconds at the end of its input where a word that begins may not be marked yet: the detector needs some frames of it,
#: and then marks some before it, too.
_UNSURE_SECONDS = 0.4
#: The log-probability of a token during silence.
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
    """Whether somebody speaks in each of its frames, [T] bool; None: unknown, and the model decides."""

    @property
    def silent(self) -> bool:
        """Whether nobody speaks for certain, so that the model needn't run."""
        return self.spoken is not None and not self.spoken.any()

    def output(self, log_probs: np.ndarray | None, blank_id: int, vocabulary: int) -> np.ndarray:
        """Return the model's output [T, V] with blanks during silence; None: it didn't run."""
        if self.spoken is None:
            assert log_probs is not None, "the model runs on each chunk that isn't known to be silent"
            return log_probs
        silence = np.full(vocabulary, _NEVER, np.float32)
        silence[blank_id] = 0.0
        if log_probs is None:
            return np.tile(silence, (len(self.spoken), 1))
        frames = np.minimum(np.arange(len(log_probs)), len(self.spoken) - 1)  # a model may output a frame more
        return np.where(self.spoken[frames, None], log_probs, silence)


def cut(blocks: Iterable[np.ndarray], rate: int, frame_samples: int, chunk_seconds: float,
        detector: Callable[[np.ndarray, int], np.ndarray] | None = None) -> Iterator[Chunk]:
    """Cut blocks [S] of a recording into chunks of at most ``chunk_seconds``.

    detector : maps a waveform [S] and the samples of a frame to whether somebody speaks in each frame, [T] bool

    Cuts are aligned with the model's frames, so that the kept frames of all chunks are the frames of the recording.
    """
    size = max(int(chunk_seconds * rate) // frame_samples, 4) * frame_samples
    context = min(-(-int(CONTEXT_SECONDS * rate) // frame_samples), size // frame_samples // 4) * frame_samples
    unsure_frames = -(-int(_UNSURE_SECONDS * rate) // frame_samples)
    detection = _Detection(detector, frame_samples, int(_LEAD_SECONDS * rate) // frame_samples * frame_samples)
    waiting: list[np.ndarray] = []
    pending = 0  # samples in ``waiting``
    returned = 0  # samples at its start whose frames were returned
    for block in blocks:
        waiting.append(block)
        pending += len(block)
        while pending > size:
            signal = np.concatenate(waiting)
            spoken = detection(signal[:size])
            gap = None
            if spoken is not None:
                gap = _longest_gap(spoken[returned // frame_samples : -unsure_frames])

            beyond = 0  # samples that are included beyond the cut
            if gap is not None:
                length = gap * frame_samples
            else:
                length, is_pause = _quietest(signal[returned:size], rate, frame_samples)
                if not is_pause:  # the cut goes through speech, and must leave room for what is included beyond it
                    beyond = context
                    length, _ = _quietest(signal[returned : size - context], rate, frame_samples)

            end = returned + length
            yield Chunk(signal[: end + beyond], returned // frame_samples, length // frame_samples, beyond > 0,
                        None if spoken is None else spoken[: (end + beyond) // frame_samples])
            first = max(end - beyond, 0)  # of the next chunk
            detection.drop(signal[:first])
            waiting = [signal[first:]]
            pending = len(signal) - first
            returned = end - first
    if pending > returned:
        signal = np.concatenate(waiting)
        yield Chunk(signal, returned // frame_samples, None, spoken=detection(signal))


class _Detection:
    """Detects speech in signals that follow each other, with the audio before each.

    detector : as for ``cut``; None: nothing is detected
    lead : samples before a signal that the detector gets, too; whole frames
    """

    def __init__(self, detector: Callable[[np.ndarray, int], np.ndarray] | None, frame_samples: int, lead: int):
        self._detector = detector
        self._frame_samples = frame_samples
        self._max_lead = lead
        self._lead: np.ndarray = np.zeros(0, np.float32)

    def __call__(self, signal: np.ndarray) -> np.ndarray | None:
        """Map a signal [S] to whether somebody speaks in each frame, [T] bool; None without a detector."""
        if self._detector is None:
            return None
        spoken = self._detector(np.concatenate([self._lead, signal]), self._frame_samples)
        return spoken[len(self._lead) // self._frame_samples :]

    def drop(self, signal: np.ndarray) -> None:
        """Take the samples [S] between the starts of the last signal and of the next one."""
        self._lead = np.concatenate([self._lead, signal])[-self._max_lead :]


def _longest_gap(spoken: np.ndarray) -> int | None:
    """Return the frame in the middle of the longest gap without speech in the second half of [T] bool, if any."""
    half = int(len(spoken) * _FROM)
    edges = np.flatnonzero(np.diff(np.concatenate([[True], spoken[half:], [True]])))
    starts = edges[::2]
    ends = edges[1::2]
    if not len(starts):
        return None
    longest = int(np.argmax(ends - starts))
    return half + max(1, int(starts[longest] + ends[longest]) // 2)


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
