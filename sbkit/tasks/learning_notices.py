"""Notices during training that a recogniser's loss stays at chance, or that it has diverged, with advice."""

from __future__ import annotations

import math
from typing import NamedTuple

from sbkit.tasks.advice import Diagnosis, Setup, advice_at_chance, advice_on_divergence
from sbkit.tasks.learning_progress import LearningProgress

#: Codes of notices.
CHANCE = "nothing-learnt"
DIVERGENCE = "diverged"
#: Steps between two looks at the loss.
EVERY = 10

# What counts as chance, as shares by which the loss is below it.

#: Below this share a model has learnt nothing: knowing which letters begin and end an utterance gives 3 to 4 %, and the
#: first recognised letters 6 % and more.
NOTHING = 0.05
#: From this share on it learns.
LEARNS = 0.1

# How long a run may stay at chance.

#: Steps at the usual learning rate, from random weights: runs of hparams/ctc.yaml that learn leave chance after 100 to
#: 330.
PATIENCE = 400
#: A run with a lower peak gets up to so many times the steps.
MAX_TIMES = 3.0
#: The fewest steps from pretrained weights: Whisper base leaves chance after 45 to 75 with the rates of
#: hparams/finetune.yaml.
TRAINED_PATIENCE_MIN = 80
#: The most steps from pretrained weights, fewer than the 190 that it takes with its head at the encoder's rate.
TRAINED_PATIENCE_MAX = 150
#: Between these two, it is this share of the run.
TRAINED_SHARE = 0.15

# What counts as divergence.

#: Steps for which it has to last.
LASTING = 100
#: The share of chance that a model has to have gained, of which it then loses half.
GAINED = 0.3
#: Half is counted on a logarithmic scale, on which a loss below this share of chance counts as that share.
LOWEST = 0.1
#: Or the loss is so many times that at the start.
GROWN = 1.5


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
        usual = setup.usual_rate
        peak = max(usual if setup.schedule is None else setup.schedule.warmup_end()[1], 1e-12)
        patience: float = PATIENCE
        if setup.trained:
            patience = min(TRAINED_PATIENCE_MAX, max(TRAINED_PATIENCE_MIN, TRAINED_SHARE * setup.steps))
        patience *= min(MAX_TIMES, max(1.0, usual / peak))
        self._used_patience += EVERY * min(1.0, rate / peak) / patience
        self._highest_rate = max(self._highest_rate, rate)

    def _diagnosis(self) -> Diagnosis:
        return Diagnosis(self.setup, self._highest_rate, ended_early=self._used_patience < 1)

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
        advice = tuple(advice_on_divergence(self._diagnosis()))
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
        diagnosis = self._diagnosis()
        if not stays or (diagnosis.ended_early and not ended):
            return None
        self._said_at[CHANCE] = completed
        yet = " yet" if diagnosis.ended_early else ""
        return Notice(CHANCE, completed, f"The model has learnt nothing{yet}", f"{standing.against_chance()}.",
                      tuple(advice_at_chance(diagnosis)))
