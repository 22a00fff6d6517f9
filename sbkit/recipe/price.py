"""What a whole run takes and costs: the estimated or measured seconds of a step, times its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sbkit.recipe.report import Section, amount
from sbkit.system.console import counted, time_span

#: The factor by which an estimate from a device's limits may be off, and one from measured steps.
GUESS_FACTOR, MEASURED_FACTOR = 3.0, 1.5


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


def section(request: PriceRequest, device: str, steps: int, step_seconds: float, audio: float, evaluated: float,
            measured: bool) -> Section:
    """The hours of a run with their interval, and what they cost, as a table of the report.

    device : its name, with what else its speed depends on
    steps : of the whole run
    audio : seconds of a step on one device, padding included
    evaluated : seconds of audio of all validations and the test on one device, which take as long as training on them
    measured : whether ``step_seconds`` was measured here
    """
    training = steps * step_seconds / 3600
    hours, factor = training * (1 + evaluated / (steps * audio)), MEASURED_FACTOR if measured else GUESS_FACTOR
    watts, devices = request.watts.get(request.device or device), request.processes

    def row(what: str, value: float, words: Callable[[float], str]) -> list[str]:
        return [what, words(value), words(value / factor), words(value * factor)]

    rows = [row(f"time of training, {steps:,} steps of {time_span(step_seconds)}", 3600 * training, time_span),
            row("time of validations and the test", 3600 * (hours - training), time_span),
            row("time of the run", 3600 * hours, time_span),
            row(f"cost of {counted(devices, 'device')} at {request.rate:g} an hour each",
                hours * devices * request.rate, amount)]
    if watts is not None:
        rows.append(row(f"kWh at most, at {watts} W per device", hours * devices * watts / 1000, amount))
    how = (f"measured: a few steps of the planned size on {device}, scaled to the {audio:.3g} s of audio that a step "
           "of this run has on average, padding included" if measured else
           f"an estimate for {device}: each kernel takes as long as its FLOPs or its bytes need at the device's "
           "limits, or a step as long as its launches, if those take longer")
    values = {"hours": hours, "low": hours / factor, "high": hours * factor, "training_hours": training,
              "step_seconds": step_seconds, "steps": steps, "measured": measured, "rate": request.rate,
              "devices": devices, "device": device, "cost": hours * devices * request.rate,
              "kwh_at_most": watts and hours * devices * watts / 1000}
    return Section("Price of the run", ["what", "how much", "from", "to"], rows,
                   [f"{how}; the interval is a guess, a factor of {factor:g}"], values)
