"""The report of a check: mistakes with their places and suggestions, and tables, for people and for programs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from sbkit.system.console import counted, table

ERROR, WARNING = "error", "warning"
#: Increase when a field of the JSON is renamed or removed.
JSON_FORMAT = 2
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Finding:
    """A mistake or a warning: what is wrong, where, and what to do."""

    severity: str
    code: str
    """A stable name for the kind of mistake, for programs."""
    file: str
    """The path of the YAML, or ``command line``."""
    line: int
    """Counted from 1; 0 if there is none."""
    key: str
    message: str
    suggestion: str = ""
    column: int = 0

    @property
    def where(self) -> str:
        """``file:line``, which editors and terminals turn into a link."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        hint = f"; {self.suggestion}" if self.suggestion else ""
        return f"{self.where}: {self.severity}: {key}{self.message}{hint} [{self.code}]"


def amount(value: float) -> str:
    """An amount of money or energy: 1,234.5, 0.42, under 0.01, 0."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.01 else "under 0.01" if value else "0"


@dataclass
class Section:
    """A table of the report with a title and remarks."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    remarks: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """The same as plain numbers, for programs."""

    def text(self) -> str:
        lines = [self.title]
        if self.rows:
            lines.append(table(self.columns, self.rows, indent="  "))
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks)])


@dataclass
class Report:
    """The findings, tables and notes of the check of a recipe."""

    recipe: str
    findings: list[Finding] = field(default_factory=list)
    sections: dict[str, Section] = field(default_factory=dict)
    """Tables by a stable name: devices, shapes, start, learning, labels, leaks, cost."""
    ignored: list[Finding] = field(default_factory=list)
    """Warnings that were left out, because the recipe or the command line ignores their codes."""
    notes: list[str] = field(default_factory=list)
    """Parts of the check that were left out, and why."""
    seconds: float = 0.0
    built: bool = True
    """Whether the objects of the recipe were built and checked as well."""
    partly: bool = False
    """Whether the run on fake tensors ended before the loss, so that much of the check is left out."""
    tree: Any = None  # a Node, whose file imports this one
    """The recipe's resolved tree, a ``Node``; None if it has mistakes, or values that are known once it is built."""

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings that aren't there yet."""
        reported = set(self.findings)
        for finding in findings:
            if finding not in reported:
                reported.add(finding)
                self.findings.append(finding)

    def _with_severity(self, severity: str) -> list[Finding]:
        return sorted((f for f in self.findings if f.severity == severity), key=lambda f: (f.file, f.line, f.column))

    @property
    def errors(self) -> list[Finding]:
        """Findings that would end a run or make its results wrong, ordered by file and line."""
        return self._with_severity(ERROR)

    @property
    def warnings(self) -> list[Finding]:
        """Findings that may be mistakes, ordered by file and line."""
        return self._with_severity(WARNING)

    def problems(self) -> str:
        """Errors and warnings, one per line."""
        return "\n".join(map(str, [*self.errors, *self.warnings]))

    def facts(self) -> str:
        """The tables, and notes on what wasn't checked."""
        tables = [section.text() for section in self.sections.values()]
        notes = "\n".join(f"not checked: {note}" for note in self.notes)
        return "\n\n".join(filter(None, [*tables, notes]))

    def verdict(self) -> str:
        """A summary in one line."""
        ignored = ""
        if self.ignored:
            codes = ", ".join(sorted({finding.code for finding in self.ignored}))
            ignored = f", {counted(len(self.ignored), WARNING)} ignored ({codes})"
        if not self.errors and not self.warnings:
            seen = (" in what can be seen without running it" if not self.built else
                    " in what could be checked" if self.partly else "")
            return f"{self.recipe}: nothing wrong{seen}{ignored} ({self.seconds:.1f} s)"
        counts = [counted(len(some), some[0].severity) for some in (self.errors, self.warnings) if some]
        return f"{self.recipe}: {' and '.join(counts)}{ignored} ({self.seconds:.1f} s)"

    def text(self) -> str:
        """The whole report for a terminal."""
        return "\n\n".join(filter(None, [self.problems(), self.facts(), self.verdict()]))

    def json(self) -> str:
        """The whole report as JSON for editors and CI; within a format, keys are only added."""
        return json.dumps({
            "format": JSON_FORMAT, "recipe": self.recipe, "ok": not self.errors,
            "errors": [asdict(f) for f in self.errors], "warnings": [asdict(f) for f in self.warnings],
            "ignored": len(self.ignored),
            "sections": {name: asdict(section) for name, section in self.sections.items()},
            "not_checked": self.notes, "seconds": round(self.seconds, 3),
        }, indent=1, ensure_ascii=False, default=str)


def did_you_mean(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option most similar to a misspelt word, None if none is similar enough."""
    by_lower = {option.lower(): option for option in reversed(list(options))}  # AdamW for adamw
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def listed(names: Iterable[str], limit: int = 12) -> str:
    """Names separated by commas; after ``limit`` names only the number of the others."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
