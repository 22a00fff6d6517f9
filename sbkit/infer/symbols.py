"""Text as the symbols of a voice: which ids spell a word, and which characters the voice never learnt."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from sbkit.data.pronunciation import pronunciation, split_punctuation
from sbkit.data.symbols import phones
from sbkit.errors import SbkitError
from sbkit.export.layout import VoiceConfig

#: Dashes, brackets, quotation marks, and what can't be seen, such as a soft hyphen.
_SILENT = ("Pd", "Ps", "Pe", "Pi", "Pf", "Cf")
_EXACT = 256  # characters of a word whose places are told exactly where it becomes longer or shorter
_PLACES = 3  # told of each unknown character
_CHARACTERS = 8  # told at most
SPACE = " "
#: Marks around words. They are not spoken, but tell where to pause.
OPENING, CLOSING = "\"'([{«“‘¿¡", "\"')]}»”’」』）"
ENDS, CLAUSE = ".!?…。！？", ",;:—–，、；："


class UnspeakableText(SbkitError):
    """Error of a text that a voice can't speak."""


class UnknownCharacters(UnspeakableText):
    """Error of a text with characters that a voice never learnt."""


@dataclass(frozen=True)
class TextPosition:
    """A character's place in a text; both count from 1."""

    line: int = 1
    character: int = 1


@dataclass
class Unknown:
    """Characters of a text that a voice never learnt, with the first places of each."""

    places: dict[str, list[TextPosition]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, character: str, place: TextPosition) -> None:
        self.counts[character] = self.counts.get(character, 0) + 1
        told = self.places.setdefault(character, [])
        if len(told) < _PLACES:
            told.append(place)

    def error(self) -> UnknownCharacters:
        return UnknownCharacters(f"the voice never learnt {self}",
                                 hint="write them in its symbols, or leave them out with skip_unknown")

    def __str__(self) -> str:
        """Name all of them, or the first where there are many."""
        lines = any(place.line > 1 for places in self.places.values() for place in places)
        told = [self._described(character, lines) for character in list(self.places)[:_CHARACTERS]]
        if len(self.places) > _CHARACTERS:
            told.append(f"{len(self.places) - _CHARACTERS} others")
        return ", ".join(told)

    def _described(self, character: str, lines: bool) -> str:
        shown = f"{character!r}" if character.isprintable() else f"U+{ord(character):04X}"
        places = [f"line {place.line}, character {place.character}" if lines else f"character {place.character}"
                  for place in self.places[character]]
        more = self.counts[character] - len(places)
        return f"{shown} ({'; '.join(places)}{f'; {more} more' if more else ''})"


class VoiceSymbols:
    """The symbols of a voice.

    A word is written by the rules that the voice's texts were written by, as far as its bundle has them; otherwise it
    is brought to Unicode's form NFC, and to the one case that the symbols have, if they have only one. Where they are
    phones, it is espeak-ng that spells it.
    """

    def __init__(self, config: VoiceConfig):
        self._ids = {symbol: number for number, symbol in enumerate(config.symbols) if number}
        self._said = None if config.spelling is None else pronunciation(config.spelling)
        self._characters = set(config.characters) or self._ids.keys()
        self._upper, self._lower = (any(map(has, self._characters)) for has in (str.isupper, str.islower))
        self._rules = config.rules
        self.space = self._ids.get(SPACE)
        """The id of a space; None for a voice that has none."""

    def __contains__(self, character: str) -> bool:
        return character in self._ids

    def spell(self, word: str, places: Iterable[TextPosition], unknown: Unknown) -> tuple[str, list[int]]:
        """Return a word as the symbols write it, and their ids; characters that are none are added to ``unknown``, but
        for marks around the word, which need not be spoken."""
        written = self._written(word)
        there = list(islice(places, len(word)))
        missed = self._missed(written)
        origins = _origins(word, written, self._written) if missed else []
        for at in missed:
            unknown.add(word[at] if len(word) == len(written) else written[at], there[origins[at]])
        known, first = self._kept(written), there[0] if there else None
        if self._said is None:
            return written, [self._ids[character] for character in known if character in self._ids]
        ids = []
        for symbol, _ in phones(known, self._said):
            if (number := self._ids.get(symbol)) is not None:
                ids.append(number)
            elif first is not None and symbol != SPACE:
                unknown.add(f"[{symbol}] in {known}", first)
        if not ids and first is not None and split_punctuation(known)[1]:
            unknown.add(known, first)  # espeak-ng has no sound for it
        return written, ids

    def look_up(self, text: str) -> str:
        """Have a text's words spelled, as many as there are at once; returns the text."""
        if self._said is not None:
            known = (part for word in text.split() for part in self._kept(self._written(word)).split(SPACE))
            self._said.learn(split_punctuation(part)[1] for part in known)
        return text

    def _written(self, word: str) -> str:
        """Write a word by the rules, but with its punctuation."""
        if self._rules is not None:
            word = self._rules.fold(word)
        word = unicodedata.normalize("NFC", word)
        if self._upper != self._lower and (self._rules is None or self._rules.case == "keep"):
            word = unicodedata.normalize("NFC", word.upper() if self._upper else word.lower())
        return word

    def _missed(self, written: str) -> list[int]:
        """Find the characters of a written word that the voice never learnt, but for marks around it."""
        begin = len(written) - len(written.lstrip(OPENING + CLAUSE + ENDS))
        end = len(written.rstrip(CLOSING + ENDS + CLAUSE))
        return [at for at in range(begin, end) if written[at] not in self._characters and not self._parts(written[at])]

    def _kept(self, written: str) -> str:
        """Return of a written word what is spoken, as the voice's texts had it: perhaps several words."""
        if self._rules is None:
            return "".join(filter(self._characters.__contains__, written))
        return self._rules.words("".join(
            each for each in written if each in self._characters or self._parts(each)))

    def _parts(self, character: str) -> bool:
        """Whether the rules made this mark a blank, or nothing: those that nobody reads aloud, as they do with ``%``.
        """
        return self._rules is not None and unicodedata.category(character) in _SILENT


def _origins(word: str, written: str, write: Callable[[str], str]) -> list[int]:
    """Return for each character of a written word where it comes from in the word."""
    if len(word) == len(written) or len(word) > _EXACT:
        return [min(at, len(word) - 1) for at in range(len(written))]
    sizes = [len(write(word[:end])) for end in range(len(word))]
    return [max((end for end, size in enumerate(sizes) if size <= at), default=0) for at in range(len(written))]
