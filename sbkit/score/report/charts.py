"""Charts: what stands where on them. ``charts.html`` draws them; curves carry their points for tooltips."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from sbkit.score.report.data import percent
from sbkit.score.report.groups import UtteranceGroup
from sbkit.score.report.templates import TEMPLATES

WIDTH = 400
HEIGHT = 210
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
    series = [one for one in map(thinned, series) if len(one.x)]
    if not series:
        return None
    y = Scale(*_ends(series), HEIGHT - BOTTOM, TOP)
    # A curve may have its last point some steps before the last epoch's end, which has a tick all the same.
    last = max([max(one.x) for one in series] + [at for at, _ in ticks])
    x = Scale(min(min(one.x) for one in series), last, LEFT, WIDTH - RIGHT)
    # What the page's script shows of a point under the cursor.
    data = {"x": [x.low, x.high], "y": [y.low, y.high], "unit": unit, "ticks": [list(tick) for tick in ticks],
            "series": [{"name": one.name, "colour": one.colour, "x": _five_digits(one.x), "y": _five_digits(one.y)}
                       for one in series]}
    inside = _every([(x(at), name) for at, name in ticks if x.low <= at <= x.high], 8)
    shown = []
    for one in series:
        # A curve that leaves the picture runs along its upper edge.
        places = [(f"{x(step):g}", f"{max(y(value), TOP - 6):g}") for step, value in zip(one.x, one.y, strict=True)]
        shown.append((one, places))
    return _drawn("curves", title, note, [(one.name, one.colour) for one in series if not one.other],
                  json.dumps(data), _grid(y, unit="%" if unit == " %" else ""), x_label, inside, shown)


def bars(title: str, groups: Sequence[UtteranceGroup], note: str | None = None, mean: float | None = None) -> Markup:
    """Draw rates as columns with their intervals and numbers of utterances."""
    y = Scale(0, _nice_top(max(group.high or group.rate for group in groups)), HEIGHT - BOTTOM - 14, TOP + 8)
    step = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = min(44.0, step * 0.66)
    shown = []
    for i, group in enumerate(groups):
        middle = round(LEFT + (i + 0.5) * step, 1)
        bar = (describe(group), round(middle - wide / 2, 1), round(wide, 1), y(group.rate),
               round(y(0) - y(group.rate), 1))
        bounds = () if group.low is None or group.high is None else (y(group.low), y(group.high))
        shown.append((group, middle, bar, bounds))
    return _drawn("bars", title, note, _grid(y, unit="%"), None if mean is None else y(mean), shown)


def points(title: str, rows: Sequence[tuple[str, float, float, float]], x_label: str, note: str | None = None,
           ) -> Markup:
    """Draw rates in per cent over another number.

    rows : the name of each point, that number, the rate, and how far to the right the range of the number goes
    """
    names, lows, rates, highs = zip(*rows, strict=True)
    y = Scale(0, _nice_top(max(rates)), HEIGHT - BOTTOM - 10, TOP)
    x = Scale(min(0.0, *lows), _nice_top(max(highs)), LEFT, WIDTH - RIGHT)
    shown = [(f"{name}: {rate:.2f} % at {low:.2f}, up to {high:.2f}", x(low), x(high), y(rate))
             for name, low, rate, high in rows]
    return _drawn("points", title, note, [(name, colour) for colour, name in enumerate(names, 1)], _grid(y, unit="%"),
                  x_label, [(x(at), f"{at:g}") for at in nice_ticks(0, x.high, 6)], shown)


def histogram(title: str, values: Sequence[float], x_label: str, note: str | None = None) -> Markup:
    """Draw the distribution of values in per cent."""
    top = max(10.0, math.ceil(max(values) / 10) * 10)
    size = top / 20 if top <= 100 else 10
    counts, edges = np.histogram(values, bins=np.arange(0, top + size, size))
    y = Scale(0, _nice_top(int(counts.max())), HEIGHT - BOTTOM - 10, TOP)
    x = Scale(0, float(edges[-1]), LEFT, WIDTH - RIGHT)
    shown = [("bar", f"{low:g} to {high:g} %: {count}", x(low) + 0.5, round(x(high) - x(low) - 1, 1), y(count),
              round(y(0) - y(count), 1))
             for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True) if count]
    return _drawn("boxes", title, note, [], _grid(y), x_label,
                  [(x(at), f"{at:g}") for at in nice_ticks(0, x.high, 6)], shown, True)


def shares(title: str, rows: Sequence[tuple[str, dict[str, float]]], colours: dict[str, int], note: str | None = None,
           ) -> Markup:
    """Draw stacked columns of 100 % each; the legend gives the mean share of each part."""
    rows = _every(rows, MAX_BARS)
    y = Scale(0, 100, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    gap = min(2.0, step * 0.15)
    shown = []
    for i, (_, row) in enumerate(rows):
        base = 0.0
        for name, colour in colours.items():
            share = 100 * row.get(name, 0.0)
            if share > 0.05:
                shown.append((f"fill{colour}", f"{name} {share:.1f} %", round(LEFT + i * step + gap / 2, 1),
                              round(step - gap, 1), y(base + share), round(y(base) - y(base + share), 1)))
            base += share
    middles = Scale(0, len(rows), LEFT + step / 2, WIDTH - RIGHT + step / 2)
    ticks = _every([(middles(i), name) for i, (name, _) in enumerate(rows)], 8)
    means = {name: float(np.mean([row.get(name, 0.0) for _, row in rows])) for name in colours}
    labels = [(f"{name} {percent(mean, int(mean < 0.1))}", colours[name])
              for name, mean in means.items() if mean >= 0.0005]
    return _drawn("boxes", title, note, labels, _grid(y, unit="%"), "epoch", ticks, shown, False)


def describe(group: UtteranceGroup) -> str:
    """Describe a group in words."""
    bounds = "" if group.low is None else f" ({group.low:.1f} to {group.high:.1f})"
    return f"{group.label}: WER {group.rate:.1f} %{bounds}, {group.utterances} utterances, {group.words} words"


def thinned(series: Series) -> Series:
    """Reduce a curve to at most ``MAX_POINTS`` points, each a local mean; NaN and infinity are left out."""
    pairs = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None and math.isfinite(y)]
    parts = np.array_split(np.array(pairs, dtype=float).reshape(-1, 2), min(MAX_POINTS, max(1, len(pairs))))
    means = [part.mean(axis=0).tolist() for part in parts if len(part)]
    return replace(series, x=[x for x, _ in means], y=[y for _, y in means])


def in_text(title: str, series: Sequence[Series], ticks: Sequence[tuple[float, str]], width: int = 60,
            height: int = 8) -> str:
    """Draw the same chart with characters, for a terminal; empty if there is nothing to draw."""
    series = [one for one in map(thinned, series) if len(one.x)]
    if not series:
        return ""
    y = Scale(*_ends(series), height - 1, 0)
    x = Scale(min(min(one.x) for one in series), max(max(one.x) for one in series), 0, width - 1)
    cells = [[" "] * width for _ in range(height)]
    marks = dict(zip([one.name for one in series], ".o+x", strict=False))
    for one in series:
        for step, value in zip(one.x, one.y, strict=True):
            row = min(height - 1, max(0, round(y(value))))  # values beyond the picture are on its edges
            cells[row][round(x(step))] = marks[one.name]

    axis = [""] * height
    axis[-1] = f"{y.low + 0.0:.4g}"  # + 0.0, so that no zero has a minus
    axis[0] = f"{y.high + 0.0:.4g}"
    axis_width = max(len(text) for text in ["epoch", *axis])
    lines = [f"{title}: {', '.join(f'{mark} {name}' for name, mark in marks.items())}"]
    lines += [f"{text:>{axis_width}} |{''.join(row).rstrip()}" for text, row in zip(axis, cells, strict=True)]
    if ticks:
        below = [" "] * (width + 4)
        for step, name in (ticks[0], ticks[-1]):
            start = min(max(0, round(x(step))), width - len(name))
            below[start:start + len(name)] = name
        lines.append(f"{'epoch':>{axis_width}}  {''.join(below).rstrip()}")
    return "\n".join(lines).rstrip()


# ---------------------------------------------------------------- pieces


def _drawn(macro: str, *values: Any) -> Markup:
    """Fill a macro of charts.html."""
    margins = {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BOTTOM": BOTTOM}
    template = TEMPLATES.get_template("score/report/charts.html", globals=margins)
    drawn: Markup = getattr(template.module, macro)(*values)
    return drawn


def _five_digits(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _grid(y: Scale, unit: str = "") -> list[tuple[float, str]]:
    """The lines of the y axis: where each is, and its text."""
    lines = []
    for value in nice_ticks(y.low, y.high, 4):
        text = f"{value:.2g}".replace("e-0", "e-") if y.high < 1e-3 else f"{value:,.10g}"
        lines.append((y(value), text + unit))
    return lines


def _ends(series: Sequence[Series]) -> tuple[float, float]:
    """The ends of the y axis, which has zero, chosen so that a wild start does not flatten the rest."""
    everything = np.concatenate([np.asarray(one.y) for one in series])
    settled = np.concatenate([np.asarray(one.y)[len(one.y) // 20:] for one in series])

    def end(highest: float, settled_highest: float) -> float:
        if highest <= 0:
            return 0.0
        wild = highest > 2 * max(settled_highest, 0)
        return _nice_top(settled_highest * 1.1 if wild else highest)

    low = -end(-float(everything.min()), -float(settled.min()))
    high = end(float(everything.max()), float(settled.max()))
    if not low and not high:  # all values are zero
        high = 1.0
    return low, high


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
