"""Splits text of any length into phrases that a voice can speak at once: sentences, cut where they are too long."""

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

#: Seconds of silence at speed 1 after a sentence, and after a clause or a word where a long sentence is cut.
SENTENCE_PAUSE, CLAUSE_PAUSE, WORD_PAUSE = 0.25, 0.12, 0.05
_LONGEST_WORD = 64  # characters; shorter words are not cut
_RUN = re.compile(r"\s+|\S+")
#: Text without spaces, such as Chinese, up to the end of a sentence.
_SENTENCE = re.compile(r"[^。！？]*[。！？]+[」』”’）]*|[^。！？]+")
_ABBREVIATION = re.compile(r"(?:\w|(?:\w+\.)+\w+)\.")  # an initial, "e.g.", "U.S."


@dataclass(frozen=True)
class TextWord:
    """A word of a text.

    joined : it follows the one before without a space
    first : it begins a paragraph
    """

    text: str
    place: TextPosition
    joined: bool = False
    first: bool = False

    @property
    def places(self) -> Iterator[TextPosition]:
        """The places of its characters, then the last one's forever, for a word that gets longer when it is spelled."""
        last = len(self.text) - 1
        return (TextPosition(self.place.line, self.place.character + min(number, last)) for number in itertools.count())


@dataclass(frozen=True)
class SpelledWord:
    """A word as ids."""

    text: str
    ids: tuple[int, ...]
    joined: bool


@dataclass(frozen=True)
class Phrase:
    """Words that a voice speaks at once.

    ids : their symbols
    words : each word's text, and its start and end in ``ids``
    text : as it is spoken
    pause : seconds of silence after it, at speed 1
    """

    ids: tuple[int, ...]
    words: tuple[tuple[str, int, int], ...]
    text: str
    pause: float

    @property
    def ends(self) -> bool:
        return self.pause == SENTENCE_PAUSE


class PhraseReader:
    """Reads the phrases of a text one at a time, so that a book needs no more memory than a sentence.

    config : the voice's
    skip_unknown : skip characters that it never learnt; otherwise an error at the text's end names all of them
    """

    def __init__(self, config: VoiceConfig, skip_unknown: bool = False):
        self._symbols = VoiceSymbols(config)
        self._max_symbols = config.max_symbols
        self._skip = skip_unknown
        self.unknown = Unknown()
        """The characters of the last text that the voice never learnt."""

    def read(self, text: str | Iterable[str]) -> Iterator[Phrase]:
        """Yield the phrases of a text that is given as a whole or in blocks.

        Raises ``UnspeakableText`` at its end if something in it can't be spoken, or if it has no words.
        """
        unknown = Unknown()
        self.unknown = unknown
        buffer = _PhraseBuffer(self._symbols.space, self._max_symbols)
        has_words = False
        has_speech = False
        pauses = False  # before the next word
        blocks = map(self._symbols.look_up, [text] if isinstance(text, str) else text)
        for word in words(blocks, max(self._max_symbols, _LONGEST_WORD)):
            has_words = True
            written, ids = self._symbols.spell(word.text, word.places, unknown)
            has_speech = has_speech or bool(ids)
            if unknown.counts and not self._skip:
                continue  # only look for more errors
            if word.first:
                yield from buffer.flush(SENTENCE_PAUSE)
            elif pauses:
                yield from buffer.flush(CLAUSE_PAUSE)
            yield from buffer.add(written, ids, word.joined)
            bare = word.text.rstrip(CLOSING)
            abbreviated = bare.endswith(".") and _ABBREVIATION.fullmatch(bare.lstrip(OPENING))
            if bare.endswith(tuple(ENDS)) and not abbreviated:
                yield from buffer.flush(SENTENCE_PAUSE)
            # The voice can't pause at a mark that is not one of its symbols.
            pauses = bare.endswith(tuple(CLAUSE)) and bare[-1] not in self._symbols
        if unknown.counts and not self._skip:
            raise unknown.error()
        yield from buffer.flush(SENTENCE_PAUSE)
        if not has_speech:
            problem = "the voice has no symbols for any character of the text" if has_words else "the text is empty"
            raise UnspeakableText("empty-input", problem, hint="give a text with words")


def words(blocks: Iterable[str], longest: int) -> Iterator[TextWord]:
    """Yield the words of a text that is given in blocks; words of more than ``longest`` characters are cut."""
    line = 1
    character = 1
    breaks = 2  # line breaks before the pending word; two begin a paragraph
    pending = ""  # a word that may go on in the next block
    joined = False
    place = TextPosition()  # of the pending word
    for run in (match[0] for block in blocks for match in _RUN.finditer(block)):
        if run.isspace():
            if pending:
                yield from _parts(pending, place, joined, breaks > 1)
                pending = ""
                joined = False
                breaks = 0
            breaks += run.count("\n")
            line += run.count("\n")
            character = len(run) - run.rindex("\n") if "\n" in run else character + len(run)
            continue
        if not pending and not joined:
            place = TextPosition(line, character)
        pending += run
        character += len(run)
        while len(pending) > 2 * longest:  # too long, but not cut before a combining mark
            cuts = (index for index in range(longest, 0, -1) if not unicodedata.combining(pending[index]))
            cut = next(cuts, longest)
            yield from _parts(pending[:cut], place, joined, breaks > 1)
            pending = pending[cut:]
            joined = True
            breaks = 0
            place = TextPosition(line, place.character + cut)
    if pending:
        yield from _parts(pending, place, joined, breaks > 1)


def _parts(text: str, place: TextPosition, joined: bool, first: bool) -> Iterator[TextWord]:
    """Split text without spaces after its sentences."""
    for match in _SENTENCE.finditer(text):
        start = match.start()
        part_place = TextPosition(place.line, place.character + start)
        yield TextWord(match[0], part_place, joined=joined or start > 0, first=first and start == 0)


class _PhraseBuffer:
    """The words so far of a sentence, never more than fit in a phrase."""

    def __init__(self, space: int | None, max_symbols: int):
        self._space = () if space is None else (space,)
        self._max_symbols = max_symbols
        self._words: list[SpelledWord] = []

    def add(self, text: str, ids: list[int], joined: bool) -> Iterator[Phrase]:
        """Add a word, and yield phrases that have to end before it."""
        for begin in range(0, len(ids), self._max_symbols):
            part = tuple(ids[begin : begin + self._max_symbols])
            whole = len(part) == len(ids)
            word = SpelledWord(text if whole else text[begin : begin + self._max_symbols], part, joined or begin > 0)
            if self._size([*self._words, word]) > self._max_symbols:
                # End the phrase at the last mark between clauses, if any.
                clause_ends = [count for count, earlier in enumerate(self._words, 1)
                               if earlier.text.rstrip(CLOSING).endswith(tuple(CLAUSE))]
                if clause_ends:
                    phrase_words = self._words[: clause_ends[-1]]
                    self._words = self._words[clause_ends[-1] :]
                    next_word = self._words[0] if self._words else word
                    yield self._phrase(phrase_words, 0.0 if next_word.joined else CLAUSE_PAUSE)
            if self._size([*self._words, word]) > self._max_symbols:
                yield from self.flush(0.0 if word.joined else WORD_PAUSE)
            self._words.append(word)

    def flush(self, pause: float) -> Iterator[Phrase]:
        """Yield the words so far as a phrase."""
        if self._words:
            yield self._phrase(self._words, pause)
            self._words = []

    def _size(self, words: list[SpelledWord]) -> int:
        return sum(len(word.ids) for word in words) + sum(len(self._space) for word in words[1:] if not word.joined)

    def _phrase(self, words: list[SpelledWord], pause: float) -> Phrase:
        ids: list[int] = []
        spans = []
        text = ""
        for number, word in enumerate(words):
            if number and not word.joined:
                ids += self._space
                text += SPACE
            spans.append((word.text, len(ids), len(ids) + len(word.ids)))
            ids += word.ids
            text += word.text
        return Phrase(tuple(ids), tuple(spans), text, pause)
