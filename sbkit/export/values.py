"""Checks of the values that a bundle's config.json gives: their types, and that no buffer gets too large."""

from __future__ import annotations

from pathlib import Path
from types import UnionType

from sbkit.data.text import TextRules
from sbkit.errors import SbkitError

#: No dimension of a tensor is larger in any runtime.
MOST = 2**31 - 1
#: Rules of a text that replace, and the characters of each: a language's own have 14, and two characters.
_MOST_RULES, _MOST_RULE = 1000, 100
_KINDS: dict[type | UnionType, str] = {dict: "an object", list: "a list", bool: "true or false",
                                       str | None: "a text or null"}


def check_sizes(told: object, values: object, *names: str, least: int = 1, most: int = MOST) -> None:
    """Refuse what is no whole number from ``least`` to ``most``."""
    for name in names:
        if not is_whole(value := getattr(values, name), least):
            raise SbkitError(f"{told}: {name} is {value!r}, but must be a whole number of {least} or more"
                             if least != 1 else f"{told}: {name} is {value!r}, but must be a whole number above 0")
        if value > most:
            raise SbkitError(f"{told}: {name} is {str(value)[:40]}, but must be {most:,} at most",
                             hint="export the model again")


def check_kinds(path: Path, values: object, kind: type | UnionType, *names: str) -> None:
    """Refuse values of another type."""
    for name in names:
        if not isinstance(value := getattr(values, name), kind):
            wanted = _KINDS[kind]
            raise SbkitError(f"{path}: {name} must be {wanted}, not {repr(value)[:200]}", hint="export the model again")


def check_files(path: Path, files: object) -> None:
    """Refuse what doesn't give each file its size and its sha256."""
    if not isinstance(files, dict) or not all(
            isinstance(each, dict) and is_whole(each.get("bytes", 0), 0) and isinstance(each.get("sha256", ""), str)
            for each in files.values()):
        raise SbkitError(f"{path}: files must give each file its bytes and sha256, not {repr(files)[:200]}",
                         hint="export the model again")


def check_books(path: Path, books: object) -> None:
    """Refuse what is no list of sizes of codebooks."""
    if not isinstance(books, list) or not all(is_whole(size, 1) for size in books):
        raise SbkitError(f"{path}: books must be a list of whole numbers above 0, not {repr(books)[:200]}")


def check_rules(path: Path, text: object) -> None:
    """Refuse options that ``TextRules`` doesn't have, and rules that are no language's."""
    if text is None:
        return
    if not isinstance(text, dict) or text.keys() - TextRules().options().keys():
        raise SbkitError(f"{path}: text must have options of TextRules, not {repr(text)[:200]}",
                         hint="was it written by a newer sbkit?")
    try:
        rules = TextRules(**text)
    except (SbkitError, TypeError) as error:
        raise SbkitError(f"{path}: {error}", hint="export the model again") from None
    pairs = [*rules.replace.items(), *rules.case_pairs.items()]
    if len(pairs) > _MOST_RULES or any(len(each) > _MOST_RULE for pair in pairs for each in pair):
        raise SbkitError(f"{path}: text replaces by more than {_MOST_RULES} rules, or by one of more than {_MOST_RULE} "
                         "characters", hint="export the model again")


def check_names(path: Path, *names: object) -> None:
    """Refuse names of files outside of the bundle."""
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise SbkitError(f"{path} names a file outside of the bundle: {name!r}", hint="export the model again")


def is_whole(value: object, least: int) -> bool:
    """Whether this is a whole number of ``least`` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether this is a number, which may be infinite or none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_name(value: object) -> bool:
    """Whether this is a text that is not empty."""
    return isinstance(value, str) and bool(value)
