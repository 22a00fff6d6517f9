"""Text of any length as pieces that a voice can speak at once: sentences, cut where they are too long."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sbkit.export.layout import VoiceConfig
from sbkit.infer.symbols import (
    CLAUSE,
    CLOSING,
    ENDS,
    OPENING,
    SPACE,
    TextPosition,
    Unknown,
    UnspeakableText,
    VoiceSymbols,
)

#: Seconds of silence after a sentence at the speed 1, and after a part of one that was too long.
SENTENCE_PAUSE, CLAUSE_PAUSE, WORD_PAUSE = 0.25, 0.12, 0.05
_LONGEST_WORD = 64  # read as a whole at least, so that a character is with its marks
_RUN = re.compile(r"\s+|\S+")
#: A stretch of a text without spaces, such as Chinese, up to the end of a sentence.
_SENTENCE = re.compile(r"[^。！？]*[。！？]+[」』”’）]*|[^。！？]+")
_SHORTENED = re.compile(r"(?:\w|(?:\w+\.)+\w+)\.")  # an initial, "e.g.", "U.S."


@dataclass(frozen=True)
class TextWord:
    """A word of a text.

    glued : it follows the one before without a space
    first : it begins a paragraph
    """

    text: str
    place: TextPosition
    glued: bool = False
    first: bool = False

    @property
    def places(self) -> Iterator[TextPosition]:
        """The places of its characters, and beyond, for one that grew: its last one's."""
        line, begin, last = self.place.line, self.place.character, len(self.text) - 1
        return (TextPosition(line, begin + min(number, last)) for number in itertools.count())


@dataclass(frozen=True)
class Spelled:
    """A word as ids."""

    text: str
    ids: tuple[int, ...]
    glued: bool


@dataclass(frozen=True)
class Phrase:
    """Words that a voice speaks at once.

    ids : their symbols
    words : each word's text, and where it begins and ends in ``ids``
    text : as it is spoken
    pause : seconds of silence after it, at the speed 1
    """

    ids: tuple[int, ...]
    words: tuple[tuple[str, int, int], ...]
    text: str
    pause: float

    @property
    def ends(self) -> bool:
        return self.pause == SENTENCE_PAUSE


class Script:
    """The pieces of a text, one at a time, so that a book needs no more memory than a sentence.

    config : the voice's
    skip_unknown : characters that it never learnt are left out; otherwise they are an error, at the text's end, which
        names all of them
    """

    def __init__(self, config: VoiceConfig, skip_unknown: bool = False):
        self._symbols, self._most, self._skip = VoiceSymbols(config), config.max_symbols, skip_unknown
        self.unknown = Unknown()
        """The characters that the voice never learnt, of what was read last."""

    def read(self, text: str | Iterable[str]) -> Iterator[Phrase]:
        """Yield the pieces of a text that is given as a whole or in blocks.

        Raises ``UnspeakableText`` at its end, if there is something in it that can't be spoken, or nothing.
        """
        self.unknown = unknown = Unknown()
        held, spoke, pauses = _PhraseBuffer(self._symbols.space, self._most), False, False
        empty = True
        blocks = map(self._symbols.look_up, [text] if isinstance(text, str) else text)
        for word in words(blocks, max(self._most, _LONGEST_WORD)):
            empty = False
            written, ids = self._symbols.spell(word.text, word.places, unknown)
            spoke = spoke or bool(ids)
            if unknown.counts and not self._skip:
                continue  # nothing is spoken any more: only more errors are looked for
            if word.first:
                yield from held.flush(SENTENCE_PAUSE)
            elif pauses:
                yield from held.flush(CLAUSE_PAUSE)
            yield from held.add(written, ids, word.glued)
            if _ends_sentence(word.text):
                yield from held.flush(SENTENCE_PAUSE)
            # After a mark that is none of its symbols the voice doesn't know by itself that it should pause.
            pauses = _ends_clause(word.text) and word.text.rstrip(CLOSING)[-1] not in self._symbols
        if unknown.counts and not self._skip:
            raise unknown.error()
        yield from held.flush(SENTENCE_PAUSE)
        if not spoke:
            raise UnspeakableText("the text is empty" if empty else
                                  "the text has only characters that the voice never learnt",
                                  hint="give it some words to say")


def words(blocks: Iterable[str], longest: int) -> Iterator[TextWord]:
    """Yield the words of a text that is given in blocks; one of more characters is cut."""
    line, character, breaks, held = 1, 1, 2, ""
    glued = False
    place = TextPosition()
    for run in (match[0] for block in blocks for match in _RUN.finditer(block)):
        if run.isspace():
            if held:
                yield from _parts(held, place, glued, breaks > 1)
                held, glued, breaks = "", False, 0
            breaks += run.count("\n")
            line += run.count("\n")
            character = len(run) - run.rindex("\n") if "\n" in run else character + len(run)
            continue
        if not held and not glued:
            place = TextPosition(line, character)
        held += run
        character += len(run)
        while (cut := _cut(held, longest)) is not None:
            yield from _parts(held[:cut], place, glued, breaks > 1)
            held, glued, breaks = held[cut:], True, 0
            place = TextPosition(line, place.character + cut)
    if held:
        yield from _parts(held, place, glued, breaks > 1)


def _cut(word: str, longest: int) -> int | None:
    """Find where to cut a word that is too long, not before a mark that belongs to the character before it."""
    if len(word) <= 2 * longest:
        return None
    return next((at for at in range(longest, 0, -1) if not unicodedata.combining(word[at])), longest)


def _parts(text: str, place: TextPosition, glued: bool, first: bool) -> Iterator[TextWord]:
    """Split text without spaces at the ends of sentences in it."""
    at = 0
    for part in _SENTENCE.findall(text):
        yield TextWord(part, TextPosition(place.line, place.character + at), glued or at > 0, first and not at)
        at += len(part)


def _ends_sentence(word: str) -> bool:
    bare = word.rstrip(CLOSING)
    if bare.endswith("."):
        return _SHORTENED.fullmatch(bare.lstrip(OPENING)) is None
    return bare.endswith(tuple(ENDS))


def _ends_clause(word: str) -> bool:
    return word.rstrip(CLOSING).endswith(tuple(CLAUSE))


class _PhraseBuffer:
    """Words of a sentence that is not whole yet, never more than fit in a piece."""

    def __init__(self, space: int | None, most: int):
        self._space, self._most = () if space is None else (space,), most
        self._words: list[Spelled] = []

    def add(self, text: str, ids: list[int], glued: bool) -> Iterator[Phrase]:
        """Add a word, and yield the pieces that must end for that."""
        for begin in range(0, len(ids), self._most):
            part = tuple(ids[begin : begin + self._most])
            whole = len(part) == len(ids)
            word = Spelled(text if whole else text[begin : begin + self._most], part, glued or begin > 0)
            if self._size([*self._words, word]) > self._most:
                yield from self._cut_clause(word)
            if self._size([*self._words, word]) > self._most:
                yield from self.flush(0.0 if word.glued else WORD_PAUSE)
            self._words.append(word)

    def flush(self, pause: float) -> Iterator[Phrase]:
        """Yield what is held as a piece."""
        if self._words:
            yield self._piece(self._words, pause)
            self._words = []

    def _cut_clause(self, coming: Spelled) -> Iterator[Phrase]:
        """Yield the words up to the last mark between clauses, if there is one."""
        words = [*self._words, coming]
        for count in range(len(self._words), 0, -1):
            if _ends_clause(self._words[count - 1].text):
                yield self._piece(self._words[:count], 0.0 if words[count].glued else CLAUSE_PAUSE)
                self._words = self._words[count:]
                return

    def _size(self, words: list[Spelled]) -> int:
        return sum(len(word.ids) for word in words) + sum(len(self._space) for word in words[1:] if not word.glued)

    def _piece(self, words: list[Spelled], pause: float) -> Phrase:
        ids: list[int] = []
        places, text = [], ""
        for number, word in enumerate(words):
            if number and not word.glued:
                ids += self._space
                text += SPACE
            places.append((word.text, len(ids), len(ids) + len(word.ids)))
            ids += word.ids
            text += word.text
        return Phrase(tuple(ids), tuple(places), text, pause)
