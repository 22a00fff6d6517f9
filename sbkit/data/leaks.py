"""What two splits of a corpus share: speakers, sentences, recordings; and what that means for their error rates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data.manifest import Manifest
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
_EXAMPLES, _SHOWN = 3, 40  # examples of an entry, and characters of each that are shown
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
        one = manifests[split]
        two = manifests[other]
        # By kind: how many of how many are in both, in how many rows of the first, and examples.
        in_both: dict[str, tuple[int, int, int, list[str]]] = {}
        for what, name in (("speakers", "speakers"), ("sentences", "texts"), ("recordings", "wavs")):
            mine = getattr(one, name).arrow
            named = pc.drop_null(pc.if_else(pc.not_equal(mine, ""), mine, None)).value_counts()
            values = named.field("values")
            counts = named.field("counts")
            both = pc.is_in(values, getattr(two, name).arrow)
            in_both[what] = (pc.sum(both).as_py() or 0, len(values), pc.sum(pc.filter(counts, both)).as_py() or 0,
                             pc.filter(values, both)[:_EXAMPLES].to_pylist())
        if in_both["recordings"][0]:
            # Rows of ``one`` that overlap in a file with a row of ``two``.
            files = pa.concat_arrays([one.wavs.arrow, two.wavs.arrow]).dictionary_encode().indices.to_numpy()
            starts = np.concatenate([one.starts, two.starts])
            ends = starts + np.concatenate([one.durations, two.durations])
            of_other = np.arange(len(files)) >= len(one)
            # All files are put on one time line. A row overlaps if it contains the furthest end of the other's rows
            # that begin before it, or the first start of those after it.
            gap = float(ends.max(initial=0)) + 1
            starts = starts + gap * files
            ends = ends + gap * files - _TOUCHING
            order = np.argsort(starts, kind="stable")
            starts = starts[order]
            ends = ends[order]
            of_other = of_other[order]
            before = np.maximum.accumulate(np.where(of_other, ends, -1.0))
            after = np.minimum.accumulate(np.where(of_other, starts, np.inf)[::-1])[::-1]
            touched = ~of_other & ((before > starts) | (after < ends))
            at = np.sort(order[touched])
            in_both["overlaps"] = len(at), len(one), len(at), list(one.ids.take(at[:_EXAMPLES]))
        for what, (count, total, rows, examples) in in_both.items():
            if count:
                entries.append((split, other, what, count, total, rows, len(manifests[split]), examples))
    for split, found in (copies or {}).items():
        for other in splits:
            pairs = [f"{id_} = {name}" for id_, name in found.items() if name.startswith(f"{other}: ")]
            if pairs:
                count = len(manifests[split])
                entries.append((split, other, "copies", len(pairs), count, len(pairs), count, pairs[:_EXAMPLES]))
    return [{"split": split, "with": other, "what": what, "count": count, "of": total, "rows": rows,
             "share": round(rows / all_rows, 4), "examples": list(examples)}
            for split, other, what, count, total, rows, all_rows, examples in entries]


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
        first = next((entry["examples"] for entry in entries if entry["what"] == what), None)
        if first is not None:
            short = [each if len(each) <= _SHOWN else f"{each[:_SHOWN]}..." for each in first]
            lines.append(f"{what}, such as {'; '.join(short)}: {meaning}")
    return lines
