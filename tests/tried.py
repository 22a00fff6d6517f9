"""How much tests try to break: they count it, and the table in SECURITY.md has the counts of the long run.

    make tried        # the long run: SBKIT_TRIED names the file of counts, from which this program writes the table
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "SECURITY.md"
#: Ways to spoil each kind of file in the long run.
LONG = 2000
FILES = "ways to spoil a file: bundles, language models, tables, recordings, archives, weights"
_ROW = re.compile(r"^\| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def promised() -> dict[str, tuple[int, int]]:
    """The table: in how many tests something is tried, and how often in each at least."""
    return {what: (int(tests.replace(",", "")), int(least.replace(",", "")))
            for what, tests, least in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def record(what: str, count: int, long: int = 0) -> None:
    """Count what the present test has tried; fail if the table claims more of each such test.

    long : the count in the long run, if it is another one
    """
    if path := os.environ.get("SBKIT_TRIED"):
        if count < long:  # the short twin of a longer test
            return
        with open(path, "a") as file:
            file.write(json.dumps([what, os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0], count]) + "\n")
    elif what in promised():
        assert max(count, long) >= promised()[what][1], f"SECURITY.md claims more of: {what}"


def main(path: str) -> None:
    found: dict[str, dict[str, int]] = {}
    for line in Path(path).read_text().splitlines():
        what, test, count = json.loads(line)
        found.setdefault(what, {})[test] = count
    rows = [f"| {what} | {len(counts):,} | {min(counts.values()):,} |" for what, counts in sorted(found.items())]
    text = PAGE.read_text(encoding="utf-8")
    before, rule, after = text.partition("| --- | ---: | ---: |\n")
    after = re.sub(r"\A(\|.*\n)*", "", after)
    PAGE.write_text(f"{before}{rule}" + "\n".join(rows) + f"\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
