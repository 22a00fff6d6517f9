"""What was taken and what was not, by whole modules where all of one shares its fate."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from sbkit.runs.initial.matching import ParameterOutcome
from sbkit.system.console import table

COLUMNS = ["part", "numbers", "what", "why"]


def text(source: str, outcomes: Sequence[ParameterOutcome]) -> str:
    """The table, with a line above it that says where the weights come from."""
    return f"Starting from {source}\n{table(COLUMNS, rows(outcomes), indent='  ')}"


def rows(outcomes: Sequence[ParameterOutcome]) -> list[list[str]]:
    """The rows of the table, whose columns are ``COLUMNS``."""
    return [[fate.name, f"{fate.numbers:,}", fate.what, fate.why] for fate in collapsed(outcomes)]


def collapsed(outcomes: Iterable[ParameterOutcome]) -> list[ParameterOutcome]:
    """One row for each module of which all shares its fate; layers in a row that do, in one.

    >>> rows = collapsed([Fate(name, 2, what) for name, what in
    ...                   (("a.0.w", "taken"), ("a.1.w", "taken"), ("a.2.w", "left"), ("b", "taken"))])
    >>> [(fate.name, fate.numbers, fate.what) for fate in rows]
    [('a.0-1', 4, 'taken'), ('a.2', 2, 'left'), ('b', 2, 'taken')]
    """
    return [fate for _, group in _by_head([(fate.name.split("."), fate) for fate in outcomes], 0)
            for fate in _rows(group, 1)]


Entry = tuple[list[str], ParameterOutcome]


def _rows(entries: list[Entry], depth: int) -> list[ParameterOutcome]:
    words, first = entries[0]
    if len({(fate.what, fate.why) for _, fate in entries}) == 1:
        return [first._replace(name=".".join(words[:depth]), numbers=sum(fate.numbers for _, fate in entries))]
    found = []
    for _, group in _by_head(entries, depth):
        found += _rows(group, depth + 1)
    return _in_a_row(found, depth)


def _by_head(entries: list[Entry], depth: int) -> list[tuple[str, list[Entry]]]:
    groups: dict[str, list[Entry]] = {}
    for words, fate in entries:
        groups.setdefault(words[depth] if depth < len(words) else "", []).append((words, fate))
    return list(groups.items())


def _in_a_row(rows: list[ParameterOutcome], depth: int) -> list[ParameterOutcome]:
    """Numbered neighbours of one fate as one row."""
    def kind(fate: ParameterOutcome) -> tuple[object, ...]:
        words = fate.name.split(".")
        numbered = len(words) == depth + 1 and words[-1].isdigit()
        return (fate.what, fate.why, *words[:-1]) if numbered else (fate,)

    found = []
    for _, group in itertools.groupby(rows, kind):
        same = list(group)
        name = f"{same[0].name}-{same[-1].name.rpartition('.')[2]}" if len(same) > 1 else same[0].name
        found.append(same[0]._replace(name=name, numbers=sum(fate.numbers for fate in same)))
    return found
