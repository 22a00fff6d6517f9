"""Plots the results of a comparison as SVG: dev WER against hours of audio, and against minutes of training."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from sbkit.score.report.charts import Scale, nice_ticks
from tools.bench.systems import NAMES, SYSTEMS

WIDTH, HEIGHT = 430, 280  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 34, 44  # margins of a panel
LEGEND = 34
COLOURS = {"sbkit": "#2f62c9", "stock": "#c9641a", "nemo": "#23855b"}  # as in a run's report
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #565b64; }
.title { font-weight: 600; fill: #1d1f23; } .grid { stroke: #e1e1dc; } .whisker { stroke-width: 1.2; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .card { fill: #ffffff; }
"""


class Point(NamedTuple):
    """The runs of one system on one corpus with one length."""

    hours: float
    minutes: float
    low: float
    mean: float
    high: float


PANELS = (("hours", "hours of audio trained on"), ("minutes", "minutes of training"))


def figure(runs: Sequence[dict[str, Any]], corpora: Sequence[str]) -> str:
    """Draw two panels for each corpus that has results, with a logarithmic axis of rates and seeds as whiskers."""
    corpora = [corpus for corpus in corpora if any(run["corpus"] == corpus for run in runs)]
    width, height = WIDTH * len(PANELS), LEGEND + HEIGHT * len(corpora)
    parts: list[Any] = [tag("style", STYLE), tag("rect", class_="card", width=width, height=height), _legend()]
    for row, corpus in enumerate(corpora):
        found = {system: points(runs, corpus, system) for system in SYSTEMS}
        for column, (axis, label) in enumerate(PANELS):
            parts.append(tag("g", _panel(f"{corpus}: dev WER", found, axis, label),
                             transform=f"translate({column * WIDTH} {LEGEND + row * HEIGHT})"))
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}",
               width=width, height=height, role="img", aria_label="dev WER by audio and by minutes") + "\n"


def points(runs: Sequence[dict[str, Any]], corpus: str, system: str) -> list[Point]:
    """Collect a system's points on a corpus, the shortest runs first."""
    lengths: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        if (run["corpus"], run["system"]) == (corpus, system):
            lengths.setdefault(run["epochs"], []).append(run)
    found = []
    for _, seeds in sorted(lengths.items()):
        rates = [run["dev_wer"] for run in seeds]
        found.append(Point(seeds[0]["audio_hours"], statistics.median(run["train_seconds"] for run in seeds) / 60,
                           min(rates), statistics.mean(rates), max(rates)))
    return found


def _panel(title: str, found: dict[str, list[Point]], axis: str, label: str) -> list[Any]:
    every = [point for points in found.values() for point in points]
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    ticks = log_ticks(min(point.low for point in every), max(point.high for point in every))
    rate = Scale(math.log10(ticks[0]), math.log10(ticks[-1]), bottom, TOP)
    x = Scale(0, 1.05 * max(getattr(point, axis) for point in every), LEFT, right)
    parts: list[Any] = [tag("text", title, class_="title", x=LEFT, y=TOP - 14)]
    for value in ticks:
        at = rate(math.log10(value))
        parts += [tag("line", class_="grid", x1=LEFT, x2=right, y1=at, y2=at),
                  tag("text", f"{value:g} %", x=LEFT - 6, y=at + 4, text_anchor="end")]
    parts += [tag("text", f"{value:g}", x=x(value), y=bottom + 18, text_anchor="middle")
              for value in nice_ticks(0, x.high, 6)]
    parts.append(tag("text", label, x=(LEFT + right) / 2, y=bottom + 36, text_anchor="middle"))
    for system, points in found.items():
        heights = [[rate(math.log10(max(value, ticks[0]))) for value in (point.low, point.mean, point.high)]
                   for point in points]
        parts += _curve(system, [(x(getattr(point, axis)), low, mean, high)
                                 for point, (low, mean, high) in zip(points, heights, strict=True)])
    return parts


def _curve(system: str, points: Sequence[tuple[float, float, float, float]]) -> list[Any]:
    """Draw a curve of (x, lowest, mean, highest) in the picture's coordinates."""
    if not points:
        return []
    colour = COLOURS[system]
    parts = [tag("polyline", class_="curve", stroke=colour, points=" ".join(f"{x:g},{y:g}" for x, _, y, _ in points))]
    for x, low, mean, high in points:
        if low != high:
            parts.append(tag("line", class_="whisker", stroke=colour, x1=x, x2=x, y1=low, y2=high))
        parts.append(tag("circle", cx=x, cy=mean, r=3.4, fill=colour))
    return parts


def tag(name: str, *children: Any, **attributes: object) -> str:
    """Build an element from its elements, in lists too; the texts are those of this file."""
    inside = "".join("".join(each) if isinstance(each, list) else each for each in children)
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
                    for key, value in attributes.items())
    return f"<{name}{given}>{inside}</{name}>"


def _legend() -> str:
    parts: list[Any] = []
    for place, system in enumerate(SYSTEMS):
        x = LEFT + 130 * place
        parts += [tag("line", x1=x, x2=x + 20, y1=19, y2=19, stroke=COLOURS[system], stroke_width=3),
                  tag("text", NAMES[system], x=x + 27, y=23)]
    return tag("g", parts)


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from at most ``low`` to at least ``high``, but none below 0.1 %.

    >>> log_ticks(3.1, 94)
    [2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    """
    low, high = max(low, 0.1), max(high, 0.2)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [round(unit * 10.0**power, 6) for power in powers for unit in (1, 2, 5)]
    first = max(i for i, mark in enumerate(marks) if mark <= low)
    last = min(i for i, mark in enumerate(marks) if mark >= high)
    return marks[first:max(last, first + 1) + 1]
