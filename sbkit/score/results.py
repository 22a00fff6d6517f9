"""Test results of any task: numbers, lines for the screen, files and tables for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.score.estimate import MetricEstimate
from sbkit.score.rates import first_few
from sbkit.system.console import atomic_write, counted, table

_RECORDING = ("id", "wav", "start", "duration", "speaker")


@dataclass
class Table:
    """One table of a report: title, column names, rows, and a remark below."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    remark: str = ""


class SoundSample(NamedTuple):
    """A recording to listen to in a report, and what it is; ``wav`` may be a path below the results' folder."""

    label: str
    wav: str
    start: float
    duration: float

    @property
    def id(self) -> str:
        """A name for it that no other recording has."""
        return f"{self.wav} from {self.start}"


@dataclass
class Player:
    """Recordings that a report plays side by side: title, remark, and the recordings."""

    title: str
    remark: str
    sounds: list[SoundSample]
    among_worst: bool = False


@dataclass
class Results:
    """The numbers of a test and how to show them. A task's subclass adds files, tables and lines."""

    stats: dict[str, float]
    """The numbers by name, including the metric."""
    utterances: int
    unread: dict[str, str] = field(default_factory=dict)
    """The utterances missing from the numbers: id -> reason."""
    tables: list[Table] = field(default_factory=list)
    """Tables for the report."""
    players: list[Player] = field(default_factory=list)
    """Recordings for the report to play; set when the results are written."""
    estimate: MetricEstimate | None = field(default=None, kw_only=True)
    """The metric's interval, and its value for each recording."""
    parts: dict[str, Results] = field(default_factory=dict, kw_only=True)
    """The results of each part of a mixture."""

    def check(self) -> None:
        """Raise if there is nothing to report."""
        if not self.utterances:
            raise SbkitError("no-utterances", "there is no utterance to score", hint="check the corpus and its split")

    def headline(self) -> str:
        """The numbers on one line."""
        return ", ".join([*(self._formatted(name) for name in self.stats), counted(self.utterances, "utterance")])

    def _formatted(self, name: str) -> str:
        has_interval = self.estimate is not None and name == self.estimate.name
        return str(self.estimate) if has_interval else f"{name} {self.stats[name]:.4g}"

    def lines(self) -> list[str]:
        """Lines for the screen, below the headline."""
        return []

    def facts(self) -> dict[str, Any]:
        """The content of an evaluation's result.json: the numbers and their uncertainty."""
        facts: dict[str, Any] = dict(self.stats)
        if self.estimate and self.estimate.interval:
            facts[f"{self.estimate.name}_interval"] = self.estimate.interval
        return facts

    def columns(self) -> list[tuple[str, Any]]:
        """The columns of ``sbkit evaluate``'s table."""
        return [(name, self._formatted(name).removeprefix(f"{name} ")) for name in self.stats]

    def table_rows(self) -> list[list[tuple[str, Any]]]:
        """The rows of that table, with the same columns; several if a test was run with several chunk sizes."""
        return [self.columns()]

    def figures(self, name: str) -> Mapping[str, float]:
        """The figures of this name that ``--max`` limits, by what they belong to; empty if there are none."""
        return {"": self.stats[name]} if name in self.stats else {}

    def files(self, of: str = "") -> list[str]:
        """The names of the result files; ``of``, such as ``test``, is part of them."""
        return [f"{of}{'_' if of else ''}results.json"]

    def where(self, folder: Path, of: str = "") -> str:
        """A line that names the file with all numbers."""
        return f"all numbers: {folder / self.files(of)[0]}"

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Write the result files of a manifest's utterances into a folder."""
        content: dict[str, Any] = {"stats": self.stats, "utterances": self.utterances, "unread": self.unread,
                                   "tables": [vars(one) for one in self.tables]}
        if self.estimate:
            content["estimate"] = vars(self.estimate)
        row_of = {name: i for i, name in enumerate(manifest.ids)}
        rows = [manifest.row(row_of[name]) for name in (self.estimate.ids if self.estimate else ())]
        content["recordings"] = [{name: getattr(row, name) for name in _RECORDING} for row in rows]
        content["players"] = [{**vars(player), "sounds": [sound._asdict() for sound in player.sounds]}
                              for player in self.players]
        with atomic_write(folder / self.files(of)[0]) as out:
            json.dump(content, out, indent=1, ensure_ascii=False)

    def text(self) -> str:
        """The tables formatted for a terminal."""
        return "\n\n".join(f"{one.title}\n{table(one.columns, one.rows)}" for one in self.tables)


def describe_unread(split: str, unread: Mapping[str, str], read: int) -> str:
    """Describe utterances that could not be scored: ``unread`` (id -> reason) out of those and the ``read`` ones.

    >>> describe_unread("test", {"b": "b.wav: no such file"}, 1999)
    '1 of 2,000 test utterances could not be read and is not scored: b.wav: no such file'
    """
    return (f"{len(unread):,} of {read + len(unread):,} {split} utterances could not be read and "
            f"{'is' if len(unread) == 1 else 'are'} not scored: {first_few(list(unread.values()), '; ')}")
