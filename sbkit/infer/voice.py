"""The Python API of a voice: load a bundle and speak text, to samples and the times of their words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sbkit.errors import SbkitError, shown
from sbkit.export.layout import VoiceConfig
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.formats import AUTO
from sbkit.infer.sentences import Phrase, PhraseReader
from sbkit.infer.voice_engine import SpeechInput, SpeechOutput, VoiceEngine

if TYPE_CHECKING:
    from typing_extensions import Self

SLOWEST, FASTEST = 0.25, 4.0


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


def spoken(phrase: Phrase, sound: SpeechOutput, config: VoiceConfig, pause: float) -> Speech:
    """Return a phrase's speech, after ``pause`` seconds of silence."""
    silence = np.zeros(round(pause * config.sample_rate), dtype=np.float32)
    ends = silence.size / config.sample_rate + np.cumsum(sound.frames) * config.frame_seconds
    starts = ends - sound.frames * config.frame_seconds
    words = [SpokenWord(text, float(starts[begin]), float(ends[end - 1])) for text, begin, end in phrase.words]
    return Speech(phrase.text, np.concatenate([silence, sound.samples]), config.sample_rate, words, [phrase.text])


def pauses(phrases: Iterator[Phrase], speed: float) -> Iterator[tuple[Phrase, float]]:
    """Yield each phrase with the seconds of silence before it."""
    before = 0.0
    for phrase in phrases:
        yield phrase, before / speed
        before = phrase.pause


def joined(parts: Sequence[Speech], phrases: Sequence[Phrase]) -> Speech:
    """Join the speech of a text's phrases."""
    words: list[SpokenWord] = []
    sentences: list[str] = []
    samples = 0
    in_sentence = False
    for part, phrase in zip(parts, phrases, strict=True):
        offset = samples / part.sample_rate
        words += [word._replace(start=word.start + offset, end=word.end + offset) for word in part.words]
        samples += len(part.samples)
        if in_sentence:
            sentences[-1] += f" {phrase.text}"
        else:
            sentences.append(phrase.text)
        in_sentence = not phrase.ends
    return replace(parts[0], text=" ".join(sentences), samples=np.concatenate([part.samples for part in parts]),
                   words=words, sentences=sentences)


class _PendingSpeech(NamedTuple):
    """A phrase that is being computed, and the seconds of silence before it."""

    phrase: Phrase
    pause: float
    outputs: Future[list[SpeechOutput]]

    def speech(self, config: VoiceConfig) -> Speech:
        """Wait for the phrase's speech."""
        [output] = self.outputs.result()
        return spoken(self.phrase, output, config, self.pause)


class Voice(LoadedBundle[VoiceEngine]):
    """A loaded voice, which any number of threads may call."""

    @classmethod
    def open(cls, bundle: str | Path, model: str = AUTO, device: str = AUTO, threads: int | None = None) -> Self:
        return cls(VoiceEngine(bundle, model, device, threads))

    @property
    def voices(self) -> list[str]:
        """The names of its voices; the first is the default."""
        return list(self.engine.config.speakers)

    def speak(self, text: str, voice: str | None = None, speed: float = 1.0, skip_unknown: bool = False) -> Speech:
        """Speak a text of any length.

        voice : one of :attr:`voices`; None: the first
        speed : 0.25 to 4
        skip_unknown : skip characters that the voice never learnt, instead of raising an error that names them

        Raises ``SbkitError`` before anything is spoken if a part of the text can't be.
        """
        phrases = self.phrases(text, skip_unknown)
        return joined(list(self._say(iter(phrases), voice, speed)), phrases)

    def stream(self, text: str, voice: str | None = None, speed: float = 1.0, skip_unknown: bool = False,
               ) -> Iterator[Speech]:
        """Speak a text phrase by phrase; each is computed while the one before is played.

        The arguments and errors are those of :meth:`speak`.
        """
        return self._say(iter(self.phrases(text, skip_unknown)), voice, speed)

    def phrases(self, text: str, skip_unknown: bool = False) -> list[Phrase]:
        """Check a text, and split it into phrases."""
        return list(PhraseReader(self.engine.config, skip_unknown).read(text))

    def say(self, text: Iterable[str], voice: str | None = None, speed: float = 1.0, skip_unknown: bool = False,
            ) -> Iterator[Speech]:
        """Speak a text that comes in blocks, such as a book's, in bounded memory.

        Raises when it reaches something that can't be spoken; text before it may have been spoken.
        """
        return self._say(PhraseReader(self.engine.config, skip_unknown).read(text), voice, speed)

    def _say(self, phrases: Iterator[Phrase], voice: str | None, speed: float) -> Iterator[Speech]:
        # Not a generator, so that wrong arguments raise when it is called.
        return self._spoken(phrases, speaker_of(self.engine.config, voice), check_speed(speed))

    def _spoken(self, phrases: Iterator[Phrase], speaker: int, speed: float) -> Iterator[Speech]:
        pending: _PendingSpeech | None = None  # computed while the one before is played
        try:
            for phrase, pause in pauses(phrases, speed):
                outputs = self.engine.submit([SpeechInput(phrase.ids, speaker, speed)])
                if pending is not None:
                    yield pending.speech(self.engine.config)
                pending = _PendingSpeech(phrase, pause, outputs)
            if pending is not None:
                yield pending.speech(self.engine.config)
        finally:
            if pending is not None:
                pending.outputs.cancel()


def speaker_of(config: VoiceConfig, name: str | None) -> int:
    """Return a speaker's number by name; None: the first."""
    if name is None:
        return 0
    if name not in config.speakers:
        raise SbkitError("voice-not-found", f"there is no voice {shown(name)}",
                         hint=f"use {', '.join(config.speakers)}", key="voice", value=name)
    return config.speakers.index(name)


def check_speed(speed: object) -> float:
    """Return a speed as a float; raises if it is invalid."""
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not SLOWEST <= speed <= FASTEST:
        raise SbkitError("bad-value", f"speed is {shown(speed)}, but must be a number from {SLOWEST:g} to {FASTEST:g}",
                         key="speed", value=speed)
    return float(speed)
