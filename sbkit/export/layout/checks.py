"""Checks of what a bundle's config.json says; each raises ``SbkitError`` with the place and the value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sbkit.errors import SbkitError, shown, shown_names
from sbkit.export.layout.limits import MAX_STATE
from sbkit.system.schema import Schema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def parse(kind: type[T], values: object, where: str) -> T:
    """Create an instance from values read from JSON."""
    if not isinstance(values, dict):
        raise SbkitError(f"{where} is {shown(values)}, but must be an object")
    unknown = sorted(set(values) - {declared.name for declared in fields(kind)})
    if unknown:
        raise SbkitError(f"{where} has unknown keys: {shown_names(unknown)}", hint="was it written by a newer sbkit?")
    try:
        return kind(**values)
    except TypeError as error:
        raise SbkitError(f"{where} lacks keys: {error}") from None


def check_fields(where: str, values: DataclassInstance) -> None:
    """Refuse the first value of a dataclass that its declaration doesn't allow."""
    for declared in fields(values):
        if "allowed" in declared.metadata:  # others are dataclasses with their own check
            refuse(where, declared.name, getattr(values, declared.name), declared.metadata["allowed"])


def refuse(where: str, name: str, contents: object, allowed: Schema) -> None:
    """Raise unless what a field has is allowed."""
    if contents not in allowed:
        raise SbkitError(f"{where}: {name} is {shown(contents)}, but must be {allowed}", hint="export the model again")


def check_state(where: str, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse the state of a stream if it has too many numbers."""
    if sum(math.prod(part["shape"]) for part in state.values()) > MAX_STATE:
        raise SbkitError(f"{where}: state has more than {MAX_STATE:,} numbers", hint="export the model again")


def check_formats(path: Path, name: str, files: dict[str, str], models: dict[str, str]) -> None:
    """Refuse a graph that has other formats than the model."""
    if files.keys() != models.keys():
        raise SbkitError(f"{path}: {name} must give a file for each of {', '.join(models)}, not {shown(files)}")


def check_unique(path: Path, name: str, values: list[str]) -> None:
    """Refuse a value that occurs twice."""
    duplicates = sorted(text for text, count in Counter(values).items() if count > 1)
    if duplicates:
        raise SbkitError(f"{path}: {name} has {shown(duplicates[0])} twice")
