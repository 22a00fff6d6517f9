"""The results of a stream so far; needs only numpy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbkit.decode.spans import Word, WordTokens


@dataclass(frozen=True)
class StreamResult:
    """What is new after some samples of a stream. Times are seconds from the first sample."""

    settled: list[Word]
    """Words that have become final since the last ``StreamResult``."""
    partial: list[Word]
    """All words after the settled ones, which may still change."""
    endpoint: bool
    """The line is over: its last word was followed by a pause, or by the end of the stream."""
    seconds: float
    """The end of the audio that was decoded."""


def clip(result: StreamResult, seconds: float) -> StreamResult:
    """Clip a result's times to the length of the audio: the last frame may reach beyond it."""
    if result.seconds <= seconds:
        return result
    settled, partial = ([replace(word, end=min(word.end, seconds)) for word in words]
                        for words in (result.settled, result.partial))
    return replace(result, settled=settled, partial=partial, seconds=seconds)


class StreamSearch(ABC):
    """Decodes one stream. Its results don't depend on how the frames were split into calls of :meth:`feed`."""

    quick: bool
    """Whether :meth:`feed` is faster than handing its frames to another thread."""

    @abstractmethod
    def feed(self, scores: np.ndarray) -> list[StreamResult]:
        """Decode a model's output for frames, such as log-probabilities [T, V]; returns a result for each line that
        ends there, and one for the line in progress. Invalid output leaves the stream unchanged."""

    @abstractmethod
    def finish(self) -> StreamResult:
        """Settle the remaining words: the stream is over."""


def count_settled(groups: Sequence[WordTokens]) -> tuple[int, int]:
    """Return how many words are final, and the first token after them.

    A word is final once a token that has no text of it has begun the next.
    """
    count = next((i for i in range(len(groups) - 1, 0, -1) if groups[i].clean), 0)
    return count, groups[count].first if count else 0
