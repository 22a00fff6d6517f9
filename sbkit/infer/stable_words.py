"""Words of a recording in progress, which become final step by step, so that cost grows linearly with length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbkit.decode.spans import PAUSE_SECONDS, Word
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.assembly import words
from sbkit.infer.decoding import DecodedTokens, Decoder


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
        """Decode the open stretches."""
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
