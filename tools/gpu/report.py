"""``gpu-report.md`` for people and ``gpu-report.json`` for programs: expected and measured results, and the machine."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbkit.system.console import atomic_write

from .check import BAD, FAILED, Result, headline, passed

FORMAT = 1
#: Lines of a failed check's log that the page shows.
LAST_LINES = 15
SMALL = " Small sizes on a CPU: the figures say nothing about a card, only that each check works."


@dataclass(frozen=True)
class RunReport:
    """The contents of the report."""

    at: float
    seconds: float
    dry_run: bool
    machine: Sequence[tuple[str, str]]
    results: Sequence[Result]
    only: Sequence[str] = ()


def write(report: RunReport, out: Path) -> tuple[Path, Path]:
    """Write both files atomically."""
    written = Path(f"{out}.md"), Path(f"{out}.json")
    for path, text in zip(written, (page(report), json.dumps(facts(report), indent=1) + "\n"), strict=True):
        with atomic_write(path) as file:
            file.write(text)
    return written


def facts(report: RunReport) -> dict[str, Any]:
    """Return the report as JSON; keys are only ever added."""
    checks = []
    for result in report.results:
        lines = [{"what": expect.what, "expected": expect.expected, **asdict(seen)}
                 for expect, seen in result.lines()]
        checks.append({"name": result.check.name, "title": result.check.title, "verdict": result.verdict,
                       "seconds": round(result.seconds, 1), "command": _command(report, result), "notes": result.notes,
                       "lines": lines})
    return {"format": FORMAT, "ok": passed(report.results), "verdict": headline(report.results),
            "dry_run": report.dry_run, "at": round(report.at), "seconds": round(report.seconds, 1),
            "machine": dict(report.machine), "checks": checks}


def page(report: RunReport) -> str:
    """Format the report in Markdown."""
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.at))
    blocks = [
        "# Dry run of the GPU report, on a CPU" if report.dry_run else "# GPU report",
        f"**{headline(report.results)}.**",
        f"`{_command(report)}`, {day}, {_clock(report.seconds)}.{SMALL if report.dry_run else ''}",
        "## Machine",
        _table(["what", "found"], report.machine),
        "## Checks",
        _table(["check", "what", "expected", "seen", "verdict"], _rows(report.results)),
        "## Each alone",
        *(block for result in report.results for block in _details(report, result)),
    ]
    text = "\n\n".join(blocks) + "\n"
    # It gets pasted into public places.
    home = Path.home()
    if home.name:  # a container's may be the root
        text = text.replace(str(home), "~").replace(f"/{home.name}/", "/USER/")
    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])", "HOST", text)


def _rows(results: Sequence[Result]) -> Iterable[list[str]]:
    for result in results:
        for i, (expect, seen) in enumerate(result.lines()):
            verdict = f"**{seen.verdict}**" if seen.verdict in BAD else seen.verdict
            yield ["" if i else result.check.name, expect.what, expect.expected, seen.seen, verdict]


def _details(report: RunReport, result: Result) -> Iterable[str]:
    yield f"### {result.check.name}: {result.check.title}"
    yield f"`{_command(report, result)}`, {result.seconds:.1f} s, {result.verdict}."
    if result.notes:
        yield "\n".join(f"- {note}" for note in result.notes)
    figures = [("" if i else expect.what, name, _figure(value)) for expect, seen in result.lines()
               for i, (name, value) in enumerate(seen.figures.items())]
    if figures:
        yield _table(["of", "figure", "value"], figures)
    if result.verdict == FAILED and result.log and Path(result.log).exists():
        lines = Path(result.log).read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        yield "    " + "\n    ".join(lines)


def _command(report: RunReport, result: Result | None = None) -> str:
    words = ["python -m tools.gpu", *(["--dry-run"] if report.dry_run else [])]
    only = report.only if result is None else [result.check.name]
    return " ".join([*words, *([f"--only {','.join(only)}"] if only else [])])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in row)} |" for row in lines)


def _cell(text: str) -> str:
    """Put a text on one line, and escape what would end the cell."""
    return " ".join(str(text).replace("|", "\\|").split())


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    """
    >>> _clock(492.4)
    '8 min 12 s'
    """
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
