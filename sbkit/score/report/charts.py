"""Charts as hand-written SVG that take their colours from the page; curves carry their points for tooltips."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbkit.score.markup import Markup, tag, text
from sbkit.score.report.data import percent
from sbkit.score.report.groups import UtteranceGroup

WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 12, 26  # margins around the plot
MAX_POINTS = 300  # points of a curve; more are averaged
MAX_BARS = 60


@dataclass
class Series:
    """A curve of N points; ``colour`` is one of the page's (1 to 9), ``other`` marks the other run of a comparison."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 1
    other: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates of the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1)
        return round(self.start + share * (self.end - self.start), 1)


def curves(title: str, series: Sequence[Series], ticks: Sequence[tuple[float, str]], *, unit: str = "",
           note: str | None = None, x_label: str = "epoch") -> Markup | None:
    """Draw a line chart over steps, with zero on its axis; None if there is nothing to draw."""
    series = [thinned(one) for one in series]
    series = [one for one in series if len(one.x)]
    if not series:
        return None
    y = Scale(*_ends(series), HEIGHT - BOTTOM, TOP)
    x = Scale(min(min(one.x) for one in series), max(max(one.x) for one in series), LEFT, WIDTH - RIGHT)
    parts = [_grid(y, unit="%" if unit == " %" else ""), _x_axis(x, ticks, x_label)]
    for one in series:
        parts += _curve(one, x, y)
    data = {"x": [x.low, x.high], "y": [y.low, y.high], "unit": unit, "ticks": [list(tick) for tick in ticks],
            "series": [{"name": one.name, "colour": one.colour, "x": _rounded(one.x), "y": _rounded(one.y)}
                       for one in series]}
    parts += [tag("line", class_="pointer", y1=TOP, y2=HEIGHT - BOTTOM), tag("g", class_="marks")]
    return _figure(title, parts, note, legend([(one.name, one.colour) for one in series if not one.other]), data)


def bars(title: str, groups: Sequence[UtteranceGroup], note: str | None = None, mean: float | None = None) -> Markup:
    """Draw rates as columns with their intervals and numbers of utterances."""
    y = Scale(0, _nice_top(max(group.high or group.rate for group in groups)), HEIGHT - BOTTOM - 14, TOP + 8)
    step = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = min(44.0, step * 0.66)
    parts = [_grid(y, unit="%")]
    if mean is not None:
        parts.append(tag("line", class_="mean", x1=LEFT, x2=WIDTH - RIGHT, y1=y(mean), y2=y(mean)))
    for i, group in enumerate(groups):
        middle = round(LEFT + (i + 0.5) * step, 1)
        parts.append(tag("rect", tag("title", describe(group)), class_="bar", x=round(middle - wide / 2, 1),
                         width=round(wide, 1), y=y(group.rate), height=round(y(0) - y(group.rate), 1), rx=2))
        if group.low is not None and group.high is not None:
            parts += [tag("line", class_="whisker", x1=middle, x2=middle, y1=y(group.low), y2=y(group.high)),
                      *(tag("line", class_="whisker", x1=middle - 4, x2=middle + 4, y1=y(end), y2=y(end))
                        for end in (group.low, group.high))]
        parts += [tag("text", group.label, x=middle, y=HEIGHT - 25, text_anchor="middle"),
                  tag("text", f"n={group.utterances}", x=middle, y=HEIGHT - 11, text_anchor="middle", class_="dim")]
    return _figure(title, parts, note)


@dataclass(frozen=True)
class Point:
    """A point of a chart, and how far to the right its range goes."""

    name: str
    x: float
    y: float
    far: float


def points(title: str, found: Sequence[Point], x_label: str, note: str | None = None) -> Markup:
    """Draw rates in per cent over another number, each with its range of that."""
    y = Scale(0, _nice_top(max(one.y for one in found)), HEIGHT - BOTTOM - 10, TOP)
    x = Scale(min(0.0, *(one.x for one in found)), _nice_top(max(one.far for one in found)), LEFT, WIDTH - RIGHT)
    parts = [_grid(y, unit="%")]
    for colour, one in enumerate(found, 1):
        parts += [tag("line", class_="whisker", x1=x(one.x), x2=x(one.far), y1=y(one.y), y2=y(one.y)),
                  tag("circle", tag("title", f"{one.name}: {one.y:.2f} % at {one.x:.2f}, up to {one.far:.2f}"),
                      class_=f"fill{colour}", cx=x(one.x), cy=y(one.y), r=4.5)]
    parts += _named_axis(x, x_label)
    return _figure(title, parts, note, legend([(one.name, colour) for colour, one in enumerate(found, 1)], square=True))


def histogram(title: str, values: Sequence[float], x_label: str, note: str | None = None) -> Markup:
    """Draw the distribution of values in per cent."""
    top = max(10.0, math.ceil(max(values) / 10) * 10)
    size = top / 20 if top <= 100 else 10
    counts, edges = np.histogram(values, bins=np.arange(0, top + size, size))
    y = Scale(0, _nice_top(int(counts.max())), HEIGHT - BOTTOM - 10, TOP)
    x = Scale(0, float(edges[-1]), LEFT, WIDTH - RIGHT)
    parts = [_grid(y)]
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            parts.append(tag("rect", tag("title", f"{low:g} to {high:g} %: {count}"), class_="bar", x=x(low) + 0.5,
                             width=round(x(high) - x(low) - 1, 1), y=y(count), height=round(y(0) - y(count), 1)))
    return _figure(title, [*parts, *_named_axis(x, x_label)], note)


def shares(title: str, rows: Sequence[tuple[str, dict[str, float]]], colours: dict[str, int], note: str | None = None,
           ) -> Markup:
    """Draw stacked columns of 100 % each; the legend gives the mean share of each part."""
    rows = _every(rows, MAX_BARS)
    y = Scale(0, 100, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    gap = min(2.0, step * 0.15)
    parts = [_grid(y, unit="%")]
    for i, (_, row) in enumerate(rows):
        base = 0.0
        for name, colour in colours.items():
            share = 100 * row.get(name, 0.0)
            if share > 0.05:
                parts.append(tag("rect", tag("title", f"{name} {share:.1f} %"), class_=f"fill{colour}",
                                 x=round(LEFT + i * step + gap / 2, 1), width=round(step - gap, 1),
                                 y=y(base + share), height=round(y(base) - y(base + share), 1)))
            base += share
    middles = Scale(0, len(rows), LEFT + step / 2, WIDTH - RIGHT + step / 2)
    parts.append(_x_axis(Scale(0, max(1, len(rows) - 1), middles(0), middles(max(1, len(rows) - 1))),
                         [(i, name) for i, (name, _) in enumerate(rows)]))
    means = {name: float(np.mean([row.get(name, 0.0) for _, row in rows])) for name in colours}
    labels = [(f"{name} {percent(mean, int(mean < 0.1))}", colours[name])
              for name, mean in means.items() if mean >= 0.0005]
    return _figure(title, parts, note, legend(labels, square=True))


def legend(names: Sequence[tuple[str, int]], square: bool = False) -> Markup | None:
    """List names with their colours; None for a single curve."""
    if len(names) < 2:
        return None
    kind = "square" if square else "stroke"
    return tag("ul", [tag("li", tag("i", class_=f"{kind} c{colour}"), name) for name, colour in names], class_="legend")


def describe(group: UtteranceGroup) -> str:
    """Describe a group in words."""
    bounds = "" if group.low is None else f" ({group.low:.1f} to {group.high:.1f})"
    return f"{group.label}: WER {group.rate:.1f} %{bounds}, {group.utterances} utterances, {group.words} words"


def thinned(series: Series) -> Series:
    """Reduce a curve to at most ``MAX_POINTS`` points, each a local mean; NaN and infinity are left out."""
    pairs = [(a, b) for a, b in zip(series.x, series.y, strict=True) if b is not None and math.isfinite(b)]
    parts = np.array_split(np.array(pairs, dtype=float).reshape(-1, 2), min(MAX_POINTS, max(1, len(pairs))))
    means = [part.mean(axis=0) for part in parts if len(part)]
    return replace(series, x=[float(m[0]) for m in means], y=[float(m[1]) for m in means])


# ---------------------------------------------------------------- pieces


def _figure(title: str, parts: Sequence[Markup], note: str | None, names: Markup | None = None,
            data: Mapping[str, Any] | None = None) -> Markup:
    drawn = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    return tag("figure", tag("figcaption", title), names, tag("div", drawn, class_="plot"),
               note and tag("p", note, class_="note"), data_chart=json.dumps(data) if data else None)


def _grid(y: Scale, unit: str = "") -> Markup:
    lines = []
    for value in nice_ticks(y.low, y.high, 4):
        name = f"{value:.2g}".replace("e-0", "e-") if y.high < 1e-3 else f"{value:,.10g}"
        lines += [tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value)),
                  tag("text", f"{name}{unit}", x=LEFT - 6, y=y(value) + 3.5, text_anchor="end")]
    return text(lines)


def _x_axis(x: Scale, ticks: Sequence[tuple[float, str]], label: str = "epoch") -> Markup:
    inside = _every([(at, name) for at, name in ticks if x.low <= at <= x.high], 8)
    return text(tag("text", label, x=LEFT - 8, y=HEIGHT - 9, text_anchor="end"),
                (tag("text", name, x=x(at), y=HEIGHT - 9, text_anchor="middle") for at, name in inside))


def _named_axis(x: Scale, name: str) -> list[Markup]:
    return [*(tag("text", f"{at:g}", x=x(at), y=HEIGHT - 22, text_anchor="middle") for at in nice_ticks(0, x.high, 6)),
            tag("text", name, x=(LEFT + WIDTH) / 2, y=HEIGHT - 7, text_anchor="middle", class_="dim")]


def _curve(one: Series, x: Scale, y: Scale) -> list[Markup]:
    points = [(x(a), max(y(b), TOP - 6)) for a, b in zip(one.x, one.y, strict=True)]
    kind = f"curve c{one.colour}{' other' if one.other else ''}"
    parts = []
    if len(points) > 1:
        parts.append(tag("polyline", class_=kind, points=" ".join(f"{a:g},{b:g}" for a, b in points)))
    if len(points) == 1 or (one.dots and len(points) <= 40):
        parts += [tag("circle", class_=f"dot c{one.colour}{' other' if one.other else ''}", cx=a, cy=b, r=2.6)
                  for a, b in points]
    return parts


def _ends(series: Sequence[Series]) -> tuple[float, float]:
    """The ends of the y axis, which has zero, chosen so that a wild start does not flatten the rest."""
    everything = np.concatenate([np.asarray(one.y) for one in series])
    settled = np.concatenate([np.asarray(one.y)[len(one.y) // 20:] for one in series])

    def end(most: float, usual: float) -> float:
        return _nice_top(usual * 1.1 if most > 2 * max(usual, 0) else most) if most > 0 else 0.0

    low = -end(-float(everything.min()), -float(settled.min()))
    return low, end(float(everything.max()), float(settled.max())) or float(not low)


def _nice_top(value: float) -> float:
    if value <= 0:
        return 1.0
    step = _nice_step(value / 4)
    return math.ceil(value / step - 1e-9) * step


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= rough * (1 - 1e-9))


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    step = _nice_step((high - low) / count)
    return [low + i * step for i in range(int((high - low) / step + 1e-6) + 1)]


def _every(items: Sequence[Any], limit: int) -> list[Any]:
    """At most this many items, evenly spaced, starting with the first."""
    stride = math.ceil(len(items) / limit) if items else 1
    return list(items[::stride])


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
