"""Comparison of two runs on the page: whether they differ, and which utterances got better and worse."""

from __future__ import annotations

from typing import Any

import numpy as np

from sbkit.score.markup import Markup, tag
from sbkit.score.report.cards import Cards
from sbkit.score.report.data import Results, RunData, rate
from sbkit.score.report.sections import KEY, section
from sbkit.score.significance import Comparison, compare

MEASURES = ("the other run", "this run", "points", "95 % interval", "p")


def comparison(run: RunData, other: RunData, words: Comparison, cards: Cards, count: int) -> Markup:
    """Compare ``run`` with ``other`` on the same test set; ``words`` is their difference."""
    ours, before = run.results, other.results
    assert ours is not None and before is not None, "write_report refuses runs without results"
    characters = compare(before.characters, ours.characters)
    place = {one.id: i for i, one in enumerate(before.heard)}
    theirs = np.array([place[one.id] for one in ours.heard])
    change = ours.edits - before.edits[theirs]
    order = np.argsort(change, kind="stable")
    better = [int(i) for i in order if change[i] < 0]
    worse = [int(i) for i in order[::-1] if change[i] > 0]
    same = len(change) - len(better) - len(worse)
    head = tag("tr", tag("th", ""), tag("th", "WER"), tag("th", "CER"))
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", one), tag("td", two))  # narrow enough for a phone
            for name, one, two in zip(MEASURES, _column(words), _column(characters), strict=True)]
    table = tag("table", tag("thead", head), tag("tbody", rows), class_="plain compared")

    def listed(title: str, indices: list[int]) -> list[Any]:
        if not indices:
            return []
        shown = [cards.card(i, other=_before(before, int(theirs[i]))) for i in indices[:count]]
        more = f" (the first {count} of {len(indices)})" if len(indices) > count else f" ({len(indices)})"
        return [tag("h3", title + more), tag("div", shown, class_="cards")]

    return section(
        "against", verdict(words), table,
        tag("p", f"Of {len(change)} utterances {len(better)} got better, {len(worse)} worse, "
                 f"and {same} have as many errors as before.", class_="note"),
        KEY, listed("Better", better), listed("Worse", worse), lead=f"Compared with {other.folder.resolve()}")


def verdict(words: Comparison) -> str:
    """Describe the difference in one sentence."""
    if not words.significant:
        return f"No significant difference ({_signed(words.difference)} points of WER)"
    how = "better" if words.difference < 0 else "worse"
    return f"Significantly {how}: {_signed(words.difference)} points of WER"


def _column(found: Comparison) -> tuple[str, ...]:
    return (rate(found.rate_a), rate(found.rate_b), _signed(found.difference),
            f"{_signed(found.low)} to\N{NO-BREAK SPACE}{_signed(found.high)}", f"{found.p_value:.4f}")


def _signed(points: float) -> str:
    return f"{points:+.2f}".replace("-", "−")


def _before(results: Results, index: int) -> tuple[Any, str, str]:
    return results.words.hypotheses[index], results.ways[index], "the other run"
