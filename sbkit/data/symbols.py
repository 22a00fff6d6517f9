"""Symbols and speakers of a voice: the characters that its corpus is written in, and who speaks it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write

#: The name of symbol 0, which fills up a batch's rows.
PADDING = "<pad>"
#: The name of a voice whose corpus doesn't say who speaks.
NAMELESS = "voice"
#: A corpus with more characters is not written in letters; one with more speakers has too little of each.
MOST_SYMBOLS, MOST_SPEAKERS = 10_000, 1_000
_LONGEST = 200  # name of a speaker


class NameTable:
    """Sorted names, stored as a JSON list. The constructor touches no file.

    Arguments
    ---------
    file : where they are stored
    """

    def __init__(self, file: str | Path):
        self.file = Path(file)
        self._found: list[str] = []

    def keep(self, found: Sequence[str]) -> None:
        """Store names, unless they are stored already; raises if others are, because checkpoints may depend on them."""
        if self.file.exists():
            if self.read() != found:
                raise SbkitError(f"{self.file} has other entries than the corpus, and checkpoints may depend on it",
                                 hint="start in a new output_folder, or set the corpus back")
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.file) as out:
            json.dump(found, out, ensure_ascii=False)
        self._found = list(found)

    def read(self) -> list[str]:
        """Read the stored names."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SbkitError(f"{self.file} is not there yet", hint="prepare the corpus first (sbkit prepare)") from None
        except (OSError, ValueError, RecursionError) as error:
            raise SbkitError(f"{self.file} cannot be read: {error}") from None
        if not isinstance(found, list) or not found or not all(isinstance(name, str) and name for name in found) \
                or found != sorted(set(found)):
            raise SbkitError(f"{self.file} is no sorted list of names",
                             hint="remove it, and prepare the corpus again in a new output_folder")
        self._found = found
        return found


class Symbols(NameTable):
    """The characters of a corpus, each with an id; padding has id 0.

    Arguments
    ---------
    file : a JSON list, where they are stored
    """

    def __init__(self, file: str | Path):
        super().__init__(file)
        self._ids: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """The symbols in order of their ids, padding first."""
        return [PADDING, *self._ids]

    def __len__(self) -> int:
        return 1 + len(self._ids)

    def prepare(self, texts: Iterable[str]) -> Symbols:
        """Store the characters of these texts."""
        found = sorted(set().union(*texts))
        if not found:
            raise SbkitError("the corpus has no text to learn to speak", hint="does it have transcripts?")
        if len(found) > MOST_SYMBOLS:
            raise SbkitError(f"the corpus has {len(found):,} different characters, but at most {MOST_SYMBOLS:,} are "
                             "taken", hint="is its text what was said, in letters?")
        self.keep(found)
        return self.load()

    def load(self) -> Symbols:
        """Read the stored symbols."""
        if wrong := [name for name in self.read() if len(name) != 1]:
            raise SbkitError(f"{self.file}: {wrong[0][:_LONGEST]!r} is no character",
                             hint="remove it, and prepare the corpus again in a new output_folder")
        self._ids = {symbol: number for number, symbol in enumerate(self._found, 1)}
        return self

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; characters that are no symbols are left out."""
        return [self._ids[character] for character in text if character in self._ids]

    def unknown(self, texts: Iterable[str]) -> set[str]:
        """Return the characters of texts that are no symbols."""
        return set().union(*texts) - self._ids.keys()


class Speakers(NameTable):
    """Whose voices are learnt.

    Arguments
    ---------
    file : a JSON list, where their names are stored
    several : each of the corpus's speakers becomes a voice; otherwise all of it is one voice, whoever speaks
    """

    def __init__(self, file: str | Path, several: bool = False):
        super().__init__(file)
        self.several = several

    @property
    def names(self) -> list[str]:
        """The names in order of their numbers."""
        return self._found or self.read()

    def prepare(self, speakers: Iterable[str]) -> list[str]:
        """Store the names of a corpus's speakers, or of the one voice that all of them are."""
        found = sorted({speaker[:_LONGEST] or NAMELESS for speaker in speakers})
        if not self.several:
            found = found if len(found) == 1 else [NAMELESS]
        if len(found) > MOST_SPEAKERS:
            raise SbkitError(f"the corpus has {len(found):,} speakers, but at most {MOST_SPEAKERS:,} become voices",
                             hint="write several: false under speakers, and all of it is one voice")
        self.keep(found)
        return found

    def number(self, speaker: str) -> int:
        """Return the number of a speaker; 0, the first, for one who is none of them."""
        name = speaker[:_LONGEST] or NAMELESS
        return self.names.index(name) if self.several and name in self.names else 0
