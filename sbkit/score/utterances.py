"""utterances.jsonl: each scored utterance as it was said and heard, with what the corpus says of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write


class Row(Protocol):
    """What a task reports of an utterance."""

    id: str
    reference: str
    hypothesis: str
    confidence: float | None


@dataclass(frozen=True)
class ScoredUtterance:
    """One utterance: what was said, what was heard, and whose and where the recording is."""

    id: str
    reference: str
    hypothesis: str
    confidence: float | None
    duration: float
    wav: str
    start: float = 0.0
    speaker: str = ""
    meta: dict[str, str] = field(default_factory=dict)


def join(rows: Iterable[Row], manifest: Manifest) -> Iterator[ScoredUtterance]:
    """Put the manifest's facts beside each row; every id must be in the manifest."""
    place = {name: i for i, name in enumerate(manifest.ids)}
    for row in rows:
        said = manifest.row(place[row.id])
        sure = None if row.confidence is None else round(row.confidence, 4)
        yield ScoredUtterance(row.id, row.reference, row.hypothesis, sure, round(said.duration, 3), said.wav,
                    said.start, said.speaker, {name: value for name, value in said.meta.items() if value})


def write(path: str | os.PathLike[str], heard: Iterable[ScoredUtterance]) -> None:
    """One JSON object per line."""
    with atomic_write(path) as out:
        for one in heard:
            out.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")


def read(path: str | os.PathLike[str]) -> list[ScoredUtterance]:
    """The lines of such a file; one that is none of ours is named."""
    found = []
    with open(path, encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found.append(ScoredUtterance(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise SbkitError(f"{path}, line {number}: {error}",
                                 hint="score the run again (sbkit evaluate)") from None
    return found
