"""Checks of what a bundle's config.json says; each raises ``SbkitError`` with the place and the value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sbkit.errors import SbkitError, shown, shown_names
from sbkit.export.layout.limits import MAX_STATE
from sbkit.system.schema import Schema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_AGAIN = "export the model again"


def parse(kind: type[T], values: object, path: Path, part: str = "") -> T:
    """Create an instance from values read from JSON.

    path : config.json
    part : the key that these values are under; empty for the whole file
    """
    where = _where(path, part)
    if not isinstance(values, dict):
        raise SbkitError("damaged-bundle", f"{where} is {shown(values)}, but must be an object", hint=_AGAIN,
                         file=path, key=part or None)
    unknown = sorted(set(values) - {declared.name for declared in fields(kind)})
    if unknown:
        raise SbkitError("newer-bundle", f"{where} has unknown keys: {shown_names(unknown)}",
                         hint="was it written by a newer sbkit?", file=path, key=shown_names(unknown[:1]))
    missing = [declared.name for declared in fields(kind) if declared.name not in values
               and declared.default is MISSING and declared.default_factory is MISSING]
    if missing:
        raise SbkitError("damaged-bundle", f"{where} lacks keys: {', '.join(missing)}", hint=_AGAIN, file=path,
                         key=missing[0])
    return kind(**values)


def check_fields(path: Path, values: DataclassInstance, part: str = "") -> None:
    """Refuse the first value of a dataclass that its declaration doesn't allow."""
    for declared in fields(values):
        if "allowed" in declared.metadata:  # others are dataclasses with their own check
            refuse(path, declared.name, getattr(values, declared.name), declared.metadata["allowed"], part)


def refuse(path: Path, name: str, contents: object, allowed: Schema, part: str = "", key: str | None = None) -> None:
    """Raise unless what a field has is allowed.

    key : the key that decides it, if that isn't ``name``
    """
    if contents not in allowed:
        raise SbkitError("damaged-bundle", f"{_where(path, part)}: {name} is {shown(contents)}, but must be {allowed}",
                         hint=_AGAIN, file=path, key=key or name, value=contents)


def check_state(path: Path, state: Mapping[str, Mapping[str, Any]], part: str = "") -> None:
    """Refuse the state of a stream if it has too many numbers."""
    if sum(math.prod(part_of_state["shape"]) for part_of_state in state.values()) > MAX_STATE:
        raise SbkitError("damaged-bundle", f"{_where(path, part)}: state has more than {MAX_STATE:,} numbers",
                         hint=_AGAIN, file=path, key="state")


def check_formats(path: Path, name: str, files: dict[str, str], models: dict[str, str]) -> None:
    """Refuse a graph that has other formats than the model."""
    if files.keys() != models.keys():
        raise SbkitError("damaged-bundle",
                         f"{path}: {name} must give a file for each of {', '.join(models)}, not {shown(files)}",
                         hint=_AGAIN, file=path, key=name)


def check_unique(path: Path, name: str, values: list[str]) -> None:
    """Refuse a value that occurs twice."""
    duplicates = sorted(text for text, count in Counter(values).items() if count > 1)
    if duplicates:
        raise SbkitError("damaged-bundle", f"{path}: {name} has {shown(duplicates[0])} twice", hint=_AGAIN, file=path,
                         key=name, value=duplicates[0])


def _where(path: Path, part: str) -> str:
    return f"{path}: {part}" if part else str(path)
