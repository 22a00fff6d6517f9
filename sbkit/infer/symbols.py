"""Text as symbols of a voice: the ids that spell a word, and characters that the voice never learnt."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from sbkit.data.pronunciation import pronunciation, split_punctuation
from sbkit.data.symbols import phones
from sbkit.errors import SbkitError
from sbkit.export.layout import VoiceConfig

#: Dashes, brackets, quotation marks, and invisible characters such as a soft hyphen.
_SILENT = ("Pd", "Ps", "Pe", "Pi", "Pf", "Cf")
_EXACT = 256  # longest word whose places are exact even if the rules change its length
_PLACES = 3  # shown of each unknown character
_CHARACTERS = 8  # shown at most
SPACE = " "
#: Marks around words. They are not spoken, but may be pauses.
OPENING, CLOSING = "\"'([{«“‘¿¡", "\"')]}»”’」』）"
ENDS, CLAUSE = ".!?…。！？", ",;:—–，、；："


class UnspeakableText(SbkitError):
    """A voice can't speak a text."""


class UnknownCharacters(UnspeakableText):
    """A text has characters that a voice never learnt."""


@dataclass(frozen=True)
class TextPosition:
    """A character's line and place in it, both counted from 1."""

    line: int = 1
    character: int = 1


@dataclass
class Unknown:
    """Characters of a text that a voice never learnt, with the first places of each."""

    places: dict[str, list[TextPosition]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, character: str, place: TextPosition) -> None:
        self.counts[character] = self.counts.get(character, 0) + 1
        places = self.places.setdefault(character, [])
        if len(places) < _PLACES:
            places.append(place)

    def error(self) -> UnknownCharacters:
        return UnknownCharacters("unknown-characters", f"the voice has no symbols for {self}",
                                 hint="write them in its symbols, or leave them out with skip_unknown",
                                 value="".join(self.places))

    def __str__(self) -> str:
        """Name the first ``_CHARACTERS`` of them."""
        has_lines = any(place.line > 1 for places in self.places.values() for place in places)
        shown = []
        for character, positions in list(self.places.items())[:_CHARACTERS]:
            name = f"{character!r}" if character.isprintable() else f"U+{ord(character):04X}"
            places = [f"line {place.line}, character {place.character}" if has_lines else f"character {place.character}"
                      for place in positions]
            more = self.counts[character] - len(positions)
            if more:
                places.append(f"{more} more")
            shown.append(f"{name} ({'; '.join(places)})")
        if len(self.places) > _CHARACTERS:
            shown.append(f"{len(self.places) - _CHARACTERS} others")
        return ", ".join(shown)


class VoiceSymbols:
    """The symbols of a voice.

    Words are normalised by the rules of the voice's training texts if its bundle has them, otherwise to Unicode's NFC,
    and to upper or lower case if the symbols have only one. If the symbols are phones, espeak-ng spells the words.
    """

    def __init__(self, config: VoiceConfig):
        self._ids = {symbol: number for number, symbol in enumerate(config.symbols) if number}
        self._pronunciation = None if config.spelling is None else pronunciation(config.spelling)
        self._characters = set(config.characters) or self._ids.keys()
        has_upper = any(map(str.isupper, self._characters))
        has_lower = any(map(str.islower, self._characters))
        self._change_case: Callable[[str], str] | None = None
        if has_upper and not has_lower:
            self._change_case = str.upper
        elif has_lower and not has_upper:
            self._change_case = str.lower
        self._rules = config.rules
        self.space = self._ids.get(SPACE)
        """The id of a space, if it is a symbol."""

    def __contains__(self, character: str) -> bool:
        return character in self._ids

    def spell(self, word: str, places: Iterable[TextPosition], unknown: Unknown) -> tuple[str, list[int]]:
        """Return a word in the voice's symbols, and their ids. Other characters are added to ``unknown``, except marks
        around the word, which need not be spoken."""
        written = self._normalised(word)
        positions = list(islice(places, len(word)))
        self._add_unknown_characters(word, written, positions, unknown)
        spoken = self._spoken(written)
        if self._pronunciation is None:
            return written, [self._ids[character] for character in spoken if character in self._ids]

        ids = []
        unknown_phones = []
        for symbol, _ in phones(spoken, self._pronunciation):
            if symbol in self._ids:
                ids.append(self._ids[symbol])
            elif symbol != SPACE:
                unknown_phones.append(symbol)
        if positions:
            for symbol in unknown_phones:
                unknown.add(f"[{symbol}] in {spoken}", positions[0])
            if not ids and split_punctuation(spoken)[1]:
                unknown.add(spoken, positions[0])  # espeak-ng has no sound for it
        return written, ids

    def _add_unknown_characters(self, word: str, written: str, positions: list[TextPosition], unknown: Unknown) -> None:
        """Add the characters of a normalised word that aren't the voice's, except marks around it."""
        begin = len(written) - len(written.lstrip(OPENING + CLAUSE + ENDS))
        end = len(written.rstrip(CLOSING + ENDS + CLAUSE))
        missing = [index for index in range(begin, end)
                   if written[index] not in self._characters and not self._is_dropped(written[index])]
        if missing:
            same_length = len(word) == len(written)
            origins = _origins(word, written, self._normalised)
            for index in missing:
                unknown.add(word[index] if same_length else written[index], positions[origins[index]])

    def look_up(self, text: str) -> str:
        """Look up the pronunciations of a text's words in one batch; returns the text."""
        if self._pronunciation is not None:
            parts = (part for word in text.split() for part in self._spoken(self._normalised(word)).split(SPACE))
            self._pronunciation.learn(split_punctuation(part)[1] for part in parts)
        return text

    def _normalised(self, word: str) -> str:
        """Normalise a word by the rules, but keep its punctuation."""
        if self._rules is not None:
            word = self._rules.fold(word)
        word = unicodedata.normalize("NFC", word)
        if self._change_case is not None and (self._rules is None or self._rules.case == "keep"):
            word = unicodedata.normalize("NFC", self._change_case(word))
        return word

    def _spoken(self, written: str) -> str:
        """Return the spoken part of a word, as in the voice's training texts; it may be several words."""
        if self._rules is None:
            return "".join(filter(self._characters.__contains__, written))
        return self._rules.words("".join(character for character in written
                                         if character in self._characters or self._is_dropped(character)))

    def _is_dropped(self, character: str) -> bool:
        """Whether the rules turn this mark into a space or nothing: it isn't read aloud, unlike ``%``."""
        return self._rules is not None and unicodedata.category(character) in _SILENT


def _origins(word: str, written: str, write: Callable[[str], str]) -> list[int]:
    """Return for each character of a normalised word the index of the character of the word that it comes from.

    write : normalises a word
    """
    if len(word) == len(written) or len(word) > _EXACT:
        return [min(index, len(word) - 1) for index in range(len(written))]
    # A character comes from the last one whose preceding characters are written before it.
    sizes = [len(write(word[:end])) for end in range(len(word))]
    return [max((end for end, size in enumerate(sizes) if size <= index), default=0) for index in range(len(written))]
