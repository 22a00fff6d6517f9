"""Symbols and speakers of a TTS voice: the characters or phones of its corpus, and its speakers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sbkit.data.pronunciation import Pronunciation, pronunciation, split_punctuation, symbol_weights
from sbkit.errors import SbkitError
from sbkit.system import untrusted
from sbkit.system.console import atomic_write

#: The name of symbol 0, which pads batches.
PADDING = "<pad>"
#: The name of a voice whose corpus names no speaker.
NAMELESS = "voice"
#: Limits: more characters than this aren't letters, and with more speakers there is too little data of each.
MAX_SYMBOLS = 10_000
MAX_SPEAKERS = 1_000
#: Characters of a speaker's name, and bytes of a file.
_LONGEST = 200
_MAX_BYTES = 1 << 26


class NameTable:
    """Sorted names, stored as a JSON list. The constructor reads no file.

    file : where they are stored
    """

    def __init__(self, file: str | Path):
        self.file = Path(file)
        self._names: list[str] = []

    def store(self, names: Sequence[str]) -> None:
        """Store names; raises if other names are stored already, because checkpoints may depend on them."""
        if self.file.exists():
            if self.read() != names:
                raise SbkitError("corpus-changed", f"{self.file} does not match the corpus any more, and checkpoints "
                                 "may depend on it", hint="start in a new output_folder, or restore the corpus",
                                 file=self.file)
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.file) as out:
            json.dump(names, out, ensure_ascii=False)
        self._names = list(names)

    def read(self) -> list[str]:
        """Read the stored names."""
        try:
            names = untrusted.read_json(self.file, _MAX_BYTES)
        except FileNotFoundError:
            raise SbkitError("not-prepared", f"{self.file} doesn't exist yet", hint="prepare the corpus: sbkit prepare",
                             file=self.file) from None
        except (OSError, ValueError) as error:
            raise SbkitError("damaged-preparation", f"{self.file} cannot be read: {error}",
                             hint="remove it, and prepare the corpus again in a new output_folder",
                             file=self.file) from None
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names) \
                or names != sorted(set(names)):
            raise SbkitError("damaged-preparation", f"{self.file} is not a sorted list of names",
                             hint="remove it, and prepare the corpus again in a new output_folder", file=self.file)
        self._names = names
        return names


class Symbols(NameTable):
    """The symbols of a corpus and their ids: its characters, or the phones of its words. Padding has id 0.

    file : a JSON list, where they are stored
    spelling : a voice of espeak-ng, such as ``en-us``, whose pronunciation gives the phones; None: characters
    """

    def __init__(self, file: str | Path, spelling: str | None = None):
        super().__init__(file)
        self.spelling = spelling or None
        self._characters = NameTable(self.file.with_name("characters.json"))
        self._ids: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """The symbols in order of their ids, padding first."""
        return [PADDING, *self._ids]

    @property
    def characters(self) -> list[str]:
        """The characters of the corpus, if its symbols are phones."""
        return [] if self.spelling is None else self._characters.read()

    def __len__(self) -> int:
        return 1 + len(self._ids)

    def prepare(self, texts: Iterable[str]) -> Symbols:
        """Store the characters of these texts, or their phones."""
        texts = list(texts)
        symbols = sorted(set().union(*texts))
        if not symbols:
            raise SbkitError("missing-text", "the corpus has no text to train a voice on",
                             hint="does it have transcripts?")
        if len(symbols) > MAX_SYMBOLS:
            raise SbkitError("too-many-values", f"the corpus has {len(symbols):,} different characters, but at most "
                             f"{MAX_SYMBOLS:,} are supported",
                             hint="does the text column hold transcripts, in letters?")
        if self.spelling is not None:
            self._characters.store(symbols)
            self.look_up(texts)
            symbols = sorted({symbol for text in texts for symbol, _ in self._written(text)})
        self.store(symbols)
        return self.load()

    def load(self) -> Symbols:
        """Read the stored symbols."""
        if wrong := [name for name in self.read() if len(name) != 1]:
            raise SbkitError("damaged-preparation", f"{self.file}: {wrong[0][:_LONGEST]!r} is not a character",
                             hint="remove it, and prepare the corpus again in a new output_folder", file=self.file)
        self._ids = {symbol: number for number, symbol in enumerate(self._names, 1)}
        return self

    def write(self, text: str) -> tuple[list[int], list[float]]:
        """Return the ids of a text's symbols and where each ends, in characters; unknown ones are left out."""
        symbols = [(self._ids[symbol], float(end)) for symbol, end in self._written(text) if symbol in self._ids]
        return [number for number, _ in symbols], [end for _, end in symbols]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's symbols; unknown ones are left out."""
        return self.write(text)[0]

    def look_up(self, texts: Iterable[str]) -> None:
        """Look up the pronunciations of all words at once, if symbols are phones."""
        if self.spelling is not None:
            pronunciation(self.spelling).learn(
                split_punctuation(word)[1] for text in texts for word in text.split(" "))

    def unknown(self, texts: Iterable[str]) -> set[str]:
        """Return the characters and phones of texts that the corpus doesn't have."""
        texts = list(texts)
        self.look_up(texts)
        symbols = {symbol for text in texts for symbol, _ in self._written(text)} - self._ids.keys()
        return symbols if self.spelling is None else symbols | (set().union(*texts) - set(self.characters))

    def _written(self, text: str) -> Iterable[tuple[str, float]]:
        """Return a text's symbols, and the end of each in the text, in characters."""
        if self.spelling is None:
            return zip(text, range(1, len(text) + 1), strict=True)
        return phones(text, pronunciation(self.spelling))


def phones(text: str, pronounce: Pronunciation) -> Iterator[tuple[str, float]]:
    """Yield the phones of a text's words, the punctuation around them and the spaces between, with the end of each in
    the text, in characters: a word's phones share its length evenly."""
    pronounce.learn(split_punctuation(word)[1] for word in text.split(" "))
    begin = 0
    for number, word in enumerate(text.split(" ")):
        if number:
            yield " ", begin
        before, core, behind = split_punctuation(word)
        yield from zip(before, range(begin + 1, begin + len(word) + 1), strict=False)
        begin += len(before)
        symbols = pronounce(core)
        past = 0.0
        shares = symbol_weights(symbols)
        for symbol, share in zip(symbols, shares, strict=True):
            past += share
            yield symbol, begin + len(core) * past / sum(shares)
        begin += len(core)
        yield from zip(behind, range(begin + 1, begin + len(behind) + 1), strict=True)
        begin += len(behind) + 1


class Speakers(NameTable):
    """The speakers of a TTS voice.

    file : a JSON list, where their names are stored
    several : each speaker of the corpus becomes a voice; otherwise all speakers are one voice
    """

    def __init__(self, file: str | Path, several: bool = False):
        super().__init__(file)
        self.several = several

    @property
    def names(self) -> list[str]:
        """The names in order of their numbers."""
        return self._names or self.read()

    def prepare(self, speakers: Iterable[str]) -> list[str]:
        """Store the names of a corpus's speakers, or of the one voice."""
        names = sorted({speaker[:_LONGEST] or NAMELESS for speaker in speakers})
        if not self.several:
            names = names if len(names) == 1 else [NAMELESS]
        if len(names) > MAX_SPEAKERS:
            raise SbkitError("too-many-values", f"the corpus has {len(names):,} speakers, but at most {MAX_SPEAKERS:,} "
                             "are supported",
                             hint="write several: false under speakers to train one voice on all of it")
        self.store(names)
        return names

    def number(self, speaker: str) -> int:
        """Return the number of a speaker; 0, that of the first, for an unknown one."""
        name = speaker[:_LONGEST] or NAMELESS
        return self.names.index(name) if self.several and name in self.names else 0
