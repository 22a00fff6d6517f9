"""Schemas of JSON values, named as in JSON Schema, so that no value breaks a program or fills its memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container
from typing import Any, NamedTuple

#: The values that a key may have; ``str`` describes them after "must be".
Schema = Container[object]


class Integer(NamedTuple):
    """Whole numbers."""

    minimum: int = 1
    maximum: int = 2**31 - 1  # no dimension of a tensor is larger in any runtime

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.minimum <= value <= self.maximum

    def __str__(self) -> str:
        return f"a whole number from {self.minimum:,} to {self.maximum:,}"


class Positive(NamedTuple):
    """Numbers above 0."""

    maximum: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= self.maximum

    def __str__(self) -> str:
        return f"a number above 0, {self.maximum:,} at most"


class Number(NamedTuple):
    """Numbers of either sign."""

    maximum: float = 1e9

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, (int, float)) and not isinstance(value, bool)
                and -self.maximum <= value <= self.maximum)

    def __str__(self) -> str:
        return f"a number from {-self.maximum:g} to {self.maximum:g}"


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
                and not any("\ud800" <= each <= "\udfff" for each in value)
                and (self.pattern is None or re.fullmatch(self.pattern, value) is not None))

    def __str__(self) -> str:
        return self.what if self.pattern else f"a text in UTF-8 of {self.min_length} to {self.max_length:,} characters"


class Array(NamedTuple):
    """Lists."""

    items: Schema
    min_items: int = 0
    max_items: int = 1_000_000

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, list) and self.min_items <= len(value) <= self.max_items
                and all(each in self.items for each in value))

    def __str__(self) -> str:
        return f"a list of {self.min_items} to {self.max_items:,}, each {self.items}"


class Object(NamedTuple):
    """JSON objects, with any values unless ``values`` is given."""

    values: Schema | None = None
    keys: Schema = String()
    min_items: int = 0

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, dict) and len(value) >= self.min_items and all(key in self.keys for key in value)
                and (self.values is None or all(each in self.values for each in value.values())))

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
        return isinstance(value, dict) and value.keys() <= self.of.keys() and (
            not self.needed or value.keys() == self.of.keys()) and all(each in self.of[key]
                                                                       for key, each in value.items())

    def __str__(self) -> str:
        return "an object of " + " and ".join(f"{key} ({each})" for key, each in self.of.items())


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


SHA256 = String(64, 64, "[0-9a-f]{64}", "a sha256 in hexadecimal")


def value(allowed: Schema, **default: Any) -> Any:  # of the field's type, as dataclasses.field says too
    """Declare a field and its allowed values; ``default`` is as for ``dataclasses.field``."""
    return dataclasses.field(**default, metadata={"allowed": allowed})
