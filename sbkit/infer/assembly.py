"""Collects a recording's model output as stretches that end in pauses, and joins their words."""

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
        """Whether the whole recording is in stretches."""
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
    """Make the transcript of a whole recording from its words."""
    config = vocabulary.config
    return Transcript(name, vocabulary.text(spoken), spoken, heard.samples / config.sample_rate, config.language,
                      config.word_separator is not None)
