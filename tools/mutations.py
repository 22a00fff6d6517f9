"""How many of some seeded mutations of sbkit/ the tests catch:

    python -m tools.mutations RESULTS.jsonl --tree . --count 80 --seconds 300

Each changes one place (a comparison, a constant, a call that is left out, an ``if`` whose branches are swapped), and
runs the tests that import the changed file, those of its own first, until one fails. A line of the results is one
mutation; a second start goes on after the last one. Two trees with the same sbkit/ and other tests draw the same.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

OTHER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
         ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
#: How long a process may last that waits for others, in times of the processor seconds that it may use.
PATIENCE = 20
#: Tiers of tests, the quick ones first: each is run where the one before has caught nothing.
TIERS = "not slow and not long", "slow and not long"


class Mutation(NamedTuple):
    """What replaces a piece of a file's source."""

    file: str
    line: int
    kind: str
    start: int
    """In characters from the file's beginning."""
    end: int
    new: str

    def applied(self, source: str) -> str:
        return source[:self.start] + self.new + source[self.end:]


def mutations(file: str, source: str) -> list[Mutation]:
    """All that there are of a source of Python; a few of them don't parse."""
    lines = source.splitlines(keepends=True)
    begins = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    found: list[Mutation] = []

    def place(line: int | None, column: int | None) -> int:  # columns count bytes
        return begins[(line or 1) - 1] + len(lines[(line or 1) - 1].encode()[:column].decode())

    def begin(node: ast.expr | ast.stmt) -> int:
        return place(node.lineno, node.col_offset)

    def end(node: ast.expr | ast.stmt) -> int:
        return place(node.end_lineno, node.end_col_offset)

    def add(node: ast.expr | ast.stmt, kind: str, start: int, stop: int, new: str) -> None:
        found.append(Mutation(file, node.lineno, kind, start, stop, new))

    tree = ast.parse(source)
    # Types say nothing to a run, and what is in an f-string has no place of its own before Python 3.12.
    typed = (getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns"))
    ignored = {id(inner) for node in (*typed, *(each for each in ast.walk(tree) if isinstance(each, ast.JoinedStr)))
               if node is not None for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Compare):
            between = source[end(node.left):begin(node.comparators[0])]
            mark = ")" * between.count(")"), "(" * between.count("(")
            add(node, "comparison", end(node.left), begin(node.comparators[0]),
                f"{mark[0]} {OTHER[type(node.ops[0])]} {mark[1]}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            new = repr(not node.value) if isinstance(node.value, bool) else f"({node.value!r} + 1)"
            add(node, "constant", begin(node), end(node), new)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            add(node, "call", begin(node), end(node), "pass")
        elif isinstance(node, (ast.If, ast.IfExp)):
            asked = ast.get_source_segment(source, node.test)
            add(node, "branches", begin(node.test), end(node.test), f"(not ({asked}))")
    return found


def drawn(tree: Path, count: int, seed: int) -> list[Mutation]:
    """As many of each kind, at places drawn at random."""
    kinds: defaultdict[str, list[Mutation]] = defaultdict(list)
    sources = {str(path.relative_to(tree)): path.read_text(encoding="utf-8")
               for path in sorted((tree / "sbkit").rglob("*.py"))}
    for file, source in sources.items():
        for each in mutations(file, source):
            kinds[each.kind].append(each)
    rng = random.Random(seed)
    for kind in sorted(kinds):
        rng.shuffle(kinds[kind])

    def parses(each: Mutation) -> bool:  # asked of what is drawn alone: to parse all of them takes a minute
        try:
            ast.parse(each.applied(sources[each.file]))
        except SyntaxError:
            return False
        return True

    in_turn = zip(*(filter(parses, kinds[kind]) for kind in sorted(kinds)), strict=False)
    return list(islice(chain.from_iterable(in_turn), count))


def tests_of(tree: Path, file: str) -> list[str]:
    """Files of tests that import it, its own first, those of its room next, short ones first; or all of its room."""
    name, package = Path(file).stem, ".".join(Path(file).with_suffix("").parts)
    above, _, last = package.removesuffix(".__init__").rpartition(".")
    asks = re.compile(rf"{re.escape(package.removesuffix('.__init__'))}\b"
                      rf"|from {re.escape(above)} import [^#\n]*\b{re.escape(last)}\b")
    room = Path("tests", *Path(file).parts[1:-1])
    found: dict[str, tuple[bool, bool, bool, int]] = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        text, place = path.read_text(encoding="utf-8"), path.relative_to(tree)
        own, near = place == room / f"test_{name}.py", place.parent == room
        if own or near or asks.search(text):
            found[str(place)] = not own, not asks.search(text), not near, len(text)
    asking = [place for place in found if not all(found[place][:2])]
    return sorted(asking or found, key=lambda place: found[place])


def caught(tree: Path, files: list[str], tier: str, seconds: float) -> str:
    """How tests of a tree end, in a process of their own that is forked: caught, survived, none, or out of time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path[:] = [str(tree), *(each for each in sys.path if each and not (Path(each) / "sbkit").is_dir())]
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 60))
        out = os.open(tree / "mutation.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", tier, *files])))
    until = time.monotonic() + PATIENCE * seconds
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.1)
    if done == (0, 0):
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "out of time"
    if (code := os.waitstatus_to_exitcode(done[1])) == -signal.SIGXCPU:
        return "out of time"
    return {0: "survived", 5: "none"}.get(code, "caught")


def used() -> float:
    """Processor seconds of all processes that have ended."""
    ended = os.times()
    return ended.children_user + ended.children_system


def tried(tree: Path, mutation: Mutation, seconds: float) -> dict[str, object]:
    """What becomes of a mutation, by which tests, in how many processor seconds."""
    path, files, began = tree / mutation.file, tests_of(tree, mutation.file), used()
    source, verdict, tier = path.read_text(encoding="utf-8"), "none", ""
    path.write_text(mutation.applied(source), encoding="utf-8")
    try:
        for tier in TIERS:
            left = seconds - (used() - began)
            now = caught(tree, files, tier, left) if files and left > 0 else "none"
            verdict = now if now != "none" else verdict
            if now in ("caught", "out of time"):
                break
    finally:
        path.write_text(source, encoding="utf-8")
    log = tree / "mutation.log"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.M) if log.exists() else None
    return {"verdict": verdict, "tier": tier, "seconds": round(used() - began, 1),
            "by": failed[1] if failed and verdict == "caught" else None}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="RESULTS.jsonl")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="whose sbkit/ and tests/")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="of a processor, at most, for one mutation")
    given = parser.parse_args(words)
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    known = [json.loads(line) for line in lines]
    import speechbrain  # noqa: F401  # and torch: the processes that are forked have imported them

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(shutil.copytree(given.tree, Path(folder, "tree"), symlinks=True,
                                    ignore=shutil.ignore_patterns(".git", ".venv", "results", "__pycache__")))
        for mutation in drawn(tree, given.count, given.seed)[len(known):]:
            known.append(mutation._asdict() | tried(tree, mutation, given.seconds))
            with given.results.open("a") as out:
                print(json.dumps(known[-1]), file=out)
            print("{verdict:12} {seconds:6} s  {file}:{line} {kind}  {by}".format(**known[-1]), flush=True)
    verdicts = [each["verdict"] for each in known]
    print(", ".join(f"{name}: {verdicts.count(name)}" for name in sorted(set(verdicts))), f"of {given.count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
