"""File names for what others named: below their folder whatever the name has in it, and no two alike."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator

_BYTES = 180  # of the 255 that a file's name may have: a suffix, and what makes it unique, come behind it
#: Of a name that are looked at: composing makes one of four at most.
_CHARACTERS = 4 * _BYTES
#: Names that Windows gives to devices.
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")


def file_name(name: str) -> str:
    """Return a name without separators and other characters that some file system refuses or reads otherwise."""
    begin = name[:_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    text = re.sub(r"[^\w.+=@,-]", "_", unicodedata.normalize("NFC", begin)).strip(".")
    text = text.encode()[:_BYTES].decode("utf-8", "ignore").rstrip(".")
    return f"_{text}" if not text or _DEVICES.match(text) or text.startswith("-") else text


def file_names(names: Iterable[str]) -> list[str]:
    """Return a file name for each; those that would be the same, also where case doesn't count, get a number."""
    taken: set[str] = set()
    counters: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(2))
    found = []
    for name in names:
        chosen = first = file_name(name)
        while chosen.casefold() in taken:
            chosen = f"{first}-{next(counters[first.casefold()])}"
        taken.add(chosen.casefold())
        found.append(chosen)
    return found
