"""Leaves out warnings of a check by their codes, which ``--ignore CODE`` and the key ``ignore_findings`` name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sbkit import explanations
from sbkit.errors import SbkitError
from sbkit.recipe.report import ERROR, WARNING, Finding, Report
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.values import data

KEY = "ignore_findings"
OPTION = "ignore"


class IgnoredCode(NamedTuple):
    """A code whose warnings are left out, and where it is named."""

    code: str
    place: Place
    key: str


def on_command_line(values: Iterable[str]) -> list[str]:
    """The codes in the values of ``--ignore``, each of which may have several, separated by commas.

    Raises for a code that doesn't exist.
    """
    codes = [code.strip().strip("[]") for value in values for code in value.split(",") if code.strip()]
    for code in codes:
        try:
            explanations.explanation(code)
        except SbkitError as error:
            raise SbkitError(error.code, f"--{OPTION}: {error.message}", hint=error.hint, key=OPTION,
                             value=code) from None
    return codes


def in_recipe(root: Node, findings: Findings) -> list[IgnoredCode]:
    """The codes that a recipe ignores; one that doesn't exist is an error, which the findings get.

    Another check reports a value that isn't a list of texts.
    """
    node = root.value.get(KEY)
    codes = data(node) if node is not None else None
    if node is None or not isinstance(codes, (list, tuple)):
        return []
    children = node.children() or [node] * len(codes)  # (a, b) is one scalar
    ignored = []
    for code, child in zip(codes, children, strict=True):
        if not isinstance(code, str):
            continue
        try:
            explanations.explanation(code)
        except SbkitError as error:
            findings.report(error, child.place, child.key)
        else:
            ignored.append(IgnoredCode(code, child.place, KEY))
    return ignored


def ignore(report: Report, ignored: Sequence[IgnoredCode]) -> None:
    """Move the warnings with these codes from the report's findings to those that it ignores.

    Errors stay, and that they do is an error of its own where the code is named: a run would end, or its results would
    be wrong.
    """
    codes = {entry.code for entry in ignored}
    left_out = [finding for finding in report.findings if finding.severity == WARNING and finding.code in codes]
    report.findings = [finding for finding in report.findings if finding not in left_out]
    report.ignored += left_out

    codes_of_errors = {finding.code for finding in report.errors}
    report.add(Finding(ERROR, "cannot-ignore-error", entry.place.file, entry.place.line, entry.key,
                       f"{entry.code} is the code of an error, and only warnings can be ignored",
                       f"fix the error, or leave {entry.code} out here", entry.place.column)
               for entry in ignored if entry.code in codes_of_errors)
