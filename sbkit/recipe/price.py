"""What a whole run will take, by what this machine's finished runs took: hours, cost and energy, with intervals.

From the runs of one device (``finished_runs``), the seconds of a micro-batch are ``c * FLOPs ** a * audio ** b``, by
least squares of the logarithms: larger matrices are computed at a higher speed, so ``a`` is below 1. What that says is
multiplied by what runs of the same task took of it. The interval holds four fifths of the errors that the rule makes on
runs that were left out of it, and grows away from the runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sbkit.recipe.finished_runs import FinishedRun, RunEstimate, Setting, Steps
from sbkit.recipe.report import Section, few
from sbkit.system.console import counted, time_span

if TYPE_CHECKING:
    from sbkit.data.plan import Plan

#: The share of runs that are to be within the interval.
COVERAGE = 0.8
#: How much it takes to believe in other slopes than "as the FLOPs": the sum of squared logarithms of runs' sizes.
PRIOR = 0.1
#: Kinds of runs of a device from which its speed is fitted; with fewer it is guessed from the device's peak.
LEAST = 4
#: Speed of training as a share of that of a large matrix product, and how far off a guess from it may be.
EFFICIENCY, GUESS = 0.35, 3.0
#: How far off a measurement of a few steps may be until finished runs say so, and the narrowest interval of all.
TRIED, NARROWEST = 1.5, 1.05
#: Seconds of a validation or test for those of training on the same audio, until finished runs say so.
EVALUATION = 1.0
#: A prediction that is off by more than this, in the median of all, is not right.
ALLOWED_ERROR = 0.2
#: Steps of an epoch from whose sizes those of the whole run are known.
SAMPLED = 200


def padded_seconds(plan: Plan, processes: int) -> float:
    """The mean of a step's audio on one of so many devices, padding included, in seconds."""
    epoch = plan.epoch(1)
    chosen = np.unique(np.linspace(0, len(epoch) - 1, min(SAMPLED, len(epoch))).round().astype(int))
    return float(np.mean([sum(len(part) * float(epoch.durations[part].max()) for part in epoch.share(i, 0, processes)
                              if len(part)) for i in chosen]))


# ---------------------------------------------------------------- predicting


def run_hours(steps: Steps, step_seconds: float, evaluation: float = EVALUATION) -> float:
    """Hours of the whole run; ``evaluation``: seconds of one for those of training on the same audio."""
    return step_seconds * (steps.steps + evaluation * steps.evaluated / steps.audio) / 3600


class Fitted(NamedTuple):
    """What runs say of steps.

    evaluation : seconds of one for those of training on the same audio
    distance : how much larger an error is to be expected than of steps like those of the runs
    """

    step_seconds: float
    evaluation: float
    distance: float


def kinds_of(runs: Iterable[FinishedRun]) -> list[list[FinishedRun]]:
    """Group runs whose steps compute the same, since one model that is trained often must not be all that counts."""
    groups: list[list[FinishedRun]] = []
    for run in runs:
        group = next((each for each in groups if each[0].steps.like(run.steps)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def fit(kinds: Sequence[Sequence[FinishedRun]], steps: Steps) -> Fitted:
    """Fit the rule for such steps: each kind of run counts once, and the less the more its steps differ in size.

    Seconds are multiplied by what the kinds of runs of the same task took of those that the rule says of them.
    """
    def size(of: Steps) -> np.ndarray:
        return np.log(np.array([of.operations, of.audio]) / of.micro_batches)

    runs = [run for kind in kinds for run in kind]
    sizes, counts = np.array([size(run.steps) for run in runs]), [len(kind) for kind in kinds for _ in kind]
    seconds = np.log([run.step_seconds / run.steps.micro_batches for run in runs])

    def rule(of: Steps) -> tuple[float, float]:
        """The logarithm of the seconds of a micro-batch, and the distance."""
        offsets = sizes - size(of)
        weights = 1 / (1 + (offsets**2).sum(axis=1)) / counts
        mean, offset = np.average(seconds, weights=weights), np.average(offsets, axis=0, weights=weights)
        covariance = np.linalg.inv((offsets - offset).T * weights @ (offsets - offset) + PRIOR * np.eye(2))
        slopes = covariance @ ((offsets - offset).T * weights @ (seconds - mean) + PRIOR * np.array([1.0, 0.0]))
        slopes = np.clip(slopes, 0.0, 1.0)  # nothing that is larger saves time
        return mean - offset @ slopes, math.sqrt(1 + offset @ covariance @ offset)

    errors = [np.mean([math.log(run.step_seconds / run.steps.micro_batches) for run in kind]) - rule(kind[0].steps)[0]
              for kind in kinds if kind[-1].steps.task == steps.task != ""]
    found, distance = rule(steps)
    evaluation = float(np.median([np.median([run.evaluation for run in kind]) for kind in kinds]))
    return Fitted(steps.micro_batches * math.exp(found + sum(errors) / max(1, len(errors))), evaluation, distance)


def left_out(kinds: Sequence[Sequence[FinishedRun]]) -> list[float]:
    """Measured hours for predicted ones, of each kind from all others, as they would be at no distance from those."""
    found = []
    for index, kind in enumerate(kinds):
        rule = fit([*kinds[:index], *kinds[index + 1:]], kind[0].steps)
        hours = [run.hours / run_hours(run.steps, rule.step_seconds, rule.evaluation) for run in kind]
        found.append(float(np.median(hours)) ** (1 / rule.distance))
    return found


def width(ratios: Sequence[float]) -> float:
    """The factor within which ``COVERAGE`` of errors are to be, from at least ``LEAST`` that were made.

    >>> width([1.1, 0.8, 1.0, 1.05])
    1.25
    """
    place = math.ceil(COVERAGE * (len(ratios) + 1))
    return max(NARROWEST, sorted(max(ratio, 1 / ratio) for ratio in ratios)[place - 1])


def predict(steps: Steps, runs: Sequence[FinishedRun], peak: float | None, trial: float | None = None,
            host_seconds: float = 0.0) -> RunEstimate | None:
    """Predict a run; None if nothing is known of the device.

    runs : finished ones of the same setting
    peak : operations per second of the device
    trial : seconds of a step, measured just now
    host_seconds : of a step, on which a device waits that is faster
    """
    if trial is not None:
        tried = [run for run in runs if run.trial]
        if len(kinds_of(tried)) < LEAST:
            return _within(trial, run_hours(steps, trial), TRIED, "trial", 0, trial)
        scale, evaluation, ratios = after_trials(tried)
        return _within(scale * trial, run_hours(steps, scale * trial, evaluation), width(ratios), "trial", len(tried),
                       trial)
    if len(kinds := kinds_of(runs)) >= LEAST:
        rule = fit(kinds, steps)
        # A peak that is measured while others compute is too low, but no run was faster than the true one.
        fastest = max(peak, *(run.steps.operations / run.step_seconds for run in runs)) if peak else math.inf
        each = max(rule.step_seconds, steps.operations / fastest)
        return _within(each, run_hours(steps, each, rule.evaluation), width(left_out(kinds)) ** rule.distance, "fit",
                       len(runs))
    if peak is None:
        return None
    guess = max(steps.operations / (EFFICIENCY * peak), host_seconds)
    return _within(guess, run_hours(steps, guess), GUESS, "peak", len(runs))


def after_trials(tried: Sequence[FinishedRun]) -> tuple[float, float, list[float]]:
    """What finished runs took of what trial steps had said; of each kind the last one counts.

    Returns the median ratio of their steps, the median of their evaluations, and their hours for those predicted from
    all other kinds.
    """
    runs = [kind[-1] for kind in kinds_of(tried)]
    found = np.array([(run.step_seconds / run.trial, run.evaluation) for run in runs])
    others = [np.median(np.delete(found, index, axis=0), axis=0) for index in range(len(runs))]
    ratios = [run.hours / run_hours(run.steps, scale * run.trial, evaluation)
              for run, (scale, evaluation) in zip(runs, others, strict=True)]
    scale, evaluation = np.median(found, axis=0)
    return float(scale), float(evaluation), ratios


def _within(step_seconds: float, hours: float, factor: float, by: str, runs: int,
            trial: float | None = None) -> RunEstimate:
    return RunEstimate(step_seconds, hours, hours / factor, hours * factor, by, runs, trial)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Asked:
    """What ``sbkit check --price`` asks for.

    rate : the price of a device for an hour
    processes : the number of devices
    device : the name of a card that isn't here; None: this machine's
    watts : the most that a device takes, by its data sheet; None: unknown
    host_seconds : of a step, as it is to be expected with the card's driver
    """

    rate: float
    processes: int = 1
    device: str | None = None
    watts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host_seconds: float = 0.0


def section(asked: Asked, setting: Setting, steps: Steps, said: RunEstimate) -> Section:
    """The prediction as a table of the report."""
    devices = setting.processes
    each = said.hours / said.low
    training = steps.steps * said.step_seconds / 3600
    rows = [[f"time of training, {steps.steps:,} steps of {time_span(said.step_seconds)}", *_times(training, each)],
            ["time of validations and the test", *_times(said.hours - training, each)],
            ["time of the run", *_times(said.hours, each)],
            [f"cost of {counted(devices, 'device')} at {asked.rate:g} an hour each",
             *_spread(said.hours * devices * asked.rate, each)]]
    watts = asked.watts.get(setting.device)
    if watts is not None:
        rows.append([f"kWh at most, at {watts} W per device",
                     *_spread(said.hours * devices * watts / 1000, each)])
    values = dataclasses.asdict(said) | {
        "training_hours": training, "cost": said.hours * devices * asked.rate, "rate": asked.rate, "devices": devices,
        "kwh_at_most": watts and said.hours * devices * watts / 1000, "device": setting.device,
        "threads": setting.threads, "steps": steps.steps, "operations_per_step": steps.operations,
        "micro_batches_per_step": steps.micro_batches}
    return Section("Price of the run", ["what", "how much", "from", "to"], rows, [_why(setting, steps, said)], values)


def _times(hours: float, factor: float) -> tuple[str, str, str]:
    return time_span(3600 * hours), time_span(3600 * hours / factor), time_span(3600 * hours * factor)


def _spread(value: float, factor: float) -> tuple[str, str, str]:
    return few(value), few(value / factor), few(value * factor)


def _why(setting: Setting, steps: Steps, said: RunEstimate) -> str:
    """Say in one sentence what a prediction follows from."""
    threads = f", {counted(setting.threads, 'thread')}" if setting.threads else ""
    on = f"{setting.device} in {setting.precision}{threads}"
    wide = f"the interval is a guess, a factor of {GUESS:g}"
    if said.by == "fit":
        far = ", whose steps differ much in size" if said.high > GUESS * said.hours else ""
        return ("the seconds of a micro-batch are c * FLOPs^a * audio^b, corrected by runs of the same task, if any, "
                f"and fitted to {counted(said.runs, 'finished run')} on {on}{far}; the interval covers {COVERAGE:.0%} "
                "of the errors on held-out runs")
    if said.by == "trial":
        how = f"the interval is a guess, a factor of {TRIED:g}, until {LEAST} kinds of runs so measured have finished"
        if said.runs and said.trial:
            how = (f"times {said.step_seconds / said.trial:.3g}, as {counted(said.runs, 'finished run')} took; the "
                   f"interval covers {COVERAGE:.0%} of the errors on held-out runs")
        return (f"measured: a few steps of the planned size on {on}, scaled to the {steps.audio:.3g} s of audio that a "
                f"step of this run has on average, padding included; {how}")
    return (f"{counted(said.runs, 'finished run')} on {on}, too few to fit (at least {LEAST} kinds): a step takes "
            f"its FLOPs at {EFFICIENCY:.0%} of the peak, or its kernel launches in a rehearsal if those take longer; "
            f"{wide}")


def summary(runs: Sequence[FinishedRun]) -> tuple[str, bool]:
    """How right the predictions of finished runs were, in words and as whether they are within ``ALLOWED_ERROR``."""
    said = [(run.hours, run.predicted) for run in runs if run.predicted is not None]
    if not said:
        return f"{counted(len(runs), 'finished run')}, none of them predicted by sbkit check --price", True
    error = float(np.median([abs(hours / each.hours - 1) for hours, each in said]))
    within = sum(each.low <= hours <= each.high for hours, each in said)
    how = "off by" if len(said) == 1 else "median error"
    return (f"{counted(len(runs), 'finished run')}, {len(said)} predicted: {how} {error:.0%}, "
            f"{within} of {len(said)} within their interval"), error <= ALLOWED_ERROR
