"""The page's part about live speech: error rate and latency with chunks of each size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sbkit.score import chunk_size
from sbkit.score.latency import LATE
from sbkit.score.markup import Markup, tag
from sbkit.score.report import charts
from sbkit.score.report.data import RunData, rate
from sbkit.score.report.sections import section

COLUMNS = ("chunk", "WER", "95 % interval", "latency", f"{LATE} % within", "words changed")
MEANING = ("Latency is the time from the end of a word to the end of the chunk after which it stood in the text for "
           "good, for words that are right; the time that a machine computes comes on top. A word's end is that of the "
           "model's alignment of what was said. Words changed: of 100, those that were shown and replaced later.")


def live(run: RunData) -> Markup | None:
    """Show what ``sbkit evaluate --chunk`` found; None for other results."""
    found: list[Mapping[str, Any]] = run.scored.get("chunks") or []
    if not found:
        return None
    head = tag("tr", [tag("th", name) for name in COLUMNS])
    lines = [tag("tr", tag("th", _name(each), scope="row"), [tag("td", value) for value in _values(each)])
             for each in found]
    table = tag("div", tag("table", tag("thead", head), tag("tbody", lines), class_="plain"), class_="scroll")
    points = [charts.Point(_name(each), each["latency"], each["WER"], each["latency_p95"])
              for each in found if each["latency"] is not None]
    drawn = charts.points("WER by latency", points, "seconds after a word's end",
                          note=f"Dots: the mean. Lines: to where {LATE} % of the words are shown.") if points else None
    first = f"The transcripts and rates elsewhere on this page are those of the first line ({_name(found[0])})."
    return section("live", "Live", table, tag("p", MEANING, class_="note"), tag("p", first, class_="note"),
                   drawn and tag("div", drawn, class_="charts"))


def _name(each: Mapping[str, Any]) -> str:
    return chunk_size.named(each["chunk"])


def _values(each: Mapping[str, Any]) -> list[str]:
    low, high = each["WER_interval"]
    return [rate(each["WER"]), f"{low:.2f} to\N{NO-BREAK SPACE}{high:.2f}", _seconds(each["latency"]),
            _seconds(each["latency_p95"]), f"{each['changed']:.1f}"]


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}\N{NO-BREAK SPACE}s"
