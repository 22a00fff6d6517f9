"""The unsettled end of a live recording: when to decode it, which words to settle, which samples to drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sbkit.decode.spans import PAUSE_SECONDS, Word
from sbkit.infer.chunks import CONTEXT_SECONDS

#: Decode again after this much new audio, and after this share of the tail: repeated decoding costs at most 1 / SHARE
#: times what decoding once would cost.
EVERY_SECONDS, SHARE = 0.3, 0.1
#: Seconds kept if no word was recognised: one may be starting.
_KEPT_SECONDS = 1.0
#: A pause is cut at most this many seconds after its word, so that the next word keeps its start.
_AFTER_WORD_SECONDS = 0.5


class Tail:
    """The unsettled samples of a live recording, at the model's rate.

    rate, frame_samples : as in the model
    longest : seconds decoded at once; beyond that, words are settled without a pause
    """

    def __init__(self, rate: int, frame_samples: int, longest: float):
        self._rate, self._frame = rate, frame_samples
        self._longest = int(longest * rate)
        self._context = min(-(-int(CONTEXT_SECONDS * rate) // frame_samples),
                            self._longest // frame_samples // 4)  # frames
        self._signal = np.zeros(0, dtype=np.float32)
        self._new: list[np.ndarray] = []
        self.start = 0
        """Samples before the tail."""
        self._skip = 0  # frames at its beginning that were settled before
        self._received = 0
        self._decoded = 0

    @property
    def length(self) -> int:
        return self._received - self.start

    @property
    def undecoded_seconds(self) -> float:
        """The seconds received since the last decoding."""
        return (self._received - self._decoded) / self._rate

    @property
    def due(self) -> bool:
        return self.wanted <= 0

    @property
    def wanted(self) -> float:
        """How many more samples are needed until the tail is decoded."""
        return max(EVERY_SECONDS * self._rate, SHARE * self.length) - (self._received - self._decoded)

    def add(self, signal: np.ndarray) -> None:
        if len(signal):
            self._new.append(signal)
            self._received += len(signal)

    def window(self) -> tuple[np.ndarray, int]:
        """Return the samples [S] to decode now, and how many frames of the output to skip."""
        self._signal = np.concatenate([self._signal, *self._new])
        self._new = []
        signal = self._signal[: self._longest]
        self._decoded = self.start + len(signal)
        return signal, self._skip

    def finalise(self, words: Sequence[Word], samples: int, skip: int, end: bool = False,
                 ) -> tuple[list[Word], list[Word], float]:
        """Settle words decoded from the first ``samples``; their times count from frame ``skip``.

        Returns the final words, those that may change, and the end of the decoded audio in seconds.
        """
        first = (self.start + skip * self._frame) / self._rate
        words = [replace(word, start=word.start + first, end=word.end + first) for word in words]
        until = (self.start + samples) / self._rate
        if end:
            self._drop(until)
            return words, [], until
        count, cut = _last_pause(words, until)
        if count:
            self._drop(cut)
        elif not words:
            self._drop(until - _KEPT_SECONDS)
        elif samples >= self._longest:
            count, cut = _widest_gap(words, first, until)
            self._drop(cut, context=True)
        return words[:count], words[count:], until

    def _drop(self, until: float, context: bool = False) -> None:
        """Drop samples before ``until``; cuts are aligned with frames."""
        frames = int(until * self._rate) // self._frame
        kept = min(self._context, frames) if context else 0
        start = max((frames - kept) * self._frame, self.start)
        if frames * self._frame <= self.start + self._skip * self._frame:
            return
        # A copy: a view would keep the whole old array in memory.
        self._signal = self._signal[start - self.start :].copy()
        self.start, self._skip = start, frames - start // self._frame


def _last_pause(words: Sequence[Word], until: float) -> tuple[int, float]:
    """Find the number of words before the last pause, and where to cut it; 0 if there is none."""
    for count in range(len(words), 0, -1):
        after = words[count].start if count < len(words) else until
        gap = after - words[count - 1].end
        if gap >= PAUSE_SECONDS:
            return count, words[count - 1].end + min(gap / 2, _AFTER_WORD_SECONDS)
    return 0, 0.0


def _widest_gap(words: Sequence[Word], first: float, until: float) -> tuple[int, float]:
    """Find a cut at the widest gap, preferably in the second half; a single word goes to its own side."""
    middle = (first + until) / 2
    gaps = [(words[i].start - words[i - 1].end, i) for i in range(1, len(words)) if words[i - 1].end >= middle]
    gaps = gaps or [(words[i].start - words[i - 1].end, i) for i in range(1, len(words))]
    if gaps:
        _, count = max(gaps)
        return count, (words[count - 1].end + words[count].start) / 2
    return (1, until) if words[0].start < middle else (0, middle)
