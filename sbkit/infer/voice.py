"""The Python API of a voice: load a bundle and speak text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sbkit.errors import SbkitError, shown
from sbkit.export import layout
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.sentences import Phrase, PhraseReader
from sbkit.infer.speech import Speech, joined, pauses, spoken
from sbkit.infer.voice_engine import SpeechInput, VoiceEngine

SLOWEST, FASTEST = 0.25, 4.0


class Voice(LoadedBundle[VoiceEngine]):
    """A loaded voice, which any number of threads may call."""

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
        pieces = self.pieces(text, skip_unknown)
        return joined(list(self._say(iter(pieces), voice, speed)), pieces)

    def stream(self, text: str, voice: str | None = None, speed: float = 1.0, skip_unknown: bool = False,
               ) -> Iterator[Speech]:
        """Speak a text phrase by phrase; each is computed while the one before is played.

        The arguments and errors are those of :meth:`speak`.
        """
        return self._say(iter(self.pieces(text, skip_unknown)), voice, speed)

    def pieces(self, text: str, skip_unknown: bool = False) -> list[Phrase]:
        """Check a text, and split it into phrases."""
        return list(PhraseReader(self.engine.config, skip_unknown).read(text))

    def say(self, text: Iterable[str], voice: str | None = None, speed: float = 1.0, skip_unknown: bool = False,
            ) -> Iterator[Speech]:
        """Speak a text that comes in blocks, such as a book's, in bounded memory.

        Raises when it reaches something that can't be spoken; text before it may have been spoken.
        """
        return self._say(PhraseReader(self.engine.config, skip_unknown).read(text), voice, speed)

    def _say(self, pieces: Iterator[Phrase], voice: str | None, speed: float) -> Iterator[Speech]:
        speaker, speed = speaker_of(self.engine.config, voice), check_speed(speed)
        return self._spoken(pieces, speaker, speed)

    def _spoken(self, pieces: Iterator[Phrase], speaker: int, speed: float) -> Iterator[Speech]:
        pending = None  # computed while the one before is played
        try:
            for piece, pause in pauses(pieces, speed):
                sounds = self.engine.submit([SpeechInput(piece.ids, speaker, speed)])
                if pending is not None:
                    yield spoken(pending[0], pending[2].result()[0], self.engine.config, pending[1])
                pending = piece, pause, sounds
            if pending is not None:
                yield spoken(pending[0], pending[2].result()[0], self.engine.config, pending[1])
        finally:
            if pending is not None:
                pending[2].cancel()


def speaker_of(config: layout.VoiceConfig, name: str | None) -> int:
    """Return a speaker's number by name; None: the first."""
    if name is None:
        return 0
    if name not in config.speakers:
        raise SbkitError(f"unknown voice {name[:80]!r}", hint=f"use {', '.join(config.speakers)}")
    return config.speakers.index(name)


def check_speed(speed: object) -> float:
    """Return a speed as a float; raises if it is invalid."""
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not SLOWEST <= speed <= FASTEST:
        raise SbkitError(f"speed is {shown(speed)}, but must be a number from {SLOWEST:g} to {FASTEST:g}")
    return float(speed)
