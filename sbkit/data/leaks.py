"""What two splits of a corpus share: speakers, sentences, recordings; and what that means for their error rates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data.manifest import Column, Manifest
from sbkit.data.splits import SPLITS

#: What splits may share, and what that means.
MEANS = {
    "speakers": "the error rate is partly measured on known speakers; to measure it on new ones, assign each speaker "
                "to one split in the source's lists",
    "sentences": "not an error, but models, language models in particular, may have memorised them: expect a higher "
                 "error rate on other sentences",
    "recordings": "segments of one file have the same speaker and room; assign each file to one split",
    "overlaps": "these rows have audio in common; assign each file to one split",
    "copies": "the same audio twice: remove it from one of the lists",
}
COLUMNS = ["split", "shared with", "what", "in both", "out of", "rows", "% of rows"]
#: The columns of a manifest that are compared, by what is said to be shared.
_COMPARED = {"speakers": "speakers", "sentences": "texts", "recordings": "wavs"}
#: Examples of an entry, and the characters of each that are shown.
_EXAMPLES = 3
_SHOWN = 40
#: Seconds by which rows that follow each other may overlap, by the rounding of a list.
_TOUCHING = 0.1


def shared(manifests: Mapping[str, Manifest],
           copies: Mapping[str, Mapping[str, str]] | None = None) -> list[dict[str, Any]]:
    """Return an entry for everything that two splits have in common, in the order test, dev, train.

    copies : for each split the ids of its rows that are copies of another's, and their originals ("test: ID")
    """
    splits = [split for split in reversed(SPLITS) if split in manifests]
    entries = []
    for split, other in itertools.combinations(splits, 2):
        manifest = manifests[split]
        in_both = {what: _shared_values(getattr(manifest, column), getattr(manifests[other], column))
                   for what, column in _COMPARED.items()}
        if in_both["recordings"].count:
            in_both["overlaps"] = _overlaps(manifest, manifests[other])
        for what, shared_values in in_both.items():
            if shared_values.count:
                entries.append(_entry(split, other, what, shared_values, len(manifest)))
    for split, originals in (copies or {}).items():
        for other in splits:
            pairs = [f"{id_} = {name}" for id_, name in originals.items() if name.startswith(f"{other}: ")]
            if pairs:
                count = len(manifests[split])
                pairs_in_both = _Shared(len(pairs), count, len(pairs), pairs[:_EXAMPLES])
                entries.append(_entry(split, other, "copies", pairs_in_both, count))
    return entries


@dataclass(frozen=True)
class _Shared:
    """How many of how many values are in both splits, in how many rows of the first, and examples."""

    count: int
    total: int
    rows: int
    examples: list[str]


def _entry(split: str, other: str, what: str, in_both: _Shared, all_rows: int) -> dict[str, Any]:
    return {"split": split, "with": other, "what": what, "count": in_both.count, "of": in_both.total,
            "rows": in_both.rows, "share": round(in_both.rows / all_rows, 4), "examples": in_both.examples}


def _shared_values(column: Column, other: Column) -> _Shared:
    """What two splits have in common of a column; empty texts don't count."""
    texts = pc.drop_null(pc.if_else(pc.not_equal(column.arrow, ""), column.arrow, None)).value_counts()
    values = texts.field("values")
    counts = texts.field("counts")
    is_shared = pc.is_in(values, other.arrow)
    return _Shared(pc.sum(is_shared).as_py() or 0, len(values), pc.sum(pc.filter(counts, is_shared)).as_py() or 0,
                   pc.filter(values, is_shared)[:_EXAMPLES].to_pylist())


def _overlaps(manifest: Manifest, other: Manifest) -> _Shared:
    """The rows that overlap in a file with a row of another split."""
    files = pa.concat_arrays([manifest.wavs.arrow, other.wavs.arrow]).dictionary_encode().indices.to_numpy()
    starts = np.concatenate([manifest.starts, other.starts])
    ends = starts + np.concatenate([manifest.durations, other.durations])
    of_other = np.arange(len(files)) >= len(manifest)
    # All files are put on one time line. A row overlaps if it contains the furthest end of the other's rows that begin
    # before it, or the first start of those after it.
    gap = float(ends.max(initial=0)) + 1
    starts = starts + gap * files
    ends = ends + gap * files - _TOUCHING
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = ends[order]
    of_other = of_other[order]
    furthest_end_before = np.maximum.accumulate(np.where(of_other, ends, -1.0))
    first_start_after = np.minimum.accumulate(np.where(of_other, starts, np.inf)[::-1])[::-1]
    overlaps = ~of_other & ((furthest_end_before > starts) | (first_start_after < ends))
    rows = np.sort(order[overlaps])
    return _Shared(len(rows), len(manifest), len(rows), list(manifest.ids.take(rows[:_EXAMPLES])))


def rows(entries: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the rows of a table with ``COLUMNS``."""
    return [[entry["split"], entry["with"], entry["what"], entry["count"], entry["of"], entry["rows"],
             f"{100 * entry['share']:.1f}"] for entry in entries]


def remarks(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Explain the entries, with examples; without any, say so."""
    if not entries:
        return ["no speaker, sentence or file is in two splits; rows that name no speaker are not compared by speaker"]
    lines = []
    for what, meaning in MEANS.items():
        examples = next((entry["examples"] for entry in entries if entry["what"] == what), None)
        if examples is not None:
            short = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in examples]
            lines.append(f"{what}, such as {'; '.join(short)}: {meaning}")
    return lines
