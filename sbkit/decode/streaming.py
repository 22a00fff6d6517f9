"""The results of a stream so far, and how its tokens are written; needs only numpy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbkit.decode.spans import (
    PAUSE_SECONDS,
    WORD_START,
    TokenSpans,
    Word,
    WordTokens,
    group_tokens,
    refuse_scores,
    write_words,
)
from sbkit.errors import SbkitError

#: A word, or audio without a settled word, ends after this long: a stream's memory has to be bounded.
LONGEST_SECONDS = 10.0


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


@dataclass(frozen=True)
class Spelling:
    """How tokens are written as words.

    symbols : the tokens in order of their ids
    frame_seconds : seconds from one frame to the next
    silent : ids without text, such as the blank
    separator : marks a word's start; None makes every token a word
    """

    symbols: Sequence[str]
    frame_seconds: float
    silent: Collection[int] = (0,)
    separator: str | None = WORD_START

    @property
    def pause(self) -> float:
        """The frames without a token that end a word and a line."""
        return PAUSE_SECONDS / self.frame_seconds

    @property
    def longest(self) -> float:
        """The maximum frames of a word, or of audio without a settled word."""
        return LONGEST_SECONDS / self.frame_seconds

    def groups(self, spans: TokenSpans, longest: float | None = None) -> list[WordTokens]:
        """Assign tokens to words."""
        return group_tokens(spans, self.symbols.__getitem__, skip=self.silent, separator=self.separator,
                            pause=self.pause, longest=longest)

    def write(self, groups: Sequence[WordTokens], spans: TokenSpans) -> list[Word]:
        """Write the words of ``spans``, whose frames count from the first of the stream."""
        return write_words(groups, spans, self.frame_seconds)

    def after_pause(self, end: int) -> int:
        """The frame at which the pause after a token that ended at frame ``end`` is long enough."""
        frame = end + math.floor(self.pause)
        return frame if frame - end >= self.pause else frame + 1

    def check(self, log_probs: np.ndarray) -> None:
        """Raise if these can't be log-probabilities [T, V] of these tokens."""
        if log_probs.ndim != 2 or log_probs.shape[1] != len(self.symbols) or log_probs.dtype.kind != "f":
            raise SbkitError(f"a piece of a stream is {log_probs.dtype} {[*log_probs.shape]}, but must be float "
                             f"[frames, {len(self.symbols)}]", hint="do the tokens belong to this model?")
        best = log_probs.max(-1) if len(log_probs) else np.zeros(0)
        wrong = np.flatnonzero(~np.isfinite(best))
        if len(wrong):
            raise SbkitError(f"the model's output for frame {wrong[0]} of a piece of a stream is not a number",
                             hint="are the samples numbers? otherwise the model's weights may be damaged")
        refuse_scores(best)


def count_settled(groups: Sequence[WordTokens]) -> tuple[int, int]:
    """Return how many words are final, and the first token after them.

    A word is final once a token that has no text of it has begun the next.
    """
    count = next((i for i in range(len(groups) - 1, 0, -1) if groups[i].clean), 0)
    return count, groups[count].first if count else 0
