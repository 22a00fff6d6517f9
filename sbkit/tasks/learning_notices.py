"""Notices during training that a recogniser's loss stays at chance, or that it has diverged, with advice."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

from sbkit.tasks.learning_progress import LearningProgress
from sbkit.train.schedule import Schedule

CHANCE, DIVERGENCE = "chance", "divergence"
#: Steps between two looks at the loss.
EVERY = 10
#: A model has learnt nothing while its loss is less than this share below chance: knowing which letters begin and end
#: an utterance gives 3 to 4 %, and the first recognised letters 6 % and more. From twice that on it learns.
NOTHING, LEARNS = 0.05, 0.1
#: Steps at the usual learning rate until a run is considered to stay at chance, and that rate, from random weights:
#: runs of hparams/ctc.yaml that learn leave it after 100 to 330. A lower peak gets up to three times as many.
PATIENCE, USUAL_RATE, MAX_TIMES = 400, 0.002, 3.0
#: How many times the usual rate, or the highest so far, a schedule's peak is too high for an optimizer such as AdamW.
FAR = 20
#: The same from pretrained weights, where a short run gets a share of its steps: Whisper base leaves chance after 45 to
#: 75 steps with the rates of hparams/finetune.yaml, after 190 with its head at the encoder's rate.
TRAINED_PATIENCE, TRAINED_SHARE, TRAINED_RATE = (80, 150), 0.15, 5e-5
#: The peak that is advised for a new head.
HEAD_RATE = 0.01
#: Divergence: for so many steps the loss has lost half of what it had gained (on a logarithmic scale, and counting a
#: loss below a tenth of chance as that), after a gain of at least a third, or is so many times that at the start.
LASTING, GAINED, LOWEST, GROWN = 100, 0.3, 0.1, 1.5


class Notice(NamedTuple):
    """A notice of a problem, or, if ``holds`` is false, that it has passed."""

    what: str
    step: int
    headline: str
    detail: str
    advice: tuple[str, ...] = ()
    holds: bool = True

    def text(self) -> str:
        """Format the notice for the log."""
        first = f"Step {self.step:,}: {self.headline[0].lower()}{self.headline[1:]}. {self.detail}"
        if not self.advice:
            return first
        return "\n  - ".join([f"{first} What to try, the likeliest first:", *self.advice])


class Setup(NamedTuple):
    """The settings of a run that the advice depends on.

    max_norm : the norm at which gradients are clipped; None: they are not
    masks : features are masked from the first step on
    planned : optimizer steps of the whole run
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
    schedule: Schedule | None = None
    anneals: bool = False
    thaw: int = 0
    freezes: bool = False
    trained: bool = False
    fastest: float = 1.0
    keys: Container[str] = ("lr", "min_steps")

    def option(self, name: str, otherwise: str) -> str:
        """Return the option that sets a value: the key of shipped recipes if there is one, otherwise ``otherwise``."""
        return f"--{name if name in self.keys else otherwise}"


class LearningNotices:
    """Monitors the training loss, and returns a notice when a problem begins and when it is over.

    - ``chance``: the loss has not left chance (see ``LearningProgress``) after a number of steps, weighted by their
      learning rates, or at the end of training;
    - ``divergence``: half of the progress is lost, or the loss is far above its start.

    Notices only depend on steps, so they are the same on every rank. Checkpoints don't have what was said: a resumed
    run says again what still holds, once it has watched for as long as a new one would.
    """

    def __init__(self) -> None:
        self.setup = Setup()
        self._last_look = 0
        self._used_patience = 0.0  # the share of it that has passed at chance; 1: all
        self._highest_rate = 0.0
        self._too_high_since: int | None = None  # the step at which the loss rose
        self._said_at: dict[str, int] = {}  # the steps of notices that hold

    def look(self, step: int, progress: LearningProgress, rate: float | None, ended: bool = False) -> list[Notice]:
        """Return notices when ``step`` begins, each ``EVERY`` steps; ``progress.score_at(step)`` has been called.

        rate : the learning rate; None: unknown, so that the notice about chance comes at the end
        ended : whether training has ended, so that a loss at chance is told however few steps there were
        """
        setup, loss = self.setup, progress.loss
        if step <= self._last_look and not ended:  # a second call of fit begins its first step again
            return []
        self._last_look = step
        usual = TRAINED_RATE if setup.trained else USUAL_RATE
        done = step - 1
        if rate is not None and done > setup.thaw and not ended:
            peak = usual if setup.schedule is None else setup.schedule.warmup_end()[1]
            low, high = TRAINED_PATIENCE
            patience = min(high, max(low, TRAINED_SHARE * setup.planned)) if setup.trained else PATIENCE
            patience *= min(MAX_TIMES, max(1.0, usual / max(peak, 1e-12)))
            self._used_patience += EVERY * min(1.0, rate / max(peak, 1e-12)) / patience
            self._highest_rate = max(self._highest_rate, rate)
        first, lowest = progress.first, progress.lowest
        if loss is None or first is None or lowest is None or done < 2 * EVERY:
            return []
        chance = progress.chance if progress.known and progress.chance > 0 else None
        below = 0.0 if chance is None else max(0.0, 1 - loss / chance)
        best = 0.0 if chance is None else max(0.0, 1 - lowest / chance)
        against = "" if chance is None else (
            f"The loss is {loss:.3g} per token, {100 * abs(1 - loss / chance):.0f} % "
            f"{'below' if loss < chance else 'above'} chance ({chance:.3g}: guessing from token frequencies)")

        lost = best >= GAINED and 1 - below > math.sqrt(max(1 - best, LOWEST))
        came_down = chance is not None and lowest <= (1 + NOTHING) * chance
        began = chance if chance is not None and came_down else first
        too_high = lost or loss > GROWN * began > 0
        if not too_high:
            self._too_high_since = None
        elif self._too_high_since is None:
            self._too_high_since = done
        diverged = self._too_high_since is not None and done - self._too_high_since >= LASTING
        if diverged and DIVERGENCE not in self._said_at:
            self._said_at[DIVERGENCE] = done
            clip = f"{setup.max_norm / 5:.2g} (now {setup.max_norm:g})" if setup.max_norm else "1"
            detail = against if lost else f"The loss is {loss:.3g}; it began at {began:.3g}"
            return [Notice(DIVERGENCE, done, "Training has diverged: the " + (
                "model loses what it has learnt" if lost else "loss grows beyond where it began"),
                f"{detail}. The best checkpoint is kept.",
                (*self._lower_rate(), f"stronger gradient clipping: --max_grad_norm {clip}",
                 "--precision fp32, to rule out rounding errors"))]
        if DIVERGENCE in self._said_at and not too_high:
            since = self._said_at.pop(DIVERGENCE)
            return [Notice(DIVERGENCE, done, "Training has recovered", f"The warning of step {since:,} is over.",
                           holds=False)]

        if CHANCE in self._said_at and below >= LEARNS:
            since = self._said_at.pop(CHANCE)
            return [Notice(CHANCE, done, "The model learns now", f"The warning of step {since:,} is over. {against}.",
                           holds=False)]
        stays = chance is not None and below < NOTHING and best < LEARNS and not too_high
        if stays and CHANCE not in self._said_at and (ended or self._used_patience >= 1):
            self._said_at[CHANCE] = done
            return [Notice(CHANCE, done, "The model has learnt nothing" + ("" if self._used_patience >= 1 else " yet"),
                           f"{against}.", tuple(self._leave_chance(usual)))]
        return []

    def _leave_chance(self, usual: float) -> list[str]:
        """Return advice for a loss that stays at chance, the likeliest first."""
        setup, highest = self.setup, self._highest_rate
        steps = max(1000, 200 * math.ceil(setup.planned / 100))
        more = f"more steps: {setup.option('min_steps', 'batching.min_steps')} {steps} or more in a new run"
        advice = [] if self._used_patience >= 1 else [more]
        parts = [part for part in ("encoder", "CNN", "Transformer") if part in setup.keys]
        if setup.trained and not setup.freezes and parts:
            frozen = ", ".join(f"{part}: 100" for part in parts)
            advice.append("if the head is new, it alone first, in a new run, before the encoder forgets what it knows: "
                          f"--freeze '{{{frozen}}}'")
        if setup.trained and 0 < setup.fastest * highest < HEAD_RATE / 2:
            factor = f"--learning_rates '{{ctc_lin: {HEAD_RATE / highest:.0f}}}'"
            advice.append("if the head is new, a higher rate for it: "
                          f"{f'--head_lr {HEAD_RATE:g}' if 'head_lr' in setup.keys else factor}")
        schedule = setup.schedule
        if schedule is not None and schedule.peak > FAR * max(USUAL_RATE, highest):  # as for Adadelta
            limits = [f"--schedule.{name} null" for name in ("max_rise_per_step", "max_lr_at_chance")
                      if getattr(schedule, name, None) is not None]
            advice += [f"no limits of the learning rate, which has reached {highest:.2g} of {schedule.peak:g}: "
                       f"{' '.join(limits)}"] if limits else []
        elif 0 < highest < 0.1 * usual and schedule is not None and schedule.peak >= usual:
            if schedule.limits_warmup:
                advice.append(f"a faster rise of the learning rate: --schedule.max_rise_per_step null (it has reached "
                              f"{highest:.2g} of {schedule.peak:g})")
        elif 0 < highest < 0.1 * usual:
            advice.append(f"a higher learning rate: {setup.option('lr', 'schedule.peak')} {usual:g} (it has reached "
                          f"{highest:.2g})" if not setup.anneals else
                          f"a scheduler that rises sooner or higher: the learning rate has reached {highest:.2g}, and "
                          f"{usual:g} is usual")
        else:
            advice += self._lower_rate()
        if setup.masks:
            advice.append("no masks until the model has learnt something: --spec_augment.ramp '[0.6,1.0]', or "
                          "--spec_augment null")
        return [*advice, *([more] if more not in advice else []),
                "transcripts that match their recordings: listen to some (manifests/train.csv); `sbkit check` finds "
                "labels that are too long for their audio"]

    def _lower_rate(self) -> list[str]:
        """Advise a third of the highest learning rate so far, and twice the warm-up."""
        schedule, reached = self.setup.schedule, self._highest_rate
        if schedule is None or not reached:
            return ["a third of the learning rate, and a longer warm-up"]
        limit = schedule.max_lr_at_chance
        held = limit is not None and 0.9 * limit <= reached <= limit < schedule.peak
        option = "--schedule.max_lr_at_chance" if held else self.setup.option("lr", "schedule.peak")
        lower = f"a third of the learning rate: {option} {reached / 3:.2g} (it has reached {reached:.2g})"
        steps = max(150, 2 * round(schedule.warmup_end()[0]))
        return [lower] if held else [lower, f"a longer warm-up: --schedule.warmup {steps}"]
