"""The end of a live recording that is not settled yet: when to look at it, what to settle, what to forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbkit.decode.spans import Word
from sbkit.infer.chunks import CONTEXT_SECONDS
from sbkit.infer.transcript import PAUSE_SECONDS

#: A look is due after so much new audio, and after this share of the tail: what is looked at again and again
#: costs no more than 1 / SHARE times what it would cost to look once.
EVERY_SECONDS, SHARE = 0.3, 0.1
#: Where no word was heard, so much is kept: one may just begin.
_KEPT_SECONDS = 1.0
#: A pause is cut at most so far behind its word, so that the next word has its beginning.
_BEHIND_WORD_SECONDS = 0.5


@dataclass
class Settlement:
    """Words that will not change any more, and those that may; times from the first sample on."""

    final: list[Word]
    partial: list[Word]
    start: float
    """Of what may change."""


class Tail:
    """Samples at the model's rate.

    Arguments
    ---------
    rate, frame_samples : the model's
    longest : seconds that the model hears at once; then something is settled without a pause
    """

    def __init__(self, rate: int, frame_samples: int, longest: float):
        self._rate, self._frame = rate, frame_samples
        self._longest = int(longest * rate)
        self._context = min(-(-int(CONTEXT_SECONDS * rate) // frame_samples),
                            self._longest // frame_samples // 4)  # frames
        self._signal = np.zeros(0, dtype=np.float32)
        self._more: list[np.ndarray] = []
        self._start = 0  # samples before the tail
        self._skip = 0  # frames at its beginning that were settled before
        self._came = 0
        self._seen = 0

    @property
    def seconds(self) -> float:
        """That came so far."""
        return self._came / self._rate

    @property
    def held(self) -> int:
        """Samples in memory."""
        return self._came - self._start

    @property
    def unseen_seconds(self) -> float:
        """That came since the last look."""
        return (self._came - self._seen) / self._rate

    @property
    def due(self) -> bool:
        """Whether to look."""
        return self.unseen_seconds >= max(EVERY_SECONDS, SHARE * self.held / self._rate)

    def add(self, signal: np.ndarray) -> None:
        """Take samples [S]."""
        if len(signal):
            self._more.append(signal)
            self._came += len(signal)

    def look(self) -> tuple[np.ndarray, int]:
        """What the model should hear now [S], and how many frames of its output to leave out."""
        self._signal = np.concatenate([self._signal, *self._more])
        self._more = []
        seen = self._signal[: self._longest]
        self._seen = self._start + len(seen)
        return seen, self._skip

    def settle(self, words: Sequence[Word], seen: int, skip: int, end: bool = False) -> Settlement:
        """Decide on what the model said of the first ``seen`` samples; times of words count from ``skip`` on."""
        first = (self._start + skip * self._frame) / self._rate
        words = [replace(word, start=word.start + first, end=word.end + first) for word in words]
        until = (self._start + seen) / self._rate
        if end:
            self._forget(until)
            return Settlement(words, [], until)
        count, cut = _pause(words, until)
        if count:
            self._forget(cut)
        elif not words:
            self._forget(until - _KEPT_SECONDS)
        elif seen >= self._longest:
            count, cut = _widest(words, first, until)
            self._forget(cut, context=True)
        return Settlement(words[:count], words[count:], words[count].start if count < len(words) else until)

    def _forget(self, until: float, context: bool = False) -> None:
        """Drop what lies before; cuts lie on the grid of the frames."""
        frames = int(until * self._rate) // self._frame
        kept = min(self._context, frames) if context else 0
        start = max((frames - kept) * self._frame, self._start)
        if frames * self._frame <= self._start + self._skip * self._frame:
            return
        # A copy: a view would keep all that was there in memory.
        self._signal = self._signal[start - self._start :].copy()
        self._start, self._skip = start, frames - start // self._frame


def _pause(words: Sequence[Word], until: float) -> tuple[int, float]:
    """How many words lie before the last pause, and where it is to be cut; 0 where there is none."""
    for count in range(len(words), 0, -1):
        after = words[count].start if count < len(words) else until
        gap = after - words[count - 1].end
        if gap >= PAUSE_SECONDS:
            return count, words[count - 1].end + min(gap / 2, _BEHIND_WORD_SECONDS)
    return 0, 0.0


def _widest(words: Sequence[Word], first: float, until: float) -> tuple[int, float]:
    """The same at the widest gap, in the second half if there is one; a single word goes to the side that it is on."""
    middle = (first + until) / 2
    gaps = [(words[i].start - words[i - 1].end, i) for i in range(1, len(words)) if words[i - 1].end >= middle]
    gaps = gaps or [(words[i].start - words[i - 1].end, i) for i in range(1, len(words))]
    if gaps:
        _, count = max(gaps)
        return count, (words[count - 1].end + words[count].start) / 2
    return (1, until) if words[0].start < middle else (0, middle)
