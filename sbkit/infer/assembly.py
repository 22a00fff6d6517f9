"""Joins the words of a recording's stretches, which end in pauses: at its end, or as they become final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbkit.decode.spans import PAUSE_SECONDS, Word
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.chunks import Chunk
from sbkit.infer.decoding import DecodedTokens, Decoder
from sbkit.infer.transcript import Transcript

_LONGEST = 8  # most chunks without a pause between them that are decoded together


@dataclass
class Assembly:
    """Assembles a recording whose chunks arrive in any order."""

    parts: dict[int, tuple[np.ndarray, bool]] = field(default_factory=dict)
    """By chunk number: log-probabilities [T, V], and whether the next chunk continues them."""
    stretches: list[Any] = field(default_factory=list)
    """The decoder's data for the parts up to each pause."""
    begun: int = 0
    """Number of the first chunk that is not in a stretch yet."""
    samples: int = 0
    frames: int = 0
    """Frames of the stretches."""
    expected: int | None = None

    @property
    def whole(self) -> bool:
        return self.begun == self.expected

    def add(self, number: int, chunk: Chunk, log_probs: np.ndarray, frame_samples: int, decoder: Decoder) -> None:
        """Add the output [T, V] for a chunk; a stretch is closed where a pause ends it."""
        if chunk.keep is None:
            stop, samples = None, len(chunk.signal) - chunk.skip * frame_samples
        else:
            stop, samples = chunk.skip + chunk.keep, chunk.keep * frame_samples
        # A copy: a view would keep the whole batch in memory.
        self.parts[number] = log_probs[chunk.skip : stop].copy(), chunk.goes_on
        self.samples += samples
        self._close(decoder)

    def _close(self, decoder: Decoder) -> None:
        """Turn chunks up to a pause into stretches; speech without pauses is split after some chunks."""
        end = self.begun
        while end in self.parts:
            goes_on = self.parts[end][1]
            end += 1
            if not goes_on or end - self.begun >= _LONGEST:
                parts = [self.parts.pop(i)[0] for i in range(self.begun, end)]
                joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
                self.stretches.append(decoder.keep(joined))
                self.frames += len(joined)
                self.begun = end


def words(found: Sequence[DecodedTokens], vocabulary: Vocabulary) -> list[Word]:
    """Join a recording's tokens into words. No word continues over a pause: a model that was trained on single
    sentences has never seen one begin after another, and may not mark the word's start."""
    frame = vocabulary.config.frame_seconds
    return [word for part in found for word in vocabulary.words(part.spans, part.frame * frame, PAUSE_SECONDS)]


def transcript(name: str, heard: Assembly, spoken: list[Word], vocabulary: Vocabulary) -> Transcript:
    config = vocabulary.config
    return Transcript(name, vocabulary.text(spoken), spoken, heard.samples / config.sample_rate, config.language,
                      config.word_separator is not None)


class StableWords:
    """Takes stretches in order and settles words. Settled words never change; after :meth:`end`, all of them are what
    decoding all stretches together gives.

    If a word may continue past the end of a stretch, it is settled once the next word has begun or a pause followed;
    only what comes after is decoded again.
    """

    def __init__(self, decoder: Decoder, vocabulary: Vocabulary):
        self._decoder, self._vocabulary = decoder, vocabulary
        self._open: list[Any] = []  # stretches whose words may change
        self._first = 0  # frame of the recording at which they begin
        self._frames = 0  # their number of frames
        self._enough = 0
        self.words: list[Word] = []
        """The settled words."""

    def more(self, stretches: Sequence[Any]) -> None:
        """Add stretches as returned by the decoder's ``keep``."""
        self._open += stretches
        self._frames += sum(map(self._decoder.frames, stretches))
        if not self._decoder.joins:
            self.end()
        elif self._frames > self._enough:
            found = self._found()
            self._finalise(words(found, self._vocabulary), self._first + int(max(
                (part.frame + part.spans.ends[-1] - self._first for part in found if len(part.spans)), default=0)))

    def end(self) -> None:
        """Settle the remaining words: the recording is over."""
        if self._frames:
            self.words += words(self._found(), self._vocabulary)
            self._go_on_from(self._first + self._frames)

    def _found(self) -> list[DecodedTokens]:
        return [DecodedTokens(self._first + part.frame, part.spans) for part in self._decoder.tokens([self._open])[0]]

    def _finalise(self, heard: list[Word], heard_until: int) -> None:
        frame, end = self._vocabulary.config.frame_seconds, self._first + self._frames
        if (end - heard_until) * frame >= PAUSE_SECONDS:
            self.words += heard
            self._go_on_from(end)
            return
        # A token may end one word and begin the next; don't cut through it.
        count = next((i for i in range(len(heard) - 1, 0, -1) if heard[i].start >= heard[i - 1].end), 0)
        if count:
            self.words += heard[:count]
            self._go_on_from(round(heard[count].start / frame))
        #: The length that is decoded again doubles each time nothing settles, so that an endless word stays cheap.
        self._enough = 2 * self._frames

    def _go_on_from(self, frame: int) -> None:
        self._open = self._decoder.after(self._open, frame - self._first)
        self._frames -= frame - self._first
        self._first, self._enough = frame, 0
