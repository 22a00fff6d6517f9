"""Significance of error rates: bootstrap intervals, and whether two runs really differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from sbkit.errors import SbkitError
from sbkit.score.rates import ErrorRates, first_few

#: The fewest utterances whose interval is shown. Resampling a few utterances can't show how much utterances differ: in
#: simulated test sets with rates of 10 and 30 %, intervals from 3 utterances hold the true rate in 65 and 73 of 100,
#: and a quarter of the former have no width; those from 10 hold it in 82 and 90, and nearly all have a width.
MIN_UTTERANCES = 10
NORMAL_FROM = 10_000  # utterances
RESAMPLES = 2000
PAIRED_RESAMPLES = 10_000
_CONFIDENCE = 0.95
#: Utterances that must differ for any difference to be significant: of the 2 ** N ways to draw their signs, two are as
#: far off as if all of them were better.
LEAST_CHANGED = 1 + math.ceil(-math.log2(1 - _CONFIDENCE))
RATES = ("WER", "CER")  # in per cent
_AT_ONCE = 4_000_000  # random numbers held at a time


def interval(rates: ErrorRates) -> tuple[float, float]:
    """Compute bounds of the error rate in per cent by bootstrap over utterances.

    Utterances are resampled rather than words, because errors within an utterance are correlated.
    """
    return interval_of(rates.edits, rates.lengths)


def interval_in_text(rates: ErrorRates, unit: str = "") -> str:
    """Return the interval for a reader, who is told instead if there are too few utterances for one.

    unit : what follows the upper bound
    """
    if len(rates) < MIN_UTTERANCES:
        return f"unknown, fewer than {MIN_UTTERANCES} utterances"
    low, high = interval(rates)
    return f"{low:.2f} to {high:.2f}{unit}"


def interval_of(edits: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
    """Compute bounds for part of a test set, from edits and tokens of its utterances, both [N].

    For many utterances, which would take long to resample, the normal distribution of a ratio of sums is used.
    """
    if len(edits) > NORMAL_FROM:
        rate = 100 * float(edits.sum() / lengths.sum())
        reach = _normal_reach(edits, lengths)
        return max(0.0, rate - reach), rate + reach
    return bounds(_drawn_rates(edits, lengths, RESAMPLES))


@dataclass(frozen=True)
class RunComparison:
    """Comparison of run ``b`` with run ``a`` on the same utterances."""

    rate_a: float
    rate_b: float
    low: float  # bounds of rate_b - rate_a
    high: float
    p_value: float
    name: str = "WER"
    lower_is_better: bool = True
    changed: int | None = None
    """How many utterances differ; None if the comparison isn't by utterances."""

    @property
    def too_few(self) -> str:
        """Why no difference of these runs could be significant; empty if one could be."""
        if self.changed is None or not 0 < self.changed < LEAST_CHANGED:
            return ""
        differ = "utterance differs" if self.changed == 1 else "utterances differ"
        return f"only {self.changed} {differ}, and a significant difference takes {LEAST_CHANGED}"

    @property
    def difference(self) -> float:
        """``b`` less ``a``; in points, for rates."""
        return self.rate_b - self.rate_a

    @property
    def significant(self) -> bool:
        return self.p_value < 1 - _CONFIDENCE

    @property
    def better(self) -> bool:
        return (self.difference < 0) == self.lower_is_better and self.difference != 0

    def __str__(self) -> str:
        """Describe the difference in one sentence."""
        if self.name in RATES:
            difference = f"{self.difference:+.2f} points of {self.name}"
        else:
            difference = f"{self.name} {self.difference:+.4g}"
        if self.too_few:
            return f"Too few utterances to tell ({difference}): {self.too_few}"
        if not self.significant:
            return f"No significant difference ({difference})"
        return f"Significantly {'better' if self.better else 'worse'}: {difference}"


def compare(a: ErrorRates, b: ErrorRates) -> RunComparison:
    """Test whether ``b`` differs from ``a``: a paired bootstrap for the interval, matched pairs for the p-value.

    The p-value is that of a permutation test: if both runs were equally good, each utterance's difference in edits
    could as well have the other sign. With many utterances, both use the normal distribution.
    """
    _check_comparable(a, b)
    row_in_b = {name: i for i, name in enumerate(b.ids)}
    difference = b.edits[[row_in_b[name] for name in a.ids]] - a.edits
    changed = int(np.count_nonzero(difference))
    if len(difference) > NORMAL_FROM:
        reach = _normal_reach(difference, a.lengths)
        middle = b.rate - a.rate
        # The sum of these differences with random signs, by the normal distribution.
        deviation = math.sqrt(np.square(difference.astype(np.float64)).sum())
        p_value = math.erfc(abs(float(difference.sum())) / deviation / math.sqrt(2)) if deviation else 1.0
        return RunComparison(a.rate, b.rate, middle - reach, middle + reach, p_value, changed=changed)
    low, high = bounds(_drawn_rates(difference, a.lengths, PAIRED_RESAMPLES))
    return RunComparison(a.rate, b.rate, low, high, _permutation_p(difference), changed=changed)


def _check_comparable(a: ErrorRates, b: ErrorRates) -> None:
    """Raise unless both runs scored the same utterances with the same references."""
    if a.unit != b.unit:
        raise SbkitError("not-comparable", f"a rate by {a.unit} can't be compared with one by {b.unit}")
    references_a = dict(zip(a.ids, a.references, strict=True))
    references_b = dict(zip(b.ids, b.references, strict=True))
    in_one_only = [name for name in a.ids if name not in references_b]
    in_one_only += [name for name in b.ids if name not in references_a]
    if len(in_one_only) == len(a) + len(b):
        raise SbkitError("not-comparable", f"the runs have no utterance in common: one scored {len(a)}, the other "
                         f"{len(b)}", hint="compare runs on the same corpus")
    if in_one_only:
        were = "utterances were" if len(in_one_only) > 1 else "utterance was"
        raise SbkitError("not-comparable", f"{len(in_one_only)} {were} scored in one run only: "
                         f"{first_few(in_one_only)}", hint="compare runs on the same corpus")
    other_texts = [name for name, reference in references_a.items() if list(reference) != list(references_b[name])]
    if other_texts:
        differ = "utterances differ in their" if len(other_texts) > 1 else "utterance differs in its"
        raise SbkitError("not-comparable", f"{len(other_texts)} {differ} reference: {first_few(other_texts)}",
                         hint="both runs need the same text rules")


def _drawn_rates(edits: np.ndarray, lengths: np.ndarray, resamples: int) -> np.ndarray:
    """Return the rates in per cent of bootstrap samples, which have as many utterances, [resamples]."""
    rng = np.random.default_rng(0)
    columns = np.stack([edits, lengths])
    size = len(edits)
    at_once = max(1, _AT_ONCE // size)
    rates = []
    for start in range(0, resamples, at_once):
        drawn = rng.integers(size, size=(min(at_once, resamples - start), size), dtype=np.int32)
        errors, words = columns[:, drawn].sum(axis=2)
        rates.append(errors / words)
    return 100 * np.concatenate(rates)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Return the quantiles between which 95 % of the values lie."""
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _normal_reach(edits: np.ndarray, lengths: np.ndarray) -> float:
    """The distance of the bounds from the ratio of the sums, in per cent."""
    rate = edits.sum() / lengths.sum()
    deviation = float(np.sqrt(np.square(edits - rate * lengths).sum()) / lengths.sum())
    return 100 * NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2) * deviation


def _permutation_p(difference: np.ndarray) -> float:
    difference = difference[difference != 0]  # zeros don't change with their sign
    if not len(difference):
        return 1.0
    rng = np.random.default_rng(0)
    at_once = max(1, _AT_ONCE // len(difference))
    as_large = 0
    for start in range(0, PAIRED_RESAMPLES, at_once):
        shape = (min(at_once, PAIRED_RESAMPLES - start), len(difference))
        signed = (2 * rng.integers(2, size=shape, dtype=np.int8) - 1) @ difference.astype(np.float64)
        as_large += int(np.count_nonzero(abs(signed) >= abs(difference.sum())))
    return (as_large + 1) / (PAIRED_RESAMPLES + 1)
