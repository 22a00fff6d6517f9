"""File names for what others named: below their folder whatever the name has in it, and no two alike."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable

_BYTES = 180  # of the 255 that a file's name may have: a suffix, and what makes it unique, come behind it
#: Names that Windows gives to devices.
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")


def file_name(name: str) -> str:
    """Return a name without separators and other characters that some file system refuses or reads otherwise."""
    text = unicodedata.normalize("NFC", name.encode("utf-8", "replace").decode("utf-8"))
    text = re.sub(r"[^\w.+=@,-]", "_", text).strip(".")
    while len(text.encode()) > _BYTES:
        text = text[:-1]
    return f"_{text}" if not text or _DEVICES.match(text) or text.startswith("-") else text


def file_names(names: Iterable[str]) -> list[str]:
    """Return a file name for each; those that would be the same, also where case doesn't count, get a number."""
    taken: set[str] = set()
    found = []
    for name in names:
        first = file_name(name)
        numbered = (f"{first}-{number}" for number in itertools.count(2))
        chosen = next(each for each in itertools.chain([first], numbered) if each.casefold() not in taken)
        taken.add(chosen.casefold())
        found.append(chosen)
    return found
