"""A voice's output: samples, and the times of their words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sbkit.export.layout import VoiceConfig
from sbkit.infer.sentences import Phrase
from sbkit.infer.voice_engine import SpeechOutput


class SpokenWord(NamedTuple):
    """A word and its times in seconds."""

    text: str
    start: float
    end: float


@dataclass
class Speech:
    """A spoken text."""

    text: str
    """The text in the voice's symbols."""
    samples: np.ndarray
    """Float32 [S] from -1 to 1."""
    sample_rate: int
    words: list[SpokenWord]
    """Times count from the first sample."""
    sentences: list[str]

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


def spoken(piece: Phrase, sound: SpeechOutput, config: VoiceConfig, pause: float) -> Speech:
    """Return a phrase's speech, after ``pause`` seconds of silence."""
    silence = np.zeros(round(pause * config.sample_rate), dtype=np.float32)
    ends = silence.size / config.sample_rate + np.cumsum(sound.frames) * config.frame_seconds
    starts = ends - sound.frames * config.frame_seconds
    words = [SpokenWord(text, float(starts[begin]), float(ends[end - 1])) for text, begin, end in piece.words]
    return Speech(piece.text, np.concatenate([silence, sound.samples]), config.sample_rate, words, [piece.text])


def pauses(pieces: Iterator[Phrase], speed: float) -> Iterator[tuple[Phrase, float]]:
    """Yield each phrase with the seconds of silence before it."""
    before = 0.0
    for piece in pieces:
        yield piece, before / speed
        before = piece.pause


def joined(parts: Sequence[Speech], pieces: Sequence[Phrase]) -> Speech:
    words: list[SpokenWord] = []
    sentences: list[str] = []
    samples, in_sentence = 0, False
    for part, piece in zip(parts, pieces, strict=True):
        offset = samples / part.sample_rate
        words += [word._replace(start=word.start + offset, end=word.end + offset) for word in part.words]
        samples += len(part.samples)
        if in_sentence:
            sentences[-1] += f" {piece.text}"
        else:
            sentences.append(piece.text)
        in_sentence = not piece.ends
    return replace(parts[0], text=" ".join(sentences), samples=np.concatenate([part.samples for part in parts]),
                   words=words, sentences=sentences)
