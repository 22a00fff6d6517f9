"""Notices during training that a recogniser hears nothing, or no longer what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import yaml
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.tasks import learning_notice as words
from sbkit.tasks.hearing import Hearing
from sbkit.tasks.learning_notice import CHANCE, DIVERGENCE, HEARS, KINDS, NOTHING, VALIDATION, Notice, Seen, Setup

#: A run whose learning rate peaks below ``USUAL_RATE`` is given proportionally more steps, up to this many times.
MOST_TIMES = 3.0
#: CER in per cent from which a validation counts as having heard nothing (empty transcripts make 100), and below which
#: it has heard something again.
DEAF, HEARD_AGAIN = 95.0, 90.0
#: What is heard has fallen below the first share of its best; it is back from the second on.
FALLEN, BACK = 0.5, 0.6
#: The loss has grown beyond the first factor of its ceiling (chance, or where it began); it is back below the second.
GROWN, SHRUNK = 1.5, 1.25
#: Steps that a fall has to last: more than the twenty that the moving average spans, and in a long run a share of it.
LASTING, LASTING_SHARE = 50, 0.02
#: Steps until the moving average has settled.
SETTLED = 20


@dataclass
class _State:
    rate: float | None = None  # the highest learning rate so far
    rate_step: int = 0  # the step that first had it
    first: float | None = None  # the loss per token at the start
    came_down: bool = False  # the loss has come down to chance
    best: float = 0.0  # the most that was heard
    best_step: int = 0
    falls_since: int | None = None
    validation: list[Any] | None = None  # the last Validation
    raised: dict[str, int] = field(default_factory=dict)  # warnings that still hold, and their steps


@register_checkpoint_hooks
class LearningAlarm:
    """Watches training steps and validations, and returns notices for whoever watches the run.

    A notice is given once, again when the problem has passed, and at the end of training if it has not. It depends on
    steps alone, so it is the same on every rank and after resuming. There are three:

    - ``chance``: the loss stands at chance (see ``Hearing``) ``PATIENCE`` steps after the warm-up, which ends where the
      learning rate stops rising; proportionally later if the rate peaks below ``USUAL_RATE``, and in the first steps
      if the run is planned for fewer than ``FEWEST``.
    - ``validation``: after as many steps, nearly all transcripts of a validation are empty, or the CER is as high.
    - ``divergence``: for ``LASTING`` steps, half of what was heard is lost, or the loss is above where it began.

    part : the part of the loss that can be compared with chance; None: there is none, so that only a growing loss and
        empty transcripts are noticed
    """

    def __init__(self, part: str | None = None) -> None:
        self.setup = Setup()
        self.part = part
        self._state = _State()
        self._seen: Seen | None = None

    # ------------------------------------------------------------ what it is told

    def look(self, step: int, hearing: Hearing, rate: float | None = None) -> list[Notice]:
        """Return notices when ``step`` begins; ``hearing.at(step)`` has been called before.

        rate : the learning rate of the step; None: it is not known and taken for constant
        """
        state, loss = self._state, hearing.loss
        if rate is not None and (state.rate is None or rate > state.rate * (1 + 1e-6)):
            state.rate, state.rate_step = rate, step
        if loss is None:
            return []
        chance = hearing.chance if hearing.known else None
        heard = None if chance is None else max(0.0, 1 - loss / chance)
        self._seen = seen = Seen(step - 1, loss, chance, heard, state.rate, self._at_full_rate(step),
                                 f"{self.part or 'training'} loss")
        if state.first is None and step > SETTLED:
            state.first = loss
        if chance is not None and heard is not None:
            state.came_down |= loss <= (1 + NOTHING) * chance
            if heard > state.best and step > SETTLED:
                state.best, state.best_step = heard, step - 1
        return [*self._divergence(step, seen), *self._chance(step, seen)]

    def validated(self, step: int, empty: int, rows: int, cer: float) -> list[Notice]:
        """Return notices after a validation at ``step``, with its empty transcripts and its CER in per cent."""
        if not rows:
            return []
        found = words.Validation(step, empty, rows, float(cer))
        self._state.validation = list(found)
        if VALIDATION in self._state.raised:
            return self._over(VALIDATION, step) if not found.deaf(HEARD_AGAIN) else []
        others = {CHANCE, DIVERGENCE} & self._state.raised.keys()  # they explain it already
        if found.deaf(DEAF) and not others and self._at_full_rate(step + 1) >= self._patience():
            return self._raise(VALIDATION, step)
        return []

    def end(self, step: int) -> list[Notice]:
        """Return notices at the end of training about all that still holds, however few its steps were."""
        state, seen, notices = self._state, self._seen, []
        if seen is not None and seen.heard is not None:
            if seen.heard >= NOTHING and CHANCE in state.raised:
                notices += self._over(CHANCE, step)
            elif seen.heard < NOTHING and DIVERGENCE not in state.raised:
                state.raised.setdefault(CHANCE, step)
        if not state.raised and self._validation is not None and self._validation.deaf(DEAF):
            state.raised[VALIDATION] = step
        return [*notices, *(self._notice(what, step)._replace(at_end=True) for what in KINDS if what in state.raised)]

    # ------------------------------------------------------------ what it finds

    @property
    def _validation(self) -> words.Validation | None:
        return None if self._state.validation is None else words.Validation(*self._state.validation)

    def _at_full_rate(self, step: int) -> int:
        """Steps since the learning rate last rose, when ``step`` begins."""
        return step - max(1, self._state.rate_step)

    def _patience(self) -> float:
        rate = self._state.rate
        slower = words.USUAL_RATE / rate if rate else 1.0
        return words.PATIENCE * min(MOST_TIMES, max(1.0, slower))

    def _chance(self, step: int, seen: Seen) -> list[Notice]:
        state = self._state
        if seen.heard is None:
            return []
        if CHANCE in state.raised:
            return self._over(CHANCE, step - 1) if seen.heard >= HEARS else []
        if seen.heard >= NOTHING or state.best >= HEARS or state.falls_since is not None:
            return []
        if self._at_full_rate(step) >= self._patience():
            return self._raise(CHANCE, step - 1)
        planned = self.setup.planned
        if step <= SETTLED and planned is not None and planned < words.FEWEST:
            state.raised[CHANCE] = step - 1
            return [words.too_short(step - 1, self.setup)]
        return []

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
        return heard is not None and best >= HEARS and heard < share * best

    def _ceiling(self, seen: Seen) -> float | None:
        """The loss of a model that hears nothing: chance if the run came down to it, else the loss at the start."""
        return seen.chance if self._state.came_down else self._state.first

    def _raise(self, what: str, step: int) -> list[Notice]:
        self._state.raised[what] = step
        return [self._notice(what, step)]

    def _over(self, what: str, step: int) -> list[Notice]:
        since = self._state.raised.pop(what)
        self._state.falls_since = None
        return [words.over(what, step, since, self._seen)]

    def _notice(self, what: str, step: int) -> Notice:
        state, seen, validation = self._state, self._seen, self._validation
        if what == VALIDATION:
            assert validation is not None, "it was found deaf"
            return words.deaf(step, seen, validation, self.setup)
        assert seen is not None, "its loss was found bad"
        if what == CHANCE:
            return words.at_chance(step, seen, validation, self.setup)
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
