"""Writes and reads ``suspects.csv``: training rows whose labels may be wrong, and a decision on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sbkit.data.exclusions import read_guarded, write_guarded
from sbkit.data.manifest import Column
from sbkit.errors import SbkitError, shown, shown_names

KEEP, DROP, FIX = DECISIONS = ("keep", "drop", "fix")
_NEEDED = ("ID", "decision", "label", "corpus")


class Suspect(NamedTuple):
    """A row of the list.

    decision : ``keep``, ``drop``, or ``fix``: left out until the corpus has another label
    score : the evidence against the label, a natural logarithm
    expected_right : the expected share of right labels among the rows up to this one
    fix : the right text, if it was entered
    corpus : where the rows were read from
    """

    ID: str
    decision: str
    reason: str
    score: float
    expected_right: float
    label: str
    hypothesis: str
    fix: str
    wav: str
    corpus: str


def write(path: Path, rows: Sequence[Suspect]) -> None:
    """Write the list, completely or not at all."""
    columns = list(zip(*rows, strict=True)) or [()] * len(Suspect._fields)
    texts = [[f"{value:.3f}" if isinstance(value, float) else value for value in column] for column in columns]
    write_guarded(path, pa.table([pa.array(column, pa.large_string()) for column in texts],
                                 names=list(Suspect._fields)))


@dataclass(frozen=True)
class Exclusions:
    """The rows to leave out by a list, by id, with the labels that were judged."""

    path: Path
    corpus: str
    labels: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Exclusions:
        """Read a list; refuses one with a decision that isn't among ``DECISIONS``."""
        if not path.is_file():
            raise SbkitError("no-such-path", f"corpus: exclude: there is no file {path}",
                             hint="sbkit clean writes one: suspects.csv", file=path, key="corpus.exclude")
        table = read_guarded(path, _NEEDED, "a list of sbkit clean has the columns " + ", ".join(Suspect._fields))
        ids, decisions, labels, corpora = (Column(column) for column in table.columns)
        for row, decision in enumerate(decisions):
            if decision not in DECISIONS:
                raise SbkitError("malformed-row", f"{path}, row {row + 1} ({shown_names([ids[row]])}): the decision is "
                                 f"{shown(decision)}", hint=f"decisions are {', '.join(DECISIONS)}", file=path,
                                 value=decision)
        return cls(path, corpora[0] if len(corpora) else "", {
            name: label for name, label, decision in zip(ids, labels, decisions, strict=True) if decision != KEEP})

    def mask(self, ids: Column, texts: Sequence[str], origin: str) -> np.ndarray:
        """Which rows are left out, [N] booleans: those on the list whose label hasn't changed since it was judged.

        origin : names the corpus in a message
        """
        same_label: dict[str, bool] = {}
        for name, text in zip(ids, texts, strict=True):
            if name in self.labels:  # letters and digits are the same under other text rules
                now, before = ("".join(filter(str.isalnum, each.casefold())) for each in (text, self.labels[name]))
                same_label[name] = now == before
        unknown = [name for name in self.labels if name not in same_label]
        same = sum(same_label.values())
        if self.labels and 2 * same < len(self.labels):
            raise SbkitError("list-of-another-corpus", f"{self.path} is a list of another corpus, "
                             f"{shown_names([self.corpus]) or 'which it does not name'}: {same} of its "
                             f"{len(self.labels)} rows have the same label in {origin}",
                             hint="make one for this corpus with sbkit clean", file=self.path)
        if unknown:
            raise SbkitError(
                "list-of-another-corpus",
                f"{self.path} names {len(unknown)} rows that {origin} does not have: " + shown_names(unknown),
                hint="remove their lines from the list if they were removed from the corpus", file=self.path,
                value=unknown[0])
        return np.fromiter((same_label.get(name, False) for name in ids), bool, len(ids))
