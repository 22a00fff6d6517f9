"""Joins the words of a recording's stretches, which end in pauses: all at the end, or as they become final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbkit.decode.spans import Word
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.chunks import Chunk
from sbkit.infer.decoding import DecodedTokens, Decoder, Stretch
from sbkit.infer.transcript import Transcript

_MAX_CHUNKS = 8  # chunks without a pause between them that are decoded together


@dataclass
class Assembly:
    """Assembles the outputs for a recording's chunks, which arrive in any order."""

    parts: dict[int, tuple[np.ndarray, bool]] = field(default_factory=dict)
    """By chunk number: log-probabilities [T, V], and whether the next chunk continues them."""
    stretches: list[Stretch] = field(default_factory=list)
    """The decoder's data for the parts up to each pause."""
    first_open: int = 0
    """Number of the first chunk that is not in a stretch yet."""
    samples: int = 0
    frames: int = 0
    """Frames of the stretches."""
    expected: int | None = None

    @property
    def complete(self) -> bool:
        return self.first_open == self.expected

    def add(self, number: int, chunk: Chunk, log_probs: np.ndarray, frame_samples: int, decoder: Decoder[Any]) -> None:
        """Add the output [T, V] for a chunk; a pause closes the stretch, and speech without one is split after
        ``_MAX_CHUNKS``."""
        if chunk.keep is None:
            used_log_probs = log_probs[chunk.skip :]
            self.samples += len(chunk.signal) - chunk.skip * frame_samples
        else:
            used_log_probs = log_probs[chunk.skip : chunk.skip + chunk.keep]
            self.samples += chunk.keep * frame_samples
        # A copy: a view would keep the whole batch in memory.
        self.parts[number] = used_log_probs.copy(), chunk.continues

        end = self.first_open
        while end in self.parts:
            continues = self.parts[end][1]
            end += 1
            if not continues or end - self.first_open >= _MAX_CHUNKS:
                parts = [self.parts.pop(i)[0] for i in range(self.first_open, end)]
                joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
                self.stretches.append(decoder.keep(joined))
                self.frames += len(joined)
                self.first_open = end


def join_tokens(parts: Sequence[DecodedTokens], vocabulary: Vocabulary) -> list[Word]:
    """Join a recording's tokens into words."""
    spelling = vocabulary.spelling
    return [word for part in parts for word in spelling.words(part.spans, part.frame * spelling.frame_seconds)]


def make_transcript(name: str, assembly: Assembly, words: list[Word], vocabulary: Vocabulary) -> Transcript:
    config = vocabulary.config
    return Transcript(name, vocabulary.text(words), words, assembly.samples / config.sample_rate, config.language,
                      config.word_separator is not None)


class StableWords:
    """Takes stretches in order and settles words. Settled words never change; after :meth:`end`, they are the same as
    from decoding all stretches together.

    If a word may continue in the next stretch, it is settled once another word has begun or a pause has followed; only
    frames after it are decoded again.
    """

    def __init__(self, decoder: Decoder[Any], vocabulary: Vocabulary):
        self._decoder = decoder
        self._vocabulary = vocabulary
        self._open: list[Stretch] = []  # stretches whose words may change
        self._first = 0  # their first frame in the recording
        self._frames = 0  # their number of frames
        self._decode_at = 0  # they are decoded again when they have more frames than this
        self.words: list[Word] = []
        """The settled words."""

    def add(self, stretches: Sequence[Stretch]) -> None:
        """Add stretches as returned by the decoder's ``keep``."""
        self._open += stretches
        self._frames += sum(stretch.frames for stretch in stretches)
        if not self._decoder.joins:
            self.end()
        elif self._frames > self._decode_at:
            self._settle_words()

    def _settle_words(self) -> None:
        """Settle all words if a pause follows them, otherwise those before the last one."""
        parts = self._decode()
        open_words = join_tokens(parts, self._vocabulary)
        end = self._first + self._frames
        last_token_end = max((int(part.frame + part.spans.ends[-1]) for part in parts if len(part.spans)),
                             default=self._first)
        if end - last_token_end >= self._vocabulary.spelling.pause:
            self.words += open_words
            self._restart_at(end)
            return

        for count in range(len(open_words) - 1, 0, -1):
            # Don't cut through a token that ends one word and begins the next.
            if open_words[count].start >= open_words[count - 1].end:
                self.words += open_words[:count]
                self._restart_at(round(open_words[count].start / self._vocabulary.config.frame_seconds))
                break
        # The length to decode again doubles, so that an endless word stays cheap.
        self._decode_at = 2 * self._frames

    def end(self) -> None:
        """Settle the remaining words: the recording is over."""
        if self._frames:
            self.words += join_tokens(self._decode(), self._vocabulary)
            self._restart_at(self._first + self._frames)

    def _decode(self) -> list[DecodedTokens]:
        return [DecodedTokens(self._first + part.frame, part.spans) for part in self._decoder.tokens([self._open])[0]]

    def _restart_at(self, frame: int) -> None:
        self._open = self._decoder.after(self._open, frame - self._first)
        self._frames -= frame - self._first
        self._first = frame
        self._decode_at = 0
