"""The Python API of a voice: load a bundle, give it text, hear it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sbkit.errors import SbkitError, shown
from sbkit.export import layout
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.sentences import Phrase, Script
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
        skip_unknown : leave characters out that the voice never learnt, which otherwise are an error that names them

        Raises ``SbkitError`` before anything is spoken, if any of it can't be.
        """
        pieces = self.pieces(text, skip_unknown)
        return joined(list(self._say(iter(pieces), voice, speed)), pieces)

    def stream(self, text: str, voice: str | None = None, speed: float = 1.0, skip_unknown: bool = False,
               ) -> Iterator[Speech]:
        """Speak a text sentence by sentence: the next one is computed while you listen to the one before.

        The arguments and errors are those of :meth:`speak`.
        """
        return self._say(iter(self.pieces(text, skip_unknown)), voice, speed)

    def pieces(self, text: str, skip_unknown: bool = False) -> list[Phrase]:
        """Check a text, and cut it into what is spoken at once."""
        return list(Script(self.engine.config, skip_unknown).read(text))

    def say(self, text: Iterable[str], voice: str | None = None, speed: float = 1.0, skip_unknown: bool = False,
            ) -> Iterator[Speech]:
        """Speak a text that comes in blocks, such as a book's, in bounded memory.

        What can't be spoken raises where it is met, so that some of the text may have been spoken before.
        """
        return self._say(Script(self.engine.config, skip_unknown).read(text), voice, speed)

    def _say(self, pieces: Iterator[Phrase], voice: str | None, speed: float) -> Iterator[Speech]:
        speaker, speed = speaker_of(self.engine.config, voice), checked_speed(speed)
        return self._spoken(pieces, speaker, speed)

    def _spoken(self, pieces: Iterator[Phrase], speaker: int, speed: float) -> Iterator[Speech]:
        held = None  # computed while the one before is listened to
        try:
            for piece, pause in pauses(pieces, speed):
                sounds = self.engine.submit([SpeechInput(piece.ids, speaker, speed)])
                if held is not None:
                    yield spoken(held[0], held[2].result()[0], self.engine.config, held[1])
                held = piece, pause, sounds
            if held is not None:
                yield spoken(held[0], held[2].result()[0], self.engine.config, held[1])
        finally:
            if held is not None:
                held[2].cancel()


def speaker_of(config: layout.VoiceConfig, name: str | None) -> int:
    """Return the number of a speaker by name; None: the first."""
    if name is None:
        return 0
    if name not in config.speakers:
        raise SbkitError(f"unknown voice {name[:80]!r}", hint=f"use {', '.join(config.speakers)}")
    return config.speakers.index(name)


def checked_speed(speed: object) -> float:
    """Return a speed that a voice can have, or raise."""
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not SLOWEST <= speed <= FASTEST:
        raise SbkitError(f"speed is {shown(speed)}, but must be a number from {SLOWEST:g} to {FASTEST:g}")
    return float(speed)
