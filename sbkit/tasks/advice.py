"""What to try when a recogniser's loss stays at chance or has diverged: texts for a notice, the likeliest first."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

from sbkit.train.schedule import Schedule

#: The usual peak of the learning rate, from random weights.
USUAL_RATE = 0.002
#: The usual peak of the learning rate, from pretrained weights.
TRAINED_RATE = 5e-5
#: A schedule's peak is too high for an optimizer such as AdamW if it is so many times the usual rate, or the highest so
#: far.
FAR = 20
#: The peak for a new head.
HEAD_RATE = 0.01


class Setup(NamedTuple):
    """The settings of a run that the advice depends on.

    max_norm : the norm at which gradients are clipped; None: they are not
    masks : features are masked from the first step on
    planned : optimizer steps of all epochs
    step_limit : of the run, which may end it before (``optimizer_step_limit``)
    schedule : of the learning rate
    anneals : a scheduler of SpeechBrain sets it instead
    thaw : steps until the last frozen part trains
    freezes : ``freeze`` freezes a part, at first or for good
    trained : the initial weights are pretrained, by a pretrainer or init_from
    fastest : the highest factor of the learning rate of any part
    keys : names at the top of the recipe, so that advice can use them
    """

    max_norm: float | None = None
    masks: bool = False
    planned: int = 0
    step_limit: int | None = None
    schedule: Schedule | None = None
    anneals: bool = False
    thaw: int = 0
    freezes: bool = False
    trained: bool = False
    fastest: float = 1.0
    keys: Container[str] = ("lr", "min_steps")

    @property
    def usual_rate(self) -> float:
        """The usual peak of the learning rate."""
        return TRAINED_RATE if self.trained else USUAL_RATE

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run; 0: unknown."""
        return min(filter(None, (self.planned, self.step_limit)), default=0)

    def option(self, name: str, otherwise: str) -> str:
        """Return the option that sets a value: the key of shipped recipes if there is one, otherwise ``otherwise``."""
        return f"--{name if name in self.keys else otherwise}"


class Diagnosis(NamedTuple):
    """What advice depends on: the settings of the run, and how it went until now."""

    setup: Setup
    highest_rate: float
    """The highest learning rate until now; 0 if it is unknown."""
    ended_early: bool = False
    """Whether the run had fewer steps than it takes to leave chance."""


def advice_on_divergence(diagnosis: Diagnosis) -> list[str]:
    """Return advice for a loss that grows, the likeliest first."""
    norm = diagnosis.setup.max_norm
    clip = f"{norm / 5:.2g} (now {norm:g})" if norm else "1"
    return [*_lower_rate(diagnosis), f"stronger gradient clipping: --max_grad_norm {clip}",
            "--precision fp32, to rule out rounding errors"]


def advice_at_chance(diagnosis: Diagnosis) -> list[str]:
    """Return advice for a loss that stays at chance, the likeliest first."""
    setup = diagnosis.setup
    steps = max(1000, 200 * math.ceil(setup.steps / 100))
    more_steps = f"more steps: {setup.option('min_steps', 'batching.min_steps')} {steps} or more in a new run"
    if setup.steps < setup.planned:
        more_steps = f"more steps: --optimizer_step_limit {steps} or more"
    advice = [more_steps] if diagnosis.ended_early else []
    if setup.trained:
        advice += _train_new_head(diagnosis)
    advice += _change_rate(diagnosis)
    if setup.masks:
        advice.append("no masks until the model has learnt something: --spec_augment.ramp '[0.6,1.0]', or "
                      "--spec_augment null")
    if not diagnosis.ended_early:
        advice.append(more_steps)
    advice.append("transcripts that match their recordings: listen to some (manifests/train.csv); `sbkit check` "
                  "finds labels that are too long for their audio")
    return advice


def _train_new_head(diagnosis: Diagnosis) -> list[str]:
    """Advise what a new head on a pretrained model may need."""
    setup = diagnosis.setup
    highest = diagnosis.highest_rate
    advice = []
    parts = [part for part in ("encoder", "CNN", "Transformer") if part in setup.keys]
    if parts and not setup.freezes:
        frozen = ", ".join(f"{part}: 100" for part in parts)
        advice.append("if the head is new, it alone first, in a new run, before the encoder forgets what it knows: "
                      f"--freeze '{{{frozen}}}'")
    if 0 < setup.fastest * highest < HEAD_RATE / 2:
        option = f"--learning_rates '{{ctc_lin: {HEAD_RATE / highest:.0f}}}'"
        if "head_lr" in setup.keys:
            option = f"--head_lr {HEAD_RATE:g}"
        advice.append(f"if the head is new, a higher rate for it: {option}")
    return advice


def _change_rate(diagnosis: Diagnosis) -> list[str]:
    """Advise another learning rate: a faster or higher one if it has stayed low, otherwise a lower one."""
    setup = diagnosis.setup
    schedule = setup.schedule
    usual = setup.usual_rate
    highest = diagnosis.highest_rate
    if schedule is not None and schedule.peak > FAR * max(USUAL_RATE, highest):  # as for Adadelta
        limits = [f"--schedule.{name} null" for name in ("max_rise_per_step", "max_lr_at_chance")
                  if getattr(schedule, name, None) is not None]
        if not limits:
            return []
        return [f"no limits of the learning rate, which has reached {highest:.2g} of {schedule.peak:g}: "
                f"{' '.join(limits)}"]

    stayed_low = 0 < highest < 0.1 * usual
    if not stayed_low:
        return _lower_rate(diagnosis)
    if schedule is not None and schedule.peak >= usual:
        if not schedule.limits_warmup:
            return []
        return [f"a faster rise of the learning rate: --schedule.max_rise_per_step null (it has reached "
                f"{highest:.2g} of {schedule.peak:g})"]
    if setup.anneals:
        return [f"a scheduler that rises sooner or higher: the learning rate has reached {highest:.2g}, and "
                f"{usual:g} is usual"]
    return [f"a higher learning rate: {setup.option('lr', 'schedule.peak')} {usual:g} (it has reached "
            f"{highest:.2g})"]


def _lower_rate(diagnosis: Diagnosis) -> list[str]:
    """Advise a third of the highest learning rate, and twice the warm-up if that is half of the run at most."""
    schedule = diagnosis.setup.schedule
    reached = diagnosis.highest_rate
    if schedule is None or not reached:
        return ["a third of the learning rate, and a longer warm-up"]
    limit = schedule.max_lr_at_chance
    held = limit is not None and 0.9 * limit <= reached <= limit < schedule.peak
    option = "--schedule.max_lr_at_chance" if held else diagnosis.setup.option("lr", "schedule.peak")
    lower = f"a third of the learning rate: {option} {reached / 3:.2g} (it has reached {reached:.2g})"
    steps = max(150, 2 * round(schedule.warmup_end()[0]))
    too_long = 0 < diagnosis.setup.steps < 2 * steps
    return [lower] if held or too_long else [lower, f"a longer warm-up: --schedule.warmup {steps}"]
