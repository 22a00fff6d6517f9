"""What has been heard of a stream so far, and how its tokens are written; needs only numpy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbkit.decode.spans import PAUSE_SECONDS, WORD_START, TokenSpans, Word, WordTokens, grouped, refuse_scores, written
from sbkit.errors import SbkitError

#: A word, or what waits for a word to be settled, is ended after this long: a stream has to be bounded.
LONGEST_SECONDS = 10.0


@dataclass(frozen=True)
class StreamResult:
    """What is new after a piece of a stream. Times are seconds from the first sample."""

    settled: list[Word]
    """Words that nothing can change any more, since the last ``StreamResult``."""
    partial: list[Word]
    """All words after the settled ones: they may change."""
    endpoint: bool
    """The line is over: its last word was followed by a pause, or by the end of the stream."""
    seconds: float
    """Until when it was heard."""


def within(heard: StreamResult, seconds: float) -> StreamResult:
    """Bound what was heard by the seconds of audio that there were: the last frame may reach beyond them."""
    if heard.seconds <= seconds:
        return heard
    settled, partial = ([replace(word, end=min(word.end, seconds)) for word in words]
                        for words in (heard.settled, heard.partial))
    return replace(heard, settled=settled, partial=partial, seconds=seconds)


class StreamSearch(ABC):
    """Decodes one stream. What it has heard after a number of frames doesn't depend on how they were cut in pieces."""

    quick: bool
    """Whether a piece takes less time than handing it to another thread would."""

    @abstractmethod
    def feed(self, scores: np.ndarray) -> list[StreamResult]:
        """Decode what a model gave for frames, such as log-probabilities [T, V]: one ``StreamResult`` for each line
        that ends there, and one for the line in progress. Refused ones leave the stream unchanged."""

    @abstractmethod
    def finish(self) -> StreamResult:
        """Settle what is left: the stream is over."""


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
        """The most frames of a word, or of what waits for a word to be settled."""
        return LONGEST_SECONDS / self.frame_seconds

    def groups(self, spans: TokenSpans, longest: float | None = None) -> list[WordTokens]:
        """Assign the tokens of a stretch to words."""
        return grouped(spans, self.symbols.__getitem__, skip=self.silent, separator=self.separator, pause=self.pause,
                       longest=longest)

    def write(self, groups: Sequence[WordTokens], spans: TokenSpans) -> list[Word]:
        """Write the words of ``spans``, whose frames count from the first of the stream."""
        return written(groups, spans, self.frame_seconds)

    def after_pause(self, end: int) -> int:
        """The first frame by which a pause has followed a token that ended at frame ``end``."""
        frame = end + math.floor(self.pause)
        return frame if frame - end >= self.pause else frame + 1

    def check(self, log_probs: np.ndarray) -> None:
        """Refuse what can't be log-probabilities [T, V] of these tokens."""
        if log_probs.ndim != 2 or log_probs.shape[1] != len(self.symbols) or log_probs.dtype.kind != "f":
            raise SbkitError(f"a piece of a stream is {log_probs.dtype} {[*log_probs.shape]}, but must be float "
                             f"[frames, {len(self.symbols)}]", hint="do the tokens belong to this model?")
        best = log_probs.max(-1) if len(log_probs) else np.zeros(0)
        wrong = np.flatnonzero(~np.isfinite(best))
        if len(wrong):
            raise SbkitError(f"the model's output for frame {wrong[0]} of a piece of a stream is not a number",
                             hint="are the samples numbers? otherwise the model's weights may be damaged")
        refuse_scores(best)


def settled(groups: Sequence[WordTokens]) -> tuple[int, int]:
    """Count the words [of groups] that the tokens after them can't change, and give the first token of the rest.

    A word is settled once a token that says nothing of it has begun the next.
    """
    count = next((i for i in range(len(groups) - 1, 0, -1) if groups[i].alone), 0)
    return count, groups[count].opener if count else 0
