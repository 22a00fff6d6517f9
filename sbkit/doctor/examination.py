"""Runs all checks of a machine, and formats them as a table for the terminal or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from sbkit.doctor import cards, folders, machine, packages, probe
from sbkit.doctor.finding import IN_THE_WAY, NOTE, Check, MachineFinding, Scope, run_check

#: The checks in the order of the table, with their names in case they fail.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("Python", packages.python), ("packages", packages.needed), ("torch", packages.torch_pair),
    ("NVIDIA driver", cards.driver), ("cards", cards.cards), ("attention", cards.attention),
    ("CUDA libraries", cards.libraries), ("health of cards", cards.health), ("clock of cards", cards.clocks),
    ("onnxruntime", packages.onnxruntime), ("compilers", packages.compilers), ("cores", machine.cores),
    ("memory", machine.main_memory), ("shared memory", machine.shared_memory), ("open files", machine.open_files),
    ("locale", machine.language), ("caches", folders.caches), ("data", folders.data), ("output", folders.output),
    ("clock", folders.time_stamps),
)
_WIDEST = 120


def examine(scope: Scope) -> list[MachineFinding]:
    """Run all checks; torch and onnxruntime are probed first, in parallel."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(probe.inspect_library, probe.LIBRARIES))
    return [finding for what, check in CHECKS for finding in run_check(what, check, scope)]


def in_the_way(found: Sequence[MachineFinding]) -> bool:
    """Whether any finding is in the way."""
    return _count(found, IN_THE_WAY) > 0


def as_json(found: Sequence[MachineFinding]) -> str:
    """Format the findings as JSON."""
    return json.dumps({"findings": [asdict(each) for each in found], "in_the_way": _count(found, IN_THE_WAY)}, indent=1,
                      ensure_ascii=False)


def as_table(found: Sequence[MachineFinding], width: int = 80) -> str:
    """Format the findings as a table, with what to do below those that are not ok."""
    first = max(len(each.verdict) for each in found)
    second = max(len(each.what) for each in found)
    room = max(30, min(width, _WIDEST) - first - second - 4)
    lines = []
    for each in found:
        texts = textwrap.wrap(each.found, room) or [""]
        texts += textwrap.wrap(f"-> {each.fix}", room, subsequent_indent="   ") if each.fix else []
        lines.append(f"{each.verdict:{first}}  {each.what:{second}}  {texts[0]}")
        lines += [f"{'':{first + second + 4}}{text}" for text in texts[1:]]
    return "\n".join([*lines, "", _summary(found)])


def _summary(found: Sequence[MachineFinding]) -> str:
    stands, notes = _count(found, IN_THE_WAY), _count(found, NOTE)
    return (f"{stands} in the way of sbkit" if stands else "nothing is in the way of sbkit") + (
        f", {notes} note{'' if notes == 1 else 's'}" if notes else "")


def _count(found: Sequence[MachineFinding], verdict: str) -> int:
    return sum(each.verdict == verdict for each in found)
