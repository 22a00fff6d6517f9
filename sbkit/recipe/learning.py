"""The table of what learns: parts of a model, what of them is frozen and until when, and their learning rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from sbkit.recipe.parts import ParameterGroups
from sbkit.recipe.report import Section

FOR_GOOD = float("inf")


def section(parts: ParameterGroups, until: Mapping[str, float], factors: Mapping[str, float], peak: float | None,
            ) -> Section | None:
    """Make the table; None if all learns from the first step, at one rate.

    Arguments
    ---------
    parts : all parameters, by their names in the recipe
    until : the optimizer steps in which a parameter doesn't learn, by path; ``FOR_GOOD``: never
    factors : what the learning rate is multiplied by, by path; 1 where there is none
    peak : the highest learning rate of the run; None: it is not known
    """
    if not until and not factors:
        return None
    sizes: dict[str, Counter[float]] = {}
    multiples: dict[str, set[float]] = {}
    distinct = {id(parameter): path for path, parameter in reversed(parts.parameters.items())}
    for path in filter(set(distinct.values()).__contains__, parts.parameters):
        part, begins = parts.called(path).partition(".")[0], until.get(path, 0)
        sizes.setdefault(part, Counter())[begins] += parts.parameters[path].numel()
        if begins < FOR_GOOD:
            multiples.setdefault(part, set()).add(factors.get(path, 1.0))
    rows = []
    for part, counts in sizes.items():
        scales = multiples.get(part, set())
        rates = [] if peak is None else [_range([peak * scale for scale in scales])]
        rows.append([part, f"{counts[0]:,}", ", ".join(_frozen(counts)), _range(scales), *rates])
    whole: Counter[float] = sum(sizes.values(), Counter())
    columns = ["part", "learn", "frozen", "times the rate", *([] if peak is None else ["peak rate"])]
    return Section("What learns", columns, rows, [_summary(whole)], {
        "learn": whole[0], "frozen": {_when(step): count for step, count in sorted(whole.items()) if step}})


def _summary(counts: Counter[float]) -> str:
    """All of a model in one line."""
    total, frozen = counts.total(), _frozen(counts)
    first = " from the first step" if any(0 < step < FOR_GOOD for step in counts) else ""
    learn = f"{counts[0]:,} of {total:,} parameters learn{first} ({100 * counts[0] / max(1, total):.1f} %)"
    return f"{learn}; frozen: {' and '.join(frozen)}" if frozen else learn


def _frozen(counts: Mapping[float, int]) -> list[str]:
    return [f"{count:,} {_when(step)}" for step, count in sorted(counts.items()) if step and count]


def _when(step: float) -> str:
    return f"until step {step:.0f}" if step < FOR_GOOD else "for good"


def _range(numbers: Iterable[float]) -> str:
    """Numbers as text: one, or the least and the largest."""
    ordered = sorted(numbers)
    return " to ".join(dict.fromkeys(f"{each:.3g}" for each in (ordered[:1] + ordered[-1:])))
