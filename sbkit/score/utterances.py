"""utterances.jsonl: each scored utterance with its reference, its transcript and its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.system import untrusted
from sbkit.system.console import atomic_write

_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class ScoredUtterance:
    """One utterance: reference, transcript, speaker and recording."""

    id: str
    reference: str
    hypothesis: str
    confidence: float | None
    duration: float
    wav: str
    start: float = 0.0
    speaker: str = ""
    meta: dict[str, str] = field(default_factory=dict)


def join(rows: Iterable[Any], manifest: Manifest) -> Iterator[ScoredUtterance]:  # rows of a task's own class
    """Join each row (id, reference, hypothesis, confidence) with the manifest's facts; every id must be in it."""
    place = {name: i for i, name in enumerate(manifest.ids)}
    for row in rows:
        listed = manifest.row(place[row.id])
        confidence = None if row.confidence is None else round(row.confidence, 4)
        yield ScoredUtterance(
            row.id, row.reference, row.hypothesis, confidence, round(listed.duration, 3), listed.wav, listed.start,
            listed.speaker, {name: value for name, value in listed.meta.items() if value})


def write(path: str | os.PathLike[str], utterances: Iterable[ScoredUtterance]) -> None:
    """Write one JSON object per line."""
    with atomic_write(path) as out:
        for one in utterances:
            out.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")


def read(path: str | os.PathLike[str]) -> list[ScoredUtterance]:
    """Read utterances.jsonl; an invalid line is an error that names it."""
    utterances = []
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
            try:
                utterances.append(ScoredUtterance(**untrusted.parse_json(line)))
            except (ValueError, TypeError) as error:
                what = f"not JSON ({error})" if isinstance(error, ValueError) else "not a scored utterance"
                raise SbkitError("damaged-results", f"{path}, line {number}: {what}",
                                 hint="score the run again (sbkit evaluate)", file=path, line=number) from None
    return utterances
