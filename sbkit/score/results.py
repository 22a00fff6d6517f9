"""What a test came to, of any task: numbers, words for the screen, files and tables for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write, table

#: Recordings named where some could not be read.
NAMED = 5


@dataclass
class Table:
    """One table of a report: a title, the names of columns, rows, and a line below."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    remark: str = ""


@dataclass
class Results:
    """The numbers of a test and what is to be shown of them. A task's own add files, tables and lines."""

    stats: dict[str, float]
    """The metric among them."""
    utterances: int
    unread: dict[str, str] = field(default_factory=dict)
    """id -> why: what they are without."""
    tables: list[Table] = field(default_factory=list)
    """For the report."""

    def check(self) -> None:
        """Refuse what tells nothing."""
        if not self.utterances:
            raise SbkitError("there is no utterance to score", hint="look at the corpus and its split")

    def headline(self) -> str:
        """The numbers in a line."""
        return ", ".join([*(f"{name} {value:.4g}" for name, value in self.stats.items()),
                          f"{self.utterances} utterances"])

    def lines(self) -> list[str]:
        """For the screen, below the headline."""
        return []

    def facts(self) -> dict[str, Any]:
        """For result.json of an evaluation: the numbers and what is known of their certainty."""
        return dict(self.stats)

    def columns(self) -> list[tuple[str, Any]]:
        """What the table of ``sbkit evaluate`` shows of it."""
        return [(name, f"{value:.4g}") for name, value in self.stats.items()]

    def files(self, of: str = "") -> list[str]:
        """Their names; ``of``, such as ``test``, goes into them."""
        return [f"{of}{'_' if of else ''}results.json"]

    def where(self, folder: Path, of: str = "") -> str:
        """What to look at, in a line."""
        return f"all numbers: {folder / self.files(of)[0]}"

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Leave its files in a folder, of the utterances of a manifest."""
        del manifest
        with atomic_write(folder / self.files(of)[0]) as out:
            json.dump({"stats": self.stats, "utterances": self.utterances, "unread": self.unread,
                       "tables": [vars(each) for each in self.tables]}, out, indent=1, ensure_ascii=False)

    def text(self) -> str:
        """Its tables for a terminal."""
        return "\n\n".join(f"{each.title}\n{table(each.columns, each.rows)}" for each in self.tables)


def tell_unread(split: str, unread: Mapping[str, str], read: int) -> str:
    """What error rates are without: ``unread`` (id -> why) beside the utterances that were ``read``.

    >>> tell_unread("test", {"b": "b.wav: no such file"}, 1999)
    '1 of 2,000 test utterances could not be read and is not scored: b.wav: no such file'
    """
    some = "; ".join(list(unread.values())[:NAMED])
    more = f" and {len(unread) - NAMED} more" if len(unread) > NAMED else ""
    return (f"{len(unread):,} of {read + len(unread):,} {split} utterances could not be read and "
            f"{'is' if len(unread) == 1 else 'are'} not scored: {some}{more}")
