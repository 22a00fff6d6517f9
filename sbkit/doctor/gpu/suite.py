"""The tests that need a card."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench

#: Text that marks files with such tests: collecting all others would take longer than running these.
MARKS = "mark.gpu"
#: Files of which a rehearsal runs the tests: they skip, and each takes seconds to import.
FEW = 4


def check(bench: Bench) -> None:
    """Run the tests in one pytest process."""
    tests = bench.checkout / "tests"
    files = sorted(path for path in tests.rglob("test_*.py") if MARKS in path.read_text(encoding="utf-8"))
    out = bench.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={out}",
               *map(str, files[:bench.size(len(files), FEW)])]
    print(" ".join(command), flush=True)
    done = subprocess.run(command, cwd=bench.checkout, stdin=subprocess.DEVNULL, check=False)
    if not out.exists():
        bench.not_shown("tests", "needs pytest: pip install -e '.[dev]'") if _no_pytest() else \
            bench.found("tests", f"pytest ended with code {done.returncode}", False)
        return
    counts, bad = outcomes(out)
    bench.stand_in("they skip, since there is no card")
    words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    good = not bad and done.returncode == 0 and bool(counts["skipped"] if bench.rehearse else counts["passed"])
    bench.found("tests", words + (f": {', '.join(bad[:5])}" if bad else ""), good, **counts)


def _no_pytest() -> bool:
    from importlib import util

    return util.find_spec("pytest") is None


def outcomes(junit: Path) -> tuple[dict[str, int], list[str]]:
    """Count tests by outcome, and list those that didn't pass."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    bad = []
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            bad.append(case.get("name", "?"))
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, bad
