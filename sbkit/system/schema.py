"""Allowed values of keys, of arguments, of options and of what bundles hold, so that a wrong one is refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

from sbkit.errors import SbkitError

#: The values that a key may have; ``str`` describes them after "must be".
Schema = Container[object]


class Number(NamedTuple):
    """Numbers within limits."""

    minimum: float = -math.inf
    maximum: float = math.inf
    whole: bool = False
    above: bool = False
    """Whether ``minimum`` itself is excluded."""

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, Integral if self.whole else Real) or isinstance(value, bool):
            return False
        number = cast(float, value)
        return self.minimum <= number <= self.maximum and not (self.above and number == self.minimum)

    def __str__(self) -> str:
        low, high = (f"{limit:,}" if isinstance(limit, int) else f"{limit:g}" for limit in (self.minimum, self.maximum))
        kind = "a whole number" if self.whole else "a number"
        if self.above:
            return f"{kind} above {low}" + (f", up to {high}" if self.maximum < math.inf else "")
        if self.maximum < math.inf:
            return f"{kind} from {low} to {high}"
        return kind + (f", {self.minimum:g} or more" if self.minimum > -math.inf else "")


def integer(minimum: int = 1, maximum: int = 2**31 - 1) -> Number:
    """Whole numbers; no dimension of a tensor is larger than the default in any runtime."""
    return Number(minimum, maximum, whole=True)


class Boolean:
    """True or false."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


class String(NamedTuple):
    """Texts that can be encoded: JSON may escape half of a surrogate pair."""

    min_length: int = 1
    max_length: int = 1000
    pattern: str | None = None
    what: str = ""
    """How messages describe the pattern."""

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, str) and self.min_length <= len(value) <= self.max_length
                and not any("\ud800" <= character <= "\udfff" for character in value)
                and (self.pattern is None or re.fullmatch(self.pattern, value) is not None))

    def __str__(self) -> str:
        return self.what if self.pattern else f"a text in UTF-8 of {self.min_length} to {self.max_length:,} characters"


class Array(NamedTuple):
    """Lists."""

    items: Schema
    min_items: int = 0
    max_items: int = 1_000_000
    what: str = ""
    """How messages describe it; by default by its limits."""

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, (list, tuple)) and self.min_items <= len(value) <= self.max_items
                and all(item in self.items for item in value))

    def __str__(self) -> str:
        return self.what or f"a list of {self.min_items} to {self.max_items:,}, each {self.items}"


class Object(NamedTuple):
    """JSON objects, with any values unless ``values`` is given."""

    values: Schema | None = None
    keys: Schema = String()
    min_items: int = 0

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, dict) and len(value) >= self.min_items and all(key in self.keys for key in value)
                and (self.values is None or all(item in self.values for item in value.values())))

    def __str__(self) -> str:
        parts = (f"{what} are each {schema}" for what, schema in (("keys", self.keys), ("values", self.values))
                 if schema not in (None, String()))
        return " and ".join(("an object", *parts)).replace(" and", " whose", 1)


class Record(NamedTuple):
    """JSON objects with these keys."""

    of: dict[str, Schema]
    needed: bool = False
    """Whether it must have all of them."""

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, dict) or not value.keys() <= self.of.keys():
            return False
        if self.needed and value.keys() != self.of.keys():
            return False
        return all(item in self.of[key] for key, item in value.items())

    def __str__(self) -> str:
        return "an object of " + " and ".join(f"{key} ({schema})" for key, schema in self.of.items())


class Enumerated(NamedTuple):
    """A choice of texts."""

    options: tuple[str, ...]

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and value in self.options

    def __str__(self) -> str:
        return " or ".join(self.options)


class Nullable(NamedTuple):
    """Null, or other values."""

    of: Schema

    def __contains__(self, value: object) -> bool:
        return value is None or value in self.of

    def __str__(self) -> str:
        return f"{self.of}, or null"


SIZE, COUNT = Number(1, whole=True), Number(0, whole=True)
SHARE, POSITIVE, NOT_NEGATIVE = Number(0, 1), Number(0, above=True), Number(0)
NAMES = Array(String(), what="a list of names")
#: Sample rates; a smaller number was meant in kHz.
HERTZ = Number(1000, whole=True)
SHA256 = String(64, 64, "[0-9a-f]{64}", "a sha256 in hexadecimal")


def value(allowed: Schema, **default: Any) -> Any:  # of the field's type, as dataclasses.field says too
    """Declare a field and its allowed values; ``default`` is as for ``dataclasses.field``."""
    return dataclasses.field(**default, metadata={"allowed": allowed})


def require(what: str, value: object, allowed: Schema) -> None:
    """Refuse a value of an argument that isn't allowed.

    >>> require("batching: buckets", 2.0, Nullable(SIZE))
    Traceback (most recent call last):
    sbkit.errors.SbkitError: batching: buckets is 2.0; it must be a whole number, 1 or more, or null
    """
    if value not in allowed:
        raise SbkitError("bad-value", f"{what} is {value!r}", hint=f"it must be {allowed}", key=what, value=value)


def texts(what: str, value: object) -> list[str]:
    """Return a list of texts, from one text or several.

    >>> texts("corpus: only", "test"), texts("corpus: only", ["train", "dev"])
    (['test'], ['train', 'dev'])
    """
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise SbkitError("bad-value", f"{what} is {value!r}", hint="it must be a text, or a list of texts",
                         key=what, value=value)
    return list(items)
