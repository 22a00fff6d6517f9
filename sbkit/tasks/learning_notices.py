"""Notices during training that a recogniser's loss stays at chance, or that it has diverged, with advice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import NamedTuple

import yaml
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.tasks.learning_progress import LearningProgress
from sbkit.train.schedule import Schedule

CHANCE, DIVERGENCE = "chance", "divergence"
#: A model has learnt nothing until its loss is this share below chance: knowing which letters begin and end an
#: utterance gives 3 to 4 %, and the first recognised letters 6 % and more.
NOTHING = 0.05
#: From this share below chance on it learns. Twice ``NOTHING``, so that noise doesn't cross both.
LEARNS = 2 * NOTHING
#: Steps at the peak of the learning rate until a run is considered to stay at chance: runs of hparams/ctc.yaml that
#: learn leave it after 100 to 230, the slowest after 330. A lower peak than usual gets up to three times as many.
PATIENCE, MAX_TIMES = 400, 3.0
#: The same from pretrained weights: a share of the run, between two numbers of steps. Whisper base with the rates of
#: hparams/ssl.yaml leaves chance after 45 to 75 steps, with the head at the encoder's rate after 190.
TRAINED_PATIENCE, TRAINED_SHARE = (80, 150), 0.15
#: The usual peak of the learning rate from random weights, and that of hparams/ssl.yaml from pretrained ones.
USUAL_RATE, TRAINED_RATE = 0.002, 5e-5
#: The advised peak for a new head, and the one up to which it is advised.
HEAD_RATE, LEAST_HEAD_RATE = 0.01, 0.002
#: Divergence: for ``LASTING`` steps, the loss has risen half of the way back to chance, on a logarithmic scale, after
#: it was at least ``CLEARLY`` below, or it is ``GROWN`` times the loss at the start. The lowest loss counts as at least
#: a tenth of chance (``LOWEST``), since small losses have large relative spikes.
CLEARLY, GROWN, LASTING, LOWEST = 0.3, 1.5, 100, 0.1
#: Steps until the moving average of the loss has settled, and how often a notice is repeated in an oscillating run.
SETTLED, MAX_REPEATS = 20, 2


class Notice(NamedTuple):
    """A notice of a problem, or, if ``holds`` is false, that it has passed."""

    what: str
    step: int
    headline: str
    detail: str
    advice: tuple[str, ...] = ()
    holds: bool = True
    at_end: bool = False

    def text(self) -> str:
        """Format the notice for the log."""
        when = "At the end of training" if self.at_end else f"Step {self.step:,}"
        first = f"{when}: {self.headline[0].lower()}{self.headline[1:]}. {self.detail}"
        if not self.advice:
            return first
        return "\n  - ".join([f"{first} What to try, the likeliest first:", *self.advice])


class Setup(NamedTuple):
    """The settings of a run that the advice depends on.

    max_norm : the norm at which gradients are clipped; None: they are not
    masks : features are masked from the first step on
    planned : optimizer steps of the whole run; None: they are not known
    schedule : of the learning rate
    thaw : steps until the last frozen part trains
    trained : the initial weights are pretrained, by a pretrainer or init_from
    fastest : the highest factor of the learning rate of any part
    keys : names at the top of the recipe, so that advice can use them
    """

    max_norm: float | None = None
    masks: bool = False
    planned: int | None = None
    schedule: Schedule | None = None
    thaw: int = 0
    trained: bool = False
    fastest: float = 1.0
    keys: Container[str] = ("lr", "least_steps", "number_of_epochs", "step_seconds")

    def option(self, name: str, otherwise: str) -> str:
        """Return the option that sets a value: the key of shipped recipes if there is one, otherwise ``otherwise``."""
        return f"--{name if name in self.keys else otherwise}"

    @property
    def usual_rate(self) -> float:
        """The learning rate with which most such runs learn."""
        return TRAINED_RATE if self.trained else USUAL_RATE

    @property
    def patience(self) -> float:
        """Steps at that rate until a run is considered to stay at chance."""
        if not self.trained:
            return PATIENCE
        low, high = TRAINED_PATIENCE
        return min(high, max(low, TRAINED_SHARE * (self.planned or math.inf)))

    @property
    def peak(self) -> float:
        """The highest learning rate before something is learnt."""
        if self.schedule is None:
            return self.usual_rate
        return min(self.schedule.warmup_end()[1], self.schedule.max_lr_at_chance or math.inf)


@dataclass
class _State:
    step: int = 0  # the last one that began
    loss: float | None = None  # per token
    chance: float | None = None  # None: the loss can't be compared with chance
    learnt: float = 0.0  # steps done, each counted by its share of the peak of the learning rate
    highest: float = 0.0  # learning rate of any step
    first: float | None = None  # the loss at the start
    came_down: bool = False  # the loss has come down to chance
    best: float = 0.0  # the lowest loss as a share below chance
    best_step: int = 0
    falls_since: int | None = None
    validation: str = ""  # the last one, in words
    raised: dict[str, int] = field(default_factory=dict)  # notices that still hold, and their steps
    told: dict[str, int] = field(default_factory=dict)  # how often notices were given


@register_checkpoint_hooks
class LearningNotices:
    """Monitors the training loss, and returns notices of two kinds.

    - ``chance``: the loss has not left chance (see ``LearningProgress``) after ``Setup.patience`` steps, weighted by
      their learning rates, or at the end of training;
    - ``divergence``: half of the progress is lost, or the loss is far above its start.

    A notice is returned once, again when the problem is over, and at the end of training if it is not. Notices only
    depend on steps, so they are the same on every rank and after resuming.

    part : the part of the loss that can be compared with chance; None: only a growing loss is detected
    """

    def __init__(self, part: str | None = None) -> None:
        self.setup = Setup()
        self.part = part
        self._state = _State()

    def begin_step(self, step: int, progress: LearningProgress, rate: float | None) -> list[Notice]:
        """Return notices when ``step`` begins; ``progress.score_at(step)`` has been called before.

        rate : the learning rate of the step; None: it is not known, so the notice about chance comes at the end
        """
        state = self._state
        if rate is not None and step > max(state.step, self.setup.thaw):
            state.learnt += min(1.0, rate / self.setup.peak) if self.setup.peak > 0 else 0.0
            state.highest = max(state.highest, rate)
        state.step, state.loss = step, progress.loss
        state.chance = progress.chance if progress.known else None
        if state.loss is None:
            return []
        if step > SETTLED:
            state.first = state.first or state.loss
            if self._below is not None and self._below > state.best:
                state.best, state.best_step = self._below, step - 1
        if state.chance is not None:
            state.came_down |= state.loss <= (1 + NOTHING) * state.chance
        return [*self._divergence(), *self._chance()]

    def validated(self, step: int, empty: int, rows: int, cer: float) -> None:
        """Record a validation's number of empty transcripts and CER in per cent, which a notice then mentions."""
        blank = f"{empty:,} of {rows:,} transcripts are empty, " if empty else ""
        self._state.validation = f" In the last validation (step {step:,}): {blank}CER {cer:.1f} %."

    def end(self) -> list[Notice]:
        """Return notices at the end of training about all problems that still hold, however few its steps were."""
        state = self._state
        if DIVERGENCE not in state.raised and self._below is not None and self._below < NOTHING:
            state.raised.setdefault(CHANCE, self._done)
        return [self._notice(what)._replace(at_end=True) for what in (DIVERGENCE, CHANCE) if what in state.raised]

    # ------------------------------------------------------------ detection

    @property
    def _done(self) -> int:
        return self._state.step - 1

    @property
    def _below(self) -> float | None:
        """How far the loss is below chance, as a share of chance; None if it can't be compared."""
        loss, chance = self._state.loss, self._state.chance
        return None if loss is None or chance is None else max(0.0, 1 - loss / chance)

    @property
    def _patience(self) -> float:
        """Steps at the peak rate until a run is considered to stay at chance; more for low rates, once it is there."""
        rate = self.setup.usual_rate / self.setup.peak if self.setup.peak > 0 else 1.0
        lower = min(MAX_TIMES, max(1.0, rate))
        return self.setup.patience * (lower if self._state.came_down or self.setup.trained else 1.0)

    def _chance(self) -> list[Notice]:
        state, below = self._state, self._below
        if below is None:
            return []
        if CHANCE in state.raised:
            return self._over(CHANCE) if below >= LEARNS else []
        stays = below < NOTHING and state.best < LEARNS and state.falls_since is None
        return self._raise(CHANCE) if stays and state.learnt >= self._patience else []

    def _divergence(self) -> list[Notice]:
        state = self._state
        if not (self._lost or self._grown):
            state.falls_since = None
            return self._over(DIVERGENCE) if DIVERGENCE in state.raised else []
        state.falls_since = state.falls_since or self._done
        lasts = self._done - state.falls_since >= LASTING and DIVERGENCE not in state.raised
        return self._raise(DIVERGENCE) if lasts else []

    @property
    def _lost(self) -> bool:
        best, below = self._state.best, self._below
        return below is not None and best >= CLEARLY and 1 - below > math.sqrt(max(1 - best, LOWEST))

    @property
    def _grown(self) -> bool:
        loss, began = self._state.loss, self._began
        return loss is not None and began is not None and 0 < GROWN * began < loss

    @property
    def _began(self) -> float | None:
        """The loss of a model that has learnt nothing: chance if the run reached it, else the loss at the start."""
        return self._state.chance if self._state.came_down else self._state.first

    def _raise(self, what: str) -> list[Notice]:
        state = self._state
        state.raised[what] = self._done
        state.told[what] = state.told.get(what, 0) + 1
        return [self._notice(what)] if state.told[what] <= MAX_REPEATS else []

    def _over(self, what: str) -> list[Notice]:
        state = self._state
        since = state.raised.pop(what)
        state.falls_since = None
        if state.told.get(what, 0) > MAX_REPEATS:
            return []
        headline = {CHANCE: "The model learns now", DIVERGENCE: "Training has recovered"}[what]
        loss = f" ({self._against_chance()})" if state.chance is not None else ""
        return [Notice(what, self._done, headline, f"The warning of step {since:,} is over{loss}.", holds=False)]

    # ------------------------------------------------------------ messages

    def _notice(self, what: str) -> Notice:
        state, setup = self._state, self.setup
        if what == DIVERGENCE:
            clip = f" {setup.max_norm / 5:.2g} (now {setup.max_norm:g})" if setup.max_norm else " 1"
            advice = [*self._lower_rate(), f"stronger gradient clipping: --max_grad_norm{clip}",
                      "--precision fp32, to rule out rounding errors"]
            if self._lost:
                headline, detail = "Training has diverged: the model loses what it has learnt", (
                    f"{_sentence(self._against_chance())} At its best, after step {state.best_step:,}, it was "
                    f"{100 * state.best:.0f} % below.")
            else:
                headline = "Training has diverged: the loss grows beyond where it began"
                than = "chance is" if self._began == state.chance else "at the start it was"
                detail = f"The loss is {state.loss:.3g}; {than} {self._began:.3g}."
            return Notice(what, self._done, headline, f"{detail} The best checkpoint is kept.", tuple(advice))
        enough = state.learnt >= setup.patience
        if state.came_down or setup.trained:
            headline = f"The model has learnt nothing{': its loss stays at chance' if enough else ' yet'}"
        else:
            headline = "The model has learnt nothing: its loss is still above chance"
        rising = setup.schedule is not None and self._done < 0.9 * setup.schedule.warmup_end()[0] and not self._held
        rate = [] if rising else self._lower_rate()[::-1]
        if 0 < self._reached < 0.1 * setup.usual_rate:
            rate = [f"a higher learning rate: {setup.option('lr', 'schedule.peak')} {setup.usual_rate:g} (it has "
                    f"reached {self._reached:.2g})"]
        masks = ["no masks until the model has learnt something: --spec_augment.ramp '[0.6,1.0]', or --spec_augment "
                 "null"]
        steps = max(1000, 200 * math.ceil((setup.planned or 0) / 100))
        more = [f"more steps: {setup.option('least_steps', 'batching.least_steps')} {steps} or more in a new run, a "
                f"higher {setup.option('number_of_epochs', 'epoch_counter.limit')}, or a smaller "
                f"{setup.option('step_seconds', 'batching.step_seconds')}"]
        first = self._faster_head()
        order = [first, rate, masks * setup.masks, more] if enough else [first, more, rate, masks * setup.masks]
        usual = ("With the rates of hparams/ssl.yaml Whisper base leaves chance after 45 to 75 steps; docs/finetune.md "
                 "has settings for other models" if setup.trained else
                 f"Runs of hparams/ctc.yaml that learn leave chance after 100 to 230 steps at a rate of {USUAL_RATE:g}")
        detail = (f"{_sentence(self._against_chance())}{state.validation} {usual}. This one has done {self._done:,}, "
                  f"equivalent to {state.learnt:,.0f} at its peak rate.")
        return Notice(what, self._done, headline, detail, (*itertools.chain(*order), _LABELS))

    def _against_chance(self) -> str:
        loss, chance = self._state.loss, self._state.chance
        assert loss is not None and chance is not None, "they were compared"
        distance = f"{100 * abs(1 - loss / chance):.0f} % {'below' if loss < chance else 'above'} chance"
        return (f"the {self.part or 'training'} loss is {loss:.3g} per token, {distance} ({chance:.3g}: guessing from "
                "token frequencies)")

    @property
    def _reached(self) -> float:
        """The highest learning rate so far, but at most the current schedule's peak."""
        schedule = self.setup.schedule
        return min(self._state.highest, math.inf if schedule is None else schedule.warmup_end()[1])

    @property
    def _held(self) -> bool:
        """Whether the learning rate is held at ``max_lr_at_chance``."""
        schedule = self.setup.schedule
        limit = None if schedule is None else schedule.max_lr_at_chance
        return schedule is not None and limit is not None and 0.9 * limit <= self._reached <= limit < schedule.peak

    def _faster_head(self) -> list[str]:
        """Advise a higher rate of the new head in a pretrained model, if it is low."""
        setup = self.setup
        if not setup.trained or not 0 < setup.fastest * setup.peak <= LEAST_HEAD_RATE:
            return []
        factor = f"--learning_rates '{{ctc_lin: {HEAD_RATE / setup.peak:.0f}}}'"
        option = f"--head_lr {HEAD_RATE:g}" if "head_lr" in setup.keys else factor
        return [f"a higher learning rate of the new head, before the encoder forgets what it knows: {option}"]

    def _lower_rate(self) -> list[str]:
        """Advise a third of the highest learning rate so far, and twice the warm-up if the run is long enough."""
        schedule, reached = self.setup.schedule, self._reached
        if schedule is None or not reached:
            return [f"a third of the learning rate (it has reached {reached:.2g}), and a longer warm-up"]
        option = "--schedule.max_lr_at_chance" if self._held else self.setup.option("lr", "schedule.peak")
        lower = f"a third of the learning rate: {option} {reached / 3:.2g} (it has reached {reached:.2g})"
        steps = max(150, 2 * round(schedule.warmup_end()[0]))
        room = not self._held and (self.setup.planned is None or steps <= self.setup.planned)
        return [lower, f"a longer warm-up: --schedule.warmup {steps}"] if room else [lower]

    # ------------------------------------------------------------ saving

    @mark_as_saver
    def save(self, path: str | PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump(asdict(self._state), out)

    @mark_as_loader
    def load(self, path: str | PathLike[str], end_of_epoch: bool) -> None:
        with open(path, encoding="utf-8") as file:
            saved = yaml.safe_load(file)
        known = {one.name for one in fields(_State)} - {"validation"}  # older runs saved more, and this as a list
        self._state = _State(**{name: value for name, value in saved.items() if name in known})
        self._state.validation = saved["validation"] if isinstance(saved.get("validation"), str) else ""


_LABELS = ("transcripts that match their recordings: listen to some (manifests/train.csv); `sbkit check` finds labels "
           "that are too long for their audio")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
