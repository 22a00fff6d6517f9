"""Predicts hours, cost and energy of a whole run, with intervals, from this machine's finished runs.

For one device (``finished_runs``), the seconds of a micro-batch are ``c * FLOPs ** a * audio ** b``, fitted by least
squares of the logarithms: larger matrices are faster per FLOP, so ``a`` is below 1. The result is corrected by the mean
error on runs of the same task. The interval covers four fifths of the errors on held-out runs, and is wider for steps
that differ in size from those of the runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sbkit.recipe.finished_runs import FinishedRun, RunEstimate, Setting, Steps
from sbkit.recipe.report import Section, amount
from sbkit.system.console import counted, time_span

if TYPE_CHECKING:
    from sbkit.data.plan import Plan

#: The share of runs that the interval should cover.
COVERAGE = 0.8
#: Weight of the prior slopes, seconds proportional to FLOPs, against the sum of squared logarithms of runs' sizes.
PRIOR = 0.1
#: Minimum kinds of runs to fit a device's speed; with fewer it is guessed from the device's limits.
MIN_KINDS = 4
#: The factor of the interval of a guess by the limits of a device.
GUESS_FACTOR = 3.0
#: The factor of the interval of a measurement until there are finished runs, and the smallest factor of all.
TRIAL_FACTOR, MIN_FACTOR = 1.5, 1.05
#: Time of a validation or test relative to training on the same audio, until there are finished runs.
EVALUATION = 1.0
#: Predictions are not accurate if their median error is above this.
ALLOWED_ERROR = 0.2
#: Steps of an epoch from whose sizes those of the whole run are estimated.
SAMPLED_STEPS = 200


def padded_seconds(plan: Plan, processes: int, min_micros: int = 1) -> float:
    """The mean seconds of audio in a step on one of ``processes`` devices, padding included."""
    epoch = plan.epoch(1)
    chosen = np.unique(np.linspace(0, len(epoch) - 1, min(SAMPLED_STEPS, len(epoch))).round().astype(int))
    found = []
    for i in chosen:
        parts, shape = epoch.share(i, 0, processes, min_micros), epoch.shape(i, processes, min_micros)
        found.append(sum(len(part) * float(epoch.durations[part].max()) for part in parts if len(part))
                     if shape is None else len(parts) * shape.rows * shape.seconds)
    return float(np.mean(found))


# ---------------------------------------------------------------- predicting


def run_hours(steps: Steps, step_seconds: float, evaluation: float = EVALUATION) -> float:
    """Hours of the whole run; ``evaluation``: its time relative to training on the same audio."""
    return step_seconds * (steps.steps + evaluation * steps.evaluated / steps.audio) / 3600


def group_by_steps(runs: Iterable[FinishedRun]) -> list[list[FinishedRun]]:
    """Group runs whose steps compute the same, so that one model that is trained often doesn't dominate."""
    groups: list[list[FinishedRun]] = []
    for run in runs:
        group = next((each for each in groups if each[0].steps.same_as(run.steps)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def fit(kinds: Sequence[Sequence[FinishedRun]], steps: Steps) -> tuple[float, float, float]:
    """Fit the rule for such steps: each kind of run counts once, and less if its steps differ more in size.

    Seconds are corrected by the mean error of the rule on runs of the same task. Returns the seconds of a step, the
    time of an evaluation relative to training on the same audio, and the distance: the factor of the expected error,
    1 for steps like those of the runs.
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
        slopes = np.clip(slopes, 0.0, 1.0)  # larger steps never take less time
        return mean - offset @ slopes, math.sqrt(1 + offset @ covariance @ offset)

    errors = [np.mean([math.log(run.step_seconds / run.steps.micro_batches) for run in kind]) - rule(kind[0].steps)[0]
              for kind in kinds if kind[-1].steps.task == steps.task != ""]
    log_seconds, distance = rule(steps)
    evaluation = float(np.median([np.median([run.evaluation for run in kind]) for kind in kinds]))
    correction = sum(errors) / max(1, len(errors))
    return steps.micro_batches * math.exp(log_seconds + correction), evaluation, distance


def width(ratios: Sequence[float]) -> float:
    """The factor that covers ``COVERAGE`` of errors, from at least ``MIN_KINDS`` of them.

    >>> width([1.1, 0.8, 1.0, 1.05])
    1.25
    """
    place = math.ceil(COVERAGE * (len(ratios) + 1))
    return max(MIN_FACTOR, sorted(max(ratio, 1 / ratio) for ratio in ratios)[place - 1])


def predict(steps: Steps, runs: Sequence[FinishedRun], peak: float | None, trial: float | None = None,
            least: float | None = None) -> RunEstimate | None:
    """Predict a run; None if nothing is known about the device.

    runs : finished ones of the same setting
    peak : operations per second of the device
    trial : seconds of a step, measured just now
    least : seconds of a step by the limits of the device, and by those of the host, which launches its kernels
    """
    if trial is not None:
        tried = [run for run in runs if run.trial]
        if len(group_by_steps(tried)) < MIN_KINDS:
            return _estimate(trial, run_hours(steps, trial), TRIAL_FACTOR, "trial", 0, trial)
        scale, evaluation, ratios = trial_ratios(tried)
        return _estimate(scale * trial, run_hours(steps, scale * trial, evaluation), width(ratios), "trial", len(tried),
                         trial)
    if len(kinds := group_by_steps(runs)) >= MIN_KINDS:
        step_seconds, evaluation, distance = fit(kinds, steps)
        # A peak measured while other processes compute is too low, but no run was faster than the true one.
        fastest = max(peak, *(run.steps.operations / run.step_seconds for run in runs)) if peak else math.inf
        each = max(step_seconds, steps.operations / fastest)
        errors = []  # measured divided by predicted hours of each kind, fitted to all others, scaled to distance 1
        for index, kind in enumerate(kinds):
            expected, its_evaluation, its_distance = fit([*kinds[:index], *kinds[index + 1:]], kind[0].steps)
            hours = [run.hours / run_hours(run.steps, expected, its_evaluation) for run in kind]
            errors.append(float(np.median(hours)) ** (1 / its_distance))
        return _estimate(each, run_hours(steps, each, evaluation), width(errors) ** distance, "fit", len(runs))
    return None if least is None else _estimate(least, run_hours(steps, least), GUESS_FACTOR, "limits", len(runs))


def trial_ratios(tried: Sequence[FinishedRun]) -> tuple[float, float, list[float]]:
    """Compare finished runs with their trial steps; of each kind only the last run counts.

    Returns the median ratio of their steps, the median of their evaluations, and measured divided by predicted hours of
    each kind, predicted from all others.
    """
    runs = [kind[-1] for kind in group_by_steps(tried)]
    found = np.array([(run.step_seconds / run.trial, run.evaluation) for run in runs])
    others = [np.median(np.delete(found, index, axis=0), axis=0) for index in range(len(runs))]
    ratios = [run.hours / run_hours(run.steps, scale * run.trial, evaluation)
              for run, (scale, evaluation) in zip(runs, others, strict=True)]
    scale, evaluation = np.median(found, axis=0)
    return float(scale), float(evaluation), ratios


def _estimate(step_seconds: float, hours: float, factor: float, by: str, runs: int,
              trial: float | None = None) -> RunEstimate:
    return RunEstimate(step_seconds, hours, hours / factor, hours * factor, by, runs, trial)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class PriceRequest:
    """The options of ``sbkit check --price``.

    rate : the price of a device per hour
    processes : the number of devices
    device : the name of a card that this machine lacks; None: this machine's device
    watts : maximum power by the name of a device, by its data sheet
    """

    rate: float
    processes: int = 1
    device: str | None = None
    watts: Mapping[str, int] = dataclasses.field(default_factory=dict)


def section(request: PriceRequest, setting: Setting, steps: Steps, estimate: RunEstimate) -> Section:
    """The prediction as a table of the report."""
    devices = setting.processes
    each = estimate.hours / estimate.low
    training = steps.steps * estimate.step_seconds / 3600
    rows = [[f"time of training, {steps.steps:,} steps of {time_span(estimate.step_seconds)}", *_times(training, each)],
            ["time of validations and the test", *_times(estimate.hours - training, each)],
            ["time of the run", *_times(estimate.hours, each)],
            [f"cost of {counted(devices, 'device')} at {request.rate:g} an hour each",
             *_amounts(estimate.hours * devices * request.rate, each)]]
    watts = request.watts.get(setting.device)
    if watts is not None:
        rows.append([f"kWh at most, at {watts} W per device",
                     *_amounts(estimate.hours * devices * watts / 1000, each)])
    values = dataclasses.asdict(estimate) | {
        "training_hours": training, "cost": estimate.hours * devices * request.rate, "rate": request.rate,
        "devices": devices, "kwh_at_most": watts and estimate.hours * devices * watts / 1000, "device": setting.device,
        "threads": setting.threads, "steps": steps.steps, "operations_per_step": steps.operations,
        "micro_batches_per_step": steps.micro_batches}
    return Section("Price of the run", ["what", "how much", "from", "to"], rows,
                   [_explanation(setting, steps, estimate)], values)


def _times(hours: float, factor: float) -> tuple[str, str, str]:
    return time_span(3600 * hours), time_span(3600 * hours / factor), time_span(3600 * hours * factor)


def _amounts(value: float, factor: float) -> tuple[str, str, str]:
    return amount(value), amount(value / factor), amount(value * factor)


def _explanation(setting: Setting, steps: Steps, estimate: RunEstimate) -> str:
    """Explain in one sentence how a prediction was made."""
    threads = f", {counted(setting.threads, 'thread')}" if setting.threads else ""
    on = f"{setting.device} in {setting.precision}{threads}"
    runs = counted(estimate.runs, "finished run")
    covers = f"the interval covers {COVERAGE:.0%} of the errors on held-out runs"
    guess = "the interval is a guess, a factor of "
    if estimate.by == "fit":
        far = ", whose steps differ much in size" if estimate.high > GUESS_FACTOR * estimate.hours else ""
        return ("the seconds of a micro-batch are c * FLOPs^a * audio^b, corrected by runs of the same task, if any, "
                f"and fitted to {runs} on {on}{far}; {covers}")
    if estimate.by == "trial":
        how = f"{guess}{TRIAL_FACTOR:g}, until {MIN_KINDS} kinds of runs predicted this way have finished"
        if estimate.runs and estimate.trial:
            how = f"times {estimate.step_seconds / estimate.trial:.3g}, as {runs} took; {covers}"
        return (f"measured: a few steps of the planned size on {on}, scaled to the {steps.audio:.3g} s of audio that a "
                f"step of this run has on average, padding included; {how}")
    return (f"{runs} on {on}, too few to fit (at least {MIN_KINDS} kinds): an estimate: each kernel takes as long "
            "as its FLOPs or its bytes need at the device's limits, or a step as long as its launches, if those take "
            f"longer; {guess}{GUESS_FACTOR:g}")


def summary(runs: Sequence[FinishedRun]) -> tuple[str, bool]:
    """How accurate predictions of finished runs were, as text, and whether they are within ``ALLOWED_ERROR``."""
    predicted = [(run.hours, run.predicted) for run in runs if run.predicted is not None]
    if not predicted:
        return f"{counted(len(runs), 'finished run')}, none of them predicted by sbkit check --price", True
    error = float(np.median([abs(hours / each.hours - 1) for hours, each in predicted]))
    within = sum(each.low <= hours <= each.high for hours, each in predicted)
    how = "off by" if len(predicted) == 1 else "median error"
    return (f"{counted(len(runs), 'finished run')}, {len(predicted)} predicted: {how} {error:.0%}, "
            f"{within} of {len(predicted)} within their interval"), error <= ALLOWED_ERROR
