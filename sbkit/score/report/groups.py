"""Error rates of parts of a test set: by duration, speaker, accent, age, gender or any column of the corpus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sbkit.score.report.data import ScoredRun
from sbkit.score.significance import MIN_UTTERANCES, interval_of

EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, math.inf)  # seconds
MAX_GROUPS = 12  # of one kind; the rest are merged
SPEAKERS_SHOWN = 8
_MIN_IN_PART = 5  # utterances; fewer with a similar confidence say nothing
UNKNOWN = "not given"
_MAX_VALUES = 50  # a column with more distinct values than this gives no groups
_AGES = ("child", "teens", "twenties", "thirties", "forties", "fourties", "fifties", "sixties", "seventies", "eighties",
         "nineties")


@dataclass(frozen=True)
class UtteranceGroup:
    """Some utterances; ``low`` and ``high`` are the bounds of the rate in per cent, None for too few utterances."""

    label: str
    utterances: int
    words: int
    edits: int
    low: float | None
    high: float | None
    rest: float | None = None  # the rate of all other utterances

    @property
    def rate(self) -> float:
        return 100 * self.edits / self.words


class Breakdown(NamedTuple):
    """All groups of a test set."""

    durations: list[UtteranceGroup]
    values: dict[str, list[UtteranceGroup]]  # by column name of the corpus
    speakers: list[UtteranceGroup]  # the hardest first
    alike: dict[str, list[str]]  # by column name: further columns that divide the test set in the same groups


@lru_cache(maxsize=4)
def breakdown(results: ScoredRun) -> Breakdown:
    """Compute all groups, once for all sections of the page."""
    values_by_column, alike = columns(results)
    values = {name: by_value(results, column, name) for name, column in values_by_column.items()}
    bins = np.searchsorted(EDGES, np.array([one.duration for one in results.utterances]), side="right") - 1
    durations = []
    for i in np.unique(bins):  # empty groups are left out
        low = EDGES[i]
        high = EDGES[i + 1]
        durations.append(_group(f"{low}+ s" if math.isinf(high) else f"{low}–{high} s", results, bins == i))
    return Breakdown(durations, values, by_speaker(results), alike)


def by_confidence(results: ScoredRun, parts: int = 5) -> list[UtteranceGroup]:
    """Group utterances into parts of equal size, the least confident first; empty if too few have a confidence."""
    confidence = np.array([np.nan if one.confidence is None else one.confidence for one in results.utterances])
    order = np.argsort(confidence, kind="stable")[:int(np.isfinite(confidence).sum())]  # NaN is last
    if len(order) < parts * _MIN_IN_PART:
        return []
    return [_group("{:.2f}–{:.2f}".format(*confidence[part[[0, -1]]]), results, part)
            for part in np.array_split(order, parts)]


def columns(results: ScoredRun) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the corpus columns with more than one value, name -> N values, and columns that give the same groups."""
    values_by_column: dict[str, list[str]] = {}
    alike: dict[str, list[str]] = {}
    names = dict.fromkeys(["accent", "age", "gender", *(key for one in results.utterances for key in one.meta)])
    for name in names:
        values = [one.meta.get(name, "") for one in results.utterances]
        count = len(set(values))
        same = next((other for other, its_values in values_by_column.items() if _same_groups(values, its_values)), None)
        if same is not None:
            alike.setdefault(same, []).append(name)
        elif 2 <= count <= _MAX_VALUES or (name == "accent" and count > 1):
            values_by_column[name] = values
    return values_by_column, alike


def _same_groups(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether two columns divide the utterances in the same groups, whatever the names of these."""
    return len(set(a)) == len(set(b)) == len(set(zip(a, b, strict=True)))


def by_value(results: ScoredRun, values: Sequence[str], name: str = "") -> list[UtteranceGroup]:
    """Group utterances by value: ages in order, other values by size, small groups merged."""
    array = np.array([value or UNKNOWN for value in values], dtype=object)
    sizes = Counter(array.tolist())
    ranked = sorted(sizes, key=lambda value: (value == UNKNOWN, -sizes[value]))
    if name == "age":
        ranked.sort(key=lambda value: (value == UNKNOWN, _AGES.index(value) if value in _AGES else -1, value))
    shown = ranked if len(ranked) <= MAX_GROUPS else ranked[:MAX_GROUPS - 1]
    groups = [_group(value.replace("_", " "), results, array == value) for value in shown]
    others = [value for value in ranked if value not in shown]
    if others:
        groups.append(_group(f"{len(others)} others", results, np.isin(array, others)))
    return groups


def by_speaker(results: ScoredRun) -> list[UtteranceGroup]:
    """Group by speaker, highest rate first; empty if the corpus names no speaker or only one."""
    speakers = np.array([one.speaker for one in results.utterances], dtype=object)
    names = [name for name in dict.fromkeys(speakers) if name]
    if len(names) < 2:
        return []
    order = np.argsort(speakers.astype(str), kind="stable")
    starts = np.flatnonzero(np.r_[True, speakers[order][1:] != speakers[order][:-1]])
    groups = [_group(speakers[members[0]], results, members, bounds=False)
              for members in np.split(order, starts[1:]) if speakers[members[0]]]
    groups.sort(key=lambda group: -group.rate)
    worst = [_group(group.label, results, speakers == group.label) for group in groups[:SPEAKERS_SHOWN]]
    return worst + groups[SPEAKERS_SHOWN:]


def _group(label: str, results: ScoredRun, which: np.ndarray, bounds: bool = True) -> UtteranceGroup:
    inside = results.edits[which]
    words = results.lengths[which]
    low, high = interval_of(inside, words) if bounds and len(inside) >= MIN_UTTERANCES else (None, None)
    wrong = int(inside.sum())
    total = int(words.sum())
    all_wrong, all_words = results.totals
    rest = 100 * (all_wrong - wrong) / (all_words - total) if all_words > total else None
    return UtteranceGroup(label, len(inside), total, wrong, low, high, rest)
