"""Notices about a model that doesn't learn: what was seen, the probable cause, and what to try."""

from __future__ import annotations

import math
from typing import NamedTuple

from sbkit.train.schedule import Schedule

CHANCE, STANDSTILL, VALIDATION, DIVERGENCE = "chance", "standstill", "validation", "divergence"
KINDS = (DIVERGENCE, CHANCE, STANDSTILL, VALIDATION)

#: A loss counts as being at chance until it is this share below it. Without hearing anything, a model gains 3 to 4 %
#: from knowing which letters begin and end an utterance; with the first letters that it hears, 6 % and more.
NOTHING = 0.05
#: From this share on the model hears, and can lose it again. Twice ``NOTHING``, so that noise doesn't cross both.
HEARS = 2 * NOTHING
#: The flagship's runs from nothing on speech that learnt left chance after this many steps (of 10 to 30 s, on a tenth
#: of an hour to an hour, at half to three times the rate). Even a corpus of tones, one for each letter, takes 70. Of
#: runs that start from trained weights this has not been measured.
USUAL, FEWEST = (100, 230), 60
#: The peak of the learning rate that most of them had.
USUAL_RATE = 0.002
#: Steps at the usual rate until a notice. The slowest run that learnt left chance after 450 steps, which with their
#: warm-up and decay counted for some 330. One of the flagship's 1,000 steps that hears nothing is told at step 600.
PATIENCE = 400
#: The lowest and the highest peak in docs/finetune.md's table of settings with which others' runs have converged, and
#: that of hparams/ssl.yaml.
TRAINED_RATES, TRAINED_RATE = (5e-5, 1e-3), 3e-4
#: A rate is too low to learn anything from below this share of the usual one.
TOO_LOW = 0.1
#: A rate has come to the recipe's from this share on: a warm-up of a fraction of a step more never ends exactly at it.
REACHED = 0.9


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
        """Format it for the log."""
        when = "At the end of training" if self.at_end else f"Step {self.step:,}"
        first = f"{when}: {self.headline[0].lower()}{self.headline[1:]}. {self.detail}"
        if not self.advice:
            return first
        return "\n  - ".join([f"{first} What to try, the likeliest first:", *self.advice])


class Seen(NamedTuple):
    """The last known state of training, after ``step`` steps.

    loss, chance : per token; the loss of something else if chance is not known
    heard : as ``Hearing.at``; None if chance is not known
    rate : the highest learning rate that they were to have; None if it is not known
    learnt : how many they count for (see ``LearningAlarm``)
    name : of the loss
    """

    step: int
    loss: float
    chance: float | None
    heard: float | None
    rate: float | None
    learnt: float
    name: str = "training loss"

    def against_chance(self) -> str:
        """Compare the loss with chance, which is known, in words."""
        assert self.chance is not None
        side = "below" if self.loss < self.chance else "above"
        return (f"the {self.name} is {self.loss:.3g} per token, {100 * abs(1 - self.loss / self.chance):.0f} % {side} "
                f"chance ({self.chance:.3g}: guessing by how often each token comes)")


class Validation(NamedTuple):
    """A validation after ``step`` steps: empty transcripts, all of them, and the CER in per cent."""

    step: int
    empty: int
    rows: int
    cer: float

    def deaf(self, cer: float) -> bool:
        """Whether the CER, or the share of empty transcripts, is at least ``cer`` per cent."""
        return self.cer >= cer or 100 * self.empty >= cer * self.rows

    def words(self) -> str:
        """Describe it as part of a sentence."""
        if not self.empty:
            return f"the CER is {self.cer:.1f} %"
        return f"{self.empty:,} of {self.rows:,} transcripts are empty, CER {self.cer:.1f} %"


class Setup(NamedTuple):
    """The settings of a run that the advice depends on.

    averages : a moving average of the weights is validated
    max_norm : the norm at which gradients are clipped; None: they are not
    masks : features are masked from the first step on
    planned : optimizer steps of the whole run; None: they are not known
    schedule : of the learning rate, as this start of the run has it
    thaw : steps after which the last part that is frozen for some steps trains
    trained : what the weights come from, if they are trained already: pretrainer or init_from; empty: from nothing
    """

    averages: bool = False
    max_norm: float | None = None
    masks: bool = False
    planned: int | None = None
    schedule: Schedule | None = None
    thaw: int = 0
    trained: str = ""

    @property
    def more_steps(self) -> str:
        """The advice to take more steps than are planned."""
        enough = max(1000, 200 * math.ceil((self.planned or 0) / 100))
        return (f"more steps: --least_steps {enough} or more in a new run, a higher --number_of_epochs, or a smaller "
                "--step_seconds")

    @property
    def known(self) -> str:
        """What is known of the steps that runs need, as sentences."""
        if not self.trained:
            return f"{_USUAL} at a rate of {USUAL_RATE:g}."
        table = " docs/finetune.md has settings known to converge." if self.trained == "pretrainer" else ""
        return (f"It starts from trained weights ({self.trained}), and after how many steps such runs leave chance has "
                f"not been measured.{table}")

    @property
    def peak(self) -> float | None:
        """The learning rate that the recipe says."""
        return None if self.schedule is None else self.schedule.peak

    def reached(self, step: int, rate: float | None, best: float | None) -> float | None:
        """Return the highest learning rate of ``step`` steps of this schedule; ``rate`` without one.

        best : the most that was heard so far; None: nobody knows
        """
        if self.schedule is None:
            return rate
        warmup, top = self.schedule.top()
        highest = top if step >= warmup else self.schedule(step)
        return highest if best is None else min(highest, self.schedule.limit_at(best))

    def held(self, seen: Seen) -> bool:
        """Whether the learning rate stands at what it may be until something is heard."""
        unheard = None if self.schedule is None else self.schedule.unheard
        return unheard is not None and seen.rate is not None and self.peak is not None and (
            REACHED * unheard <= seen.rate <= unheard < self.peak)

    def rises(self, seen: Seen) -> bool:
        """Whether the learning rate is still in its warm-up."""
        return self.schedule is not None and seen.step < REACHED * self.schedule.top()[0] and not self.held(seen)

    def below_peak(self, seen: Seen) -> bool:
        """Whether the learning rate has not come to what the recipe says, and more steps would let it."""
        return (seen.rate is not None and self.peak is not None and seen.rate < REACHED * self.peak
                and not self.held(seen))

    def too_low(self, rate: float | None) -> bool:
        """Whether nothing can be learnt at this rate."""
        usual = TRAINED_RATES[0] if self.trained else USUAL_RATE
        return rate is not None and rate < TOO_LOW * usual


def too_short(step: int, setup: Setup) -> Notice:
    """Notice a plan of fewer steps than any run has needed."""
    headline = f"This run is planned for {setup.planned:,} steps"
    if setup.trained:
        headline += ", and hears nothing at its start"
        detail = f"From nothing, none has learnt in fewer than {FEWEST}. {setup.known}"
    else:
        headline += ", too few to hear anything"
        detail = f"{_USUAL}, none in fewer than {FEWEST}."
    return Notice(CHANCE, step, headline, detail, (setup.more_steps,))


def at_chance(step: int, seen: Seen, validation: Validation | None, setup: Setup) -> Notice:
    """Notice that nothing is heard, for lack of steps or because something prevents it."""
    detail = [_sentence(seen.against_chance())]
    if validation is not None:
        detail.append(f"In the last validation (step {validation.step:,}) {validation.words()}.")
    assert seen.chance is not None, "the loss stands there"
    above, few = seen.loss > (1 + NOTHING) * seen.chance, seen.learnt < PATIENCE
    headline = "The model has heard nothing yet" if few else "The model hears nothing: its loss stands at chance"
    if above:
        headline = "The model hears nothing: its loss has not even come down to chance"
    too_low = setup.too_low(seen.rate if setup.peak is None else setup.peak)
    if above and too_low:
        advice = [_higher(seen, setup), _LABELS]
    elif setup.below_peak(seen) and (few or setup.too_low(seen.rate)):
        advice = [_until_peak(seen, setup), _LABELS]
    elif setup.rises(seen):
        advice = [_LABELS, *_masks(setup)]
    elif few:
        advice = [setup.more_steps, *_gentler(seen, setup), _LABELS]
    else:
        advice = [*_gentler(seen, setup), setup.more_steps, _LABELS]
    worth = "" if setup.trained or too_low else f", which at its learning rates count for {seen.learnt:,.0f}"
    detail.append(f"{setup.known} This one has done {seen.step:,}{worth}.")
    return Notice(CHANCE, step, headline, " ".join(detail), tuple(advice))


def standstill(step: int, seen: Seen, best: float, best_step: int, since: int, setup: Setup) -> Notice:
    """Notice that little is heard, and that it hasn't become more for ``since`` steps."""
    detail = (f"{_sentence(seen.against_chance())} In the last {since:,} steps it has hardly come lower. At its "
              f"best, after step {best_step:,}, it was {100 * best:.0f} % below; that of a run that learns comes to "
              "half of chance and less.")
    advice = [_LABELS, *_masks(setup)]
    if setup.too_low(seen.rate):
        advice.append(_higher(seen, setup))
    elif not setup.rises(seen):
        advice.append(_lower(seen, setup))
    advice.append("a larger model, such as with a higher --d_model")
    return Notice(STANDSTILL, step, "The model hears little, and has stopped learning", detail, tuple(advice))


def little(step: int, seen: Seen, setup: Setup, learns: bool) -> Notice:
    """Notice at the end of training that little was learnt; ``learns``: it was still learning then."""
    detail = f"{_sentence(seen.against_chance())} That of a run that learns comes to half of chance and less."
    rate = _higher(seen, setup) if setup.too_low(seen.rate) else _lower(seen, setup)
    advice = (setup.more_steps, rate) if learns else (rate, setup.more_steps)
    return Notice(STANDSTILL, step, "The model hears little", detail, (*advice, *_masks(setup), _LABELS))


def deaf(step: int, seen: Seen | None, validation: Validation, setup: Setup) -> Notice:
    """Notice a validation no better than empty transcripts, which training may or may not be as well."""
    detail = [f"In the validation after step {validation.step:,} {validation.words()}; empty transcripts make 100 %."]
    if seen is not None and seen.chance is not None:
        detail.append(f"In training {seen.against_chance()}.")
    if seen is None or seen.heard is None or seen.heard < HEARS:
        return Notice(VALIDATION, step, "Validation hears nothing", " ".join(detail),
                      (*_gentler(seen, setup), setup.more_steps, _LABELS))
    advice = ["compare dev with train: language, spelling and alphabet of the transcripts, sample rate, loudness",
              "listen to some clips of dev, and compare them with their transcripts (manifests/dev.csv)",
              "more training data or stronger augmentation: a model soon knows a few utterances by heart"]
    if setup.averages:
        advice.insert(0, "--ema_decay 0, or a smaller one: validation uses a moving average of the weights, which lags "
                         "behind")
    return Notice(VALIDATION, step, "Validation hears nothing, though training does", " ".join(detail), tuple(advice))


def lost(step: int, seen: Seen, best: float, best_step: int, setup: Setup) -> Notice:
    """Notice that the model has lost what it heard."""
    at_best = f"At its best, after step {best_step:,}, it was {100 * best:.0f} % below."
    detail = f"{_sentence(seen.against_chance())} {at_best}"
    return _diverged(step, "Training has diverged: the model loses what it heard", detail, seen, setup)


def grown(step: int, seen: Seen, ceiling: float, setup: Setup) -> Notice:
    """Notice a loss far above its ``ceiling``: chance, or what it was in the first steps."""
    than = f"chance is {ceiling:.3g}" if ceiling == seen.chance else f"it was {ceiling:.3g} in the first steps"
    headline = "Training has diverged: the loss grows beyond where it began"
    unit = "" if seen.chance is None else " per token"
    return _diverged(step, headline, f"It is {seen.loss:.3g}{unit}; {than}.", seen, setup)


def _diverged(step: int, headline: str, detail: str, seen: Seen, setup: Setup) -> Notice:
    clip = "gradients clipped: --max_grad_norm 1"
    if setup.max_norm:
        clip = f"gradients clipped more: --max_grad_norm {setup.max_norm / 5:.2g} (now {setup.max_norm:g})"
    return Notice(DIVERGENCE, step, headline, f"{detail} The best checkpoint by WER is kept.", (
        _lower(seen, setup), *_warmup(setup), clip, "--precision fp32, to see whether it is the arithmetic"))


def over(what: str, step: int, since: int, seen: Seen | None) -> Notice:
    """Notice that the problem of step ``since`` has passed."""
    headline = {CHANCE: "The model hears now", STANDSTILL: "The model learns again",
                VALIDATION: "Validation hears now", DIVERGENCE: "Training has recovered"}[what]
    loss = "" if seen is None or seen.chance is None else f" ({seen.against_chance()})"
    return Notice(what, step, headline, f"The warning of step {since:,} is over{loss}.", holds=False)


_USUAL = "Runs of hparams/ctc.yaml from nothing that learn leave chance after {} to {} steps".format(*USUAL)
_LABELS = ("transcripts that belong to their recordings: listen to some (manifests/train.csv), and see whether "
           "`sbkit check` finds labels that are too long for them")


def _until_peak(seen: Seen, setup: Setup) -> str:
    """The advice to let the learning rate come to what the recipe says, for lack of which it was too low."""
    schedule = setup.schedule
    assert schedule is not None, "there is a peak"
    warmup, top = schedule.top()
    come = f"the learning rate has come to {seen.rate:.2g} of {schedule.peak:g}"
    if setup.planned is not None and warmup > setup.planned:
        return (f"a shorter warm-up: --schedule.warmup 0.2, a share of the run (it takes {warmup:,.0f} steps, the "
                f"run has {setup.planned:,}, and {come})")
    why = "" if top == schedule.peak else f", since it may rise by {schedule.rise:g} a step (--schedule.rise)"
    return f"{setup.more_steps}: {come}{why}"


def _higher(seen: Seen, setup: Setup) -> str:
    if setup.trained:
        lowest, highest = TRAINED_RATES
        return (f"a higher learning rate: --lr {TRAINED_RATE:g} ({_now(seen, setup)}; others' runs from trained "
                f"encoders had {lowest:g} to {highest:g})")
    return (f"a higher learning rate: --lr {USUAL_RATE:g} ({_now(seen, setup)}; a model that is wider than that of "
            "hparams/ctc.yaml takes less)")


def _masks(setup: Setup) -> list[str]:
    wait = "masks that wait until something is heard: --spec_augment.ramp '[0.6,1.0]', or --spec_augment null"
    return [wait] if setup.masks else []


def _gentler(seen: Seen | None, setup: Setup) -> list[str]:
    below = seen is not None and (setup.below_peak(seen) or setup.held(seen))
    return [*([] if below else _warmup(setup)), _lower(seen, setup), *_masks(setup)]


def _warmup(setup: Setup) -> list[str]:
    """The advice to take a warm-up twice as long, if the run has room for it."""
    if setup.schedule is None:
        return ["a longer warm-up of the learning rate"]
    steps = max(150, 2 * round(setup.schedule.top()[0]))
    fits = setup.planned is None or steps <= setup.planned
    return [f"a longer warm-up: --schedule.warmup {steps}"] if fits else []


def _lower(seen: Seen | None, setup: Setup) -> str:
    third = "a third of the learning rate"
    if seen is None or seen.rate is None:
        return third
    key = "--schedule.unheard" if setup.held(seen) else "--lr"
    lr = "" if setup.schedule is None else f": {key} {seen.rate / 3:.2g}"
    return f"{third}{lr} ({_now(seen, setup)})"


def _now(seen: Seen, setup: Setup) -> str:
    """Say what the learning rate is, which is known."""
    if setup.schedule is None:
        return f"it is {seen.rate:.2g}"
    if setup.held(seen):
        return f"it is held at {seen.rate:.2g} until something is heard"
    return f"it has come to {seen.rate:.2g} of {setup.peak:.2g}" if setup.below_peak(seen) else (
        f"its peak is {seen.rate:.2g}")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
