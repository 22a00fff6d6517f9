"""Notices during training that a recogniser hears nothing, or no longer what it did."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import yaml
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.tasks import learning_notice as words
from sbkit.tasks.hearing import Hearing
from sbkit.tasks.learning_notice import CHANCE, DIVERGENCE, STANDSTILL, VALIDATION, Notice, Seen, Setup

#: A step at the peak of a run's learning rate counts for at least one in so many, however low the peak is.
MOST_TIMES = 3.0
#: From this share on a model hears clearly: words, no longer the commonest letters. The transcripts of one that hears
#: less may still be empty (those of word pieces were at 12 %), and its loss swings by as much as it hears.
CLEARLY = 0.3
#: CER in per cent from which a validation counts as having heard nothing: empty transcripts make 100. Where training
#: hears clearly, so does a model that has only learnt which letters are frequent, near 90. Below the last it has heard.
DEAF, DEAF_ALONE, HEARD_AGAIN = 95.0, 90.0, 85.0
#: The loss has fallen back by the first share of its way from chance to its lowest, on a logarithmic scale; it is back
#: from the second share on. A lowest loss counts as this share of chance at least: below, training knows its utterances
#: by heart, and spikes and new masks multiply the loss.
FALLEN, BACK, LOWEST = 0.5, 0.4, 0.1
#: The loss has grown beyond the first factor of its ceiling (chance, or where it began); it is back below the second.
GROWN, SHRUNK = 1.5, 1.25
#: A standstill: no more than ``STANDS`` was ever heard, and for ``PATIENCE`` steps, and for this share of the run, that
#: has not grown by ``GAIN``. Real runs gained 6 % and more in as many, also those with few data and word pieces.
#: Whoever ends below ``STANDS`` is told then, however it went on.
STANDS, STANDING_SHARE, GAIN = 0.4, 0.1, 0.04
#: How often a notice of each kind is given and taken back, in a run that goes up and down.
MOST_TOLD = 2
#: Steps that a fall has to last: more than the twenty that the moving average spans, and than a run that goes on at a
#: higher rate needs to get back; in a long run a share of it.
LASTING, LASTING_SHARE = 100, 0.02
#: Steps until the moving average has settled.
SETTLED = 20


@dataclass
class _State:
    step: int = 0  # the last one that was looked at
    learnt: float = 0.0  # steps, counted by their learning rates
    tried: float = 0.0  # the same, however low the run's own rate is
    highest: float = 0.0  # learning rate of any step
    first: float | None = None  # the loss per token at the start
    came_down: bool = False  # the loss has come down to chance
    best: float = 0.0  # the most that was heard
    best_step: int = 0
    gained: float = 0.0  # the best when it last grew by ``GAIN``
    gained_step: int = 0
    gained_learnt: float = 0.0
    falls_since: int | None = None
    seen: list[Any] | None = None  # the last Seen
    validation: list[Any] | None = None  # the last Validation
    raised: dict[str, int] = field(default_factory=dict)  # warnings that still hold, and their steps
    told: dict[str, int] = field(default_factory=dict)  # how often warnings were given


@register_checkpoint_hooks
class LearningAlarm:
    """Watches training steps and validations, and returns notices for whoever watches the run.

    A notice is given once, again when the problem has passed, and at the end of training if it has not. It depends on
    steps alone, so it is the same on every rank and after resuming. Patience is counted by what was learnt with: a step
    counts for its learning rate's share of ``USUAL_RATE``, or of the run's own peak if that is higher, and for nothing
    before the last part is unfrozen. There are four:

    - ``chance``: the loss stands at chance (see ``Hearing``) after ``PATIENCE`` steps, or above it after as many at the
      run's own rate, however low that is; and in the first ones if the run is planned for fewer than ``FEWEST``.
    - ``standstill``: something is heard, not much, and no more of it for ``PATIENCE`` steps.
    - ``validation``: after ``PATIENCE`` steps, nearly all transcripts of a validation are empty, or the CER is as high,
      and the training loss doesn't explain it.
    - ``divergence``: for ``LASTING`` steps, what was clearly heard is half lost, or the loss is above where it began.

    part : the part of the loss that can be compared with chance; None: there is none, so that only a growing loss and
        empty transcripts are noticed
    """

    def __init__(self, part: str | None = None) -> None:
        self.setup = Setup()
        self.part = part
        self._state = _State()

    # ------------------------------------------------------------ what it is told

    def look(self, step: int, hearing: Hearing, rate: float | None = None) -> list[Notice]:
        """Return notices when ``step`` begins; ``hearing.at(step)`` has been called before.

        rate : the learning rate of the step; None: it is not known, so patience doesn't end before the run does
        """
        state, loss = self._state, hearing.loss
        if rate is not None and step > max(state.step, self.setup.thaw):
            state.learnt += self._worth(rate, MOST_TIMES)
            state.tried += self._worth(rate, 1.0)
            state.highest = max(state.highest, rate)
        state.step = step
        if loss is None:
            return []
        chance = hearing.chance if hearing.known else None
        heard = None if chance is None else max(0.0, 1 - loss / chance)
        best = None if heard is None else max(heard, state.best)
        reached = self.setup.reached(step - 1, rate, best)  # of this start's schedule, which a step may not have had
        if reached is not None and state.highest:
            reached = min(reached, state.highest)
        seen = Seen(step - 1, loss, chance, heard, reached, state.learnt, f"{self.part or 'training'} loss")
        state.seen = list(seen)
        if state.first is None and step > SETTLED:
            state.first = loss
        if chance is not None and heard is not None:
            state.came_down |= loss <= (1 + words.NOTHING) * chance
            if heard > state.best and step > SETTLED:
                state.best, state.best_step = heard, step - 1
            if state.best > state.gained + GAIN:
                state.gained, state.gained_step, state.gained_learnt = state.best, step - 1, state.learnt
        return [*self._divergence(step, seen), *self._chance(step, seen), *self._standstill(step, seen)]

    def validated(self, step: int, empty: int, rows: int, cer: float) -> list[Notice]:
        """Return notices after a validation at ``step``, with its empty transcripts and its CER in per cent."""
        if not rows:
            return []
        found = words.Validation(step, empty, rows, float(cer))
        self._state.validation = list(found)
        if VALIDATION in self._state.raised:
            return self._over(VALIDATION, step) if not found.deaf(HEARD_AGAIN) else []
        heard = None if self._seen is None else self._seen.heard
        limit = DEAF if heard is None else DEAF_ALONE
        explained = self._state.raised or (heard is not None and heard < CLEARLY)
        if found.deaf(limit) and not explained and self._state.learnt >= words.PATIENCE:
            return self._raise(VALIDATION, step)
        return []

    def end(self, step: int) -> list[Notice]:
        """Return notices at the end of training about all that still holds, however few its steps were."""
        state, seen = self._state, self._seen
        hears = seen is None or seen.heard is None or seen.heard >= words.NOTHING
        if not hears and not {DIVERGENCE, STANDSTILL} & state.raised.keys():
            state.raised.setdefault(CHANCE, step)
        if not state.raised and self._validation is not None and self._validation.deaf(DEAF):
            state.raised[VALIDATION] = step
        notices = [self._notice(what, step) for what in words.KINDS if what in state.raised]
        if not notices and seen is not None and seen.heard is not None and state.best < STANDS:
            learns = state.learnt - state.gained_learnt < words.PATIENCE
            notices = [words.little(step, seen, self.setup, learns)]
        return [notice._replace(at_end=True) for notice in notices]

    # ------------------------------------------------------------ what it finds

    @property
    def _seen(self) -> Seen | None:
        return None if self._state.seen is None else Seen(*self._state.seen)

    @property
    def _validation(self) -> words.Validation | None:
        return None if self._state.validation is None else words.Validation(*self._state.validation)

    def _worth(self, rate: float, most_times: float) -> float:
        """What a step at this learning rate counts for, if one at the run's peak counts for 1 in ``most_times``."""
        usual = words.USUAL_RATE
        if self.setup.schedule is not None:
            peak = min(self.setup.schedule.top()[1], self.setup.schedule.unheard or math.inf)
            usual = max(peak, min(usual, most_times * peak))
        return min(1.0, rate / usual) if usual > 0 else 0.0

    def _chance(self, step: int, seen: Seen) -> list[Notice]:
        state = self._state
        if seen.heard is None:
            return []
        if CHANCE in state.raised:
            return self._over(CHANCE, step - 1) if seen.heard >= words.HEARS else []
        if seen.heard >= words.NOTHING or state.best >= words.HEARS or state.falls_since is not None:
            return []
        never_down = not state.came_down and not self.setup.trained and state.tried >= words.PATIENCE
        if state.learnt >= words.PATIENCE or never_down:
            return self._raise(CHANCE, step - 1)
        planned = self.setup.planned
        if step <= SETTLED and planned is not None and planned < words.FEWEST:
            state.raised[CHANCE] = step - 1
            return [words.too_short(step - 1, self.setup)]
        return []

    def _standstill(self, step: int, seen: Seen) -> list[Notice]:
        state = self._state
        if STANDSTILL in state.raised:
            return self._over(STANDSTILL, step - 1) if state.gained_step > state.raised[STANDSTILL] else []
        if state.raised or seen.heard is None or not words.HEARS <= state.best < STANDS:
            return []
        if step - state.gained_step < STANDING_SHARE * (self.setup.planned or 0):
            return []
        return self._raise(STANDSTILL, step - 1) if state.learnt - state.gained_learnt >= words.PATIENCE else []

    def _divergence(self, step: int, seen: Seen) -> list[Notice]:
        state = self._state
        if DIVERGENCE in state.raised:
            return [] if self._lost(seen, BACK, SHRUNK) else self._over(DIVERGENCE, step - 1)
        if not self._lost(seen, FALLEN, GROWN):
            state.falls_since = None
            return []
        if state.falls_since is None:
            state.falls_since = step
        lasting = max(LASTING, LASTING_SHARE * step)
        return self._raise(DIVERGENCE, step - 1) if step - state.falls_since >= lasting else []

    def _lost(self, seen: Seen, share: float, times: float) -> bool:
        ceiling = self._ceiling(seen)
        return self._fallen(seen, share) or (ceiling is not None and 0 < times * ceiling < seen.loss)

    def _fallen(self, seen: Seen, share: float) -> bool:
        best, heard = self._state.best, seen.heard
        return heard is not None and best >= CLEARLY and 1 - heard > max(1 - best, LOWEST) ** (1 - share)

    def _ceiling(self, seen: Seen) -> float | None:
        """The loss of a model that hears nothing: chance if the run came down to it, else the loss at the start."""
        return seen.chance if self._state.came_down else self._state.first

    def _raise(self, what: str, step: int) -> list[Notice]:
        state = self._state
        state.raised[what] = step
        state.told[what] = state.told.get(what, 0) + 1
        return [self._notice(what, step)] if state.told[what] <= MOST_TOLD else []

    def _over(self, what: str, step: int) -> list[Notice]:
        since = self._state.raised.pop(what)
        self._state.falls_since = None
        return [words.over(what, step, since, self._seen)] if self._state.told.get(what, 0) <= MOST_TOLD else []

    def _notice(self, what: str, step: int) -> Notice:
        state, seen, validation = self._state, self._seen, self._validation
        if what == VALIDATION:
            assert validation is not None, "it was found deaf"
            return words.deaf(step, seen, validation, self.setup)
        assert seen is not None, "its loss was found bad"
        if what == CHANCE:
            return words.at_chance(step, seen, validation, self.setup)
        if what == STANDSTILL:
            return words.standstill(step, seen, state.best, state.best_step, step - state.gained_step, self.setup)
        if self._fallen(seen, BACK):
            return words.lost(step, seen, state.best, state.best_step, self.setup)
        ceiling = self._ceiling(seen)
        assert ceiling is not None, "its loss was found to be far above"
        return words.grown(step, seen, ceiling, self.setup)

    # ------------------------------------------------------------ saving

    @mark_as_saver
    def _save(self, path: str | PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump(asdict(self._state), out)

    @mark_as_loader
    def _load(self, path: str | PathLike[str], end_of_epoch: bool) -> None:
        with open(path, encoding="utf-8") as file:
            self._state = _State(**yaml.safe_load(file))
