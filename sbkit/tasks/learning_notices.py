"""Notices during training that a recogniser's loss stays at chance, or that it has diverged, with advice."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

from sbkit.tasks.learning_progress import LearningProgress
from sbkit.train.schedule import Schedule

#: Codes of notices.
CHANCE, DIVERGENCE = "nothing-learnt", "diverged"
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
    """A notice of a problem, or, if ``holds`` is false, that it has passed. Its code is as that of an error."""

    code: str
    step: int
    headline: str
    detail: str
    advice: tuple[str, ...] = ()
    holds: bool = True

    def text(self) -> str:
        """Format the notice for the log."""
        headline = f"{self.headline[0].lower()}{self.headline[1:]}"
        first = f"Step {self.step:,}: {headline} [{self.code}]. {self.detail}"
        if not self.advice:
            return first
        return "\n  - ".join([f"{first} What to try, the likeliest first:", *self.advice])


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
    def steps(self) -> int:
        """Optimizer steps of the whole run; 0: unknown."""
        return min(filter(None, (self.planned, self.step_limit)), default=0)

    def option(self, name: str, otherwise: str) -> str:
        """Return the option that sets a value: the key of shipped recipes if there is one, otherwise ``otherwise``."""
        return f"--{name if name in self.keys else otherwise}"


class Standing(NamedTuple):
    """Where the loss is, compared with chance and with where it began.

    below, best : the share by which the loss is below chance, now and at its lowest; 0 if chance is unknown
    """

    loss: float
    first: float
    lowest: float
    chance: float | None
    below: float
    best: float

    @classmethod
    def of(cls, progress: LearningProgress) -> Standing | None:
        """Return where the loss is; None if it is not known yet."""
        loss, first, lowest = progress.loss, progress.first, progress.lowest
        if loss is None or first is None or lowest is None:
            return None
        if not (progress.known and progress.chance > 0):
            return cls(loss, first, lowest, None, 0.0, 0.0)
        below = max(0.0, 1 - loss / progress.chance)
        best = max(0.0, 1 - lowest / progress.chance)
        return cls(loss, first, lowest, progress.chance, below, best)

    @property
    def lost_progress(self) -> bool:
        """Whether half of what was gained is lost, on a logarithmic scale."""
        return self.best >= GAINED and 1 - self.below > math.sqrt(max(1 - self.best, LOWEST))

    @property
    def beginning(self) -> float:
        """The loss from which growth counts: chance, if the loss has ever come down to it."""
        came_down = self.chance is not None and self.lowest <= (1 + NOTHING) * self.chance
        return self.chance if self.chance is not None and came_down else self.first

    @property
    def has_grown(self) -> bool:
        """Whether the loss is far above where it began."""
        return self.loss > GROWN * self.beginning > 0

    def against_chance(self) -> str:
        """Compare the loss with chance in words; empty if chance is unknown."""
        if self.chance is None:
            return ""
        share = 100 * abs(1 - self.loss / self.chance)
        side = "below" if self.loss < self.chance else "above"
        return (f"The loss is {self.loss:.3g} per token, {share:.0f} % {side} chance ({self.chance:.3g}: guessing from "
                "token frequencies)")


class LearningNotices:
    """Monitors the training loss, and returns a notice when a problem begins and when it is over.

    - ``nothing-learnt``: the loss has not left chance (see ``LearningProgress``) after a number of steps, weighted by
      their learning rates, or at the end of training;
    - ``diverged``: half of the progress is lost, or the loss is far above its start.

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
        ended : whether training has ended, so that a loss at chance is reported however few steps there were
        """
        if step <= self._last_look and not ended:  # a second call of fit begins its first step again
            return []
        self._last_look = step
        completed = step - 1
        if rate is not None and completed > self.setup.thaw and not ended:
            self._use_patience(rate)
        standing = Standing.of(progress)
        if standing is None or completed < 2 * EVERY:
            return []

        too_high = standing.lost_progress or standing.has_grown
        notice = self._divergence(completed, standing, too_high) or self._chance(completed, standing, too_high, ended)
        return [] if notice is None else [notice]

    def _use_patience(self, rate: float) -> None:
        """Count the steps since the last look towards those after which the loss should have left chance. Steps below
        the peak of the learning rate count less, and at a lower peak more of them are needed."""
        setup = self.setup
        usual = self._usual_rate
        peak = max(usual if setup.schedule is None else setup.schedule.warmup_end()[1], 1e-12)
        patience: float = PATIENCE
        if setup.trained:
            fewest, most = TRAINED_PATIENCE
            patience = min(most, max(fewest, TRAINED_SHARE * setup.steps))
        patience *= min(MAX_TIMES, max(1.0, usual / peak))
        self._used_patience += EVERY * min(1.0, rate / peak) / patience
        self._highest_rate = max(self._highest_rate, rate)

    @property
    def _usual_rate(self) -> float:
        return TRAINED_RATE if self.setup.trained else USUAL_RATE

    def _divergence(self, completed: int, standing: Standing, too_high: bool) -> Notice | None:
        """Return the notice that training has diverged, or that it has recovered."""
        if not too_high:
            self._too_high_since = None
            if DIVERGENCE not in self._said_at:
                return None
            since = self._said_at.pop(DIVERGENCE)
            return Notice(DIVERGENCE, completed, "Training has recovered", f"The warning of step {since:,} is over.",
                          holds=False)

        if self._too_high_since is None:
            self._too_high_since = completed
        if DIVERGENCE in self._said_at or completed - self._too_high_since < LASTING:
            return None
        self._said_at[DIVERGENCE] = completed
        norm = self.setup.max_norm
        clip = f"{norm / 5:.2g} (now {norm:g})" if norm else "1"
        advice = (*self._lower_rate(), f"stronger gradient clipping: --max_grad_norm {clip}",
                  "--precision fp32, to rule out rounding errors")
        if standing.lost_progress:
            headline = "Training has diverged: the model loses what it has learnt"
            detail = standing.against_chance()
        else:
            headline = "Training has diverged: the loss grows beyond where it began"
            detail = f"The loss is {standing.loss:.3g}; it began at {standing.beginning:.3g}"
        return Notice(DIVERGENCE, completed, headline, f"{detail}. The best checkpoint is kept.", advice)

    def _chance(self, completed: int, standing: Standing, too_high: bool, ended: bool) -> Notice | None:
        """Return the notice that nothing has been learnt, or that the model learns now."""
        if CHANCE in self._said_at:
            if standing.below < LEARNS:
                return None
            since = self._said_at.pop(CHANCE)
            return Notice(CHANCE, completed, "The model learns now",
                          f"The warning of step {since:,} is over. {standing.against_chance()}.", holds=False)

        stays = standing.chance is not None and standing.below < NOTHING and standing.best < LEARNS and not too_high
        if not stays or not (ended or self._used_patience >= 1):
            return None
        self._said_at[CHANCE] = completed
        yet = "" if self._used_patience >= 1 else " yet"
        return Notice(CHANCE, completed, f"The model has learnt nothing{yet}", f"{standing.against_chance()}.",
                      tuple(self._leave_chance()))

    def _leave_chance(self) -> list[str]:
        """Return advice for a loss that stays at chance, the likeliest first."""
        setup = self.setup
        steps = max(1000, 200 * math.ceil(setup.steps / 100))
        more_steps = f"more steps: {setup.option('min_steps', 'batching.min_steps')} {steps} or more in a new run"
        if setup.steps < setup.planned:
            more_steps = f"more steps: --optimizer_step_limit {steps} or more"
        ended_early = self._used_patience < 1
        advice = [more_steps] if ended_early else []
        if setup.trained:
            advice += self._train_new_head()
        advice += self._change_rate()
        if setup.masks:
            advice.append("no masks until the model has learnt something: --spec_augment.ramp '[0.6,1.0]', or "
                          "--spec_augment null")
        if not ended_early:
            advice.append(more_steps)
        advice.append("transcripts that match their recordings: listen to some (manifests/train.csv); `sbkit check` "
                      "finds labels that are too long for their audio")
        return advice

    def _train_new_head(self) -> list[str]:
        """Advise what a new head on a pretrained model may need."""
        setup = self.setup
        highest = self._highest_rate
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

    def _change_rate(self) -> list[str]:
        """Advise another learning rate: a faster or higher one if it has stayed low, otherwise a lower one."""
        setup = self.setup
        schedule = setup.schedule
        usual = self._usual_rate
        highest = self._highest_rate
        if schedule is not None and schedule.peak > FAR * max(USUAL_RATE, highest):  # as for Adadelta
            limits = [f"--schedule.{name} null" for name in ("max_rise_per_step", "max_lr_at_chance")
                      if getattr(schedule, name, None) is not None]
            if not limits:
                return []
            return [f"no limits of the learning rate, which has reached {highest:.2g} of {schedule.peak:g}: "
                    f"{' '.join(limits)}"]

        stayed_low = 0 < highest < 0.1 * usual
        if not stayed_low:
            return self._lower_rate()
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

    def _lower_rate(self) -> list[str]:
        """Advise a third of the highest learning rate so far, and twice the warm-up if that is half of the run at most.
        """
        schedule, reached = self.setup.schedule, self._highest_rate
        if schedule is None or not reached:
            return ["a third of the learning rate, and a longer warm-up"]
        limit = schedule.max_lr_at_chance
        held = limit is not None and 0.9 * limit <= reached <= limit < schedule.peak
        option = "--schedule.max_lr_at_chance" if held else self.setup.option("lr", "schedule.peak")
        lower = f"a third of the learning rate: {option} {reached / 3:.2g} (it has reached {reached:.2g})"
        steps = max(150, 2 * round(schedule.warmup_end()[0]))
        too_long = 0 < self.setup.steps < 2 * steps
        return [lower] if held or too_long else [lower, f"a longer warm-up: --schedule.warmup {steps}"]
