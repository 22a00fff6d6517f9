"""The checks, beginning with those that only a card can run, what is expected of each line, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

OK, SHORT, FAILED, NOT_RUN = "as expected", "short", "failed", "not run"
#: Verdicts that are no failure: something needed is missing (two cards, a package), or a card's target on a CPU.
NOT_SHOWN, DRY_RUN = "not shown here", "dry run"
NO_VALUES = "a fake GPU can't show it"
#: Verdicts for exit code 1: a check that wasn't run proves nothing.
BAD = (FAILED, SHORT, NOT_RUN)

#: Targets: a step against stock SpeechBrain's best precision, of fine-tuning a pretrained encoder too (most of which is
#: transformers' own code on both sides), MFU of large.yaml, share of a step that waits for data. At that model's width
#: memory's bandwidth limits an H100 to 33 % MFU, fused perfectly.
STEP_RATIO, FINETUNE_RATIO, MIN_MFU, MAX_DATA_WAIT = 2.5, 1.5, 0.18, 0.02


@dataclass(frozen=True)
class Expect:
    """One expected line of the report.

    cards : how many it needs
    on_fake_gpu : whether a fake GPU can show it, which computes nothing
    """

    key: str
    what: str
    expected: str
    cards: int = 1
    on_fake_gpu: bool = False


@dataclass(frozen=True)
class Check:
    """A check, which runs in a separate process.

    function: ``module:function``, the module as seen from this package; it gets a ``Bench``
    seconds: its share of the twenty minutes
    """

    name: str
    title: str
    function: str
    seconds: float
    expects: tuple[Expect, ...]

    def not_here(self, cards: int, on_fake_gpu: bool) -> str:
        """Why none of its lines can be shown with this number of cards, which may be fake GPUs; ``""`` if one can."""
        needed = min(each.cards for each in self.expects)
        if needed > cards:
            return f"needs {needed} cards"
        return NO_VALUES if on_fake_gpu and not any(each.on_fake_gpu for each in self.expects) else ""


_STOCK = (
    Expect("step", "a step against stock SpeechBrain", f"at least {STEP_RATIO} times stock's best precision"),
    Expect("epoch", "an epoch against stock", "no slower than stock's best"),
    Expect("validation", "a validation against stock", "no slower than stock's best"),
)
_TRAINED = (
    Expect("learns", "training loss", "finite and falling, no step skipped"),
    Expect("data", "share of a step that waits for data", f"below {100 * MAX_DATA_WAIT:.0f} %"),
)

CHECKS: tuple[Check, ...] = (
    # What decides where the rest of the work goes.
    Check("step", "where a step's time goes, and steps replayed as graphs", ".step:check", 100, (
        Expect("launch", "host time of a launch", "below 20 µs"),
        *(Expect(f"{name}_{key}", f"{title}: {what}", expected) for name, title in (
            ("flagship", "the flagship, 22 x 5.52 s"), ("large", "large.yaml with CTC alone, 90 x 5.52 s"))
          for key, what, expected in (
            ("equal", "losses of captured steps", "within 0.1 % of steps without graphs"),
            ("time", "a captured step", "at most 3 ms of host, faster than without"))),
        Expect("mfu", "model FLOPs utilisation of a captured step of large.yaml", f"at least {100 * MIN_MFU:.0f} %"))),
    # In six minutes: what kernels compute, how fast the large model is, and that training converges.
    Check("kernels", "CTC kernels and sbkit's layers against their references", ".values:kernels", 40, (
        Expect("used", "CTC by sbkit's kernels", "they compile and pass their trial"),
        Expect("losses", "CTC losses of 5, 40, 130, 300 and 1023 labels", "within 1e-4 of torch's"),
        Expect("gradients", "their gradients", "within 5e-3 of torch's in fp64, of 1023 labels within 0.02"),
        Expect("fp32", "the flagship's loss and gradients with sbkit's layers, fp32", "within 1e-3 of SpeechBrain's"),
        Expect("bf16", "the same in bf16", "the loss within 2 %, gradients at most 1.25 times as far as SpeechBrain's"),
        Expect("fp16", "the same in fp16", "the loss within 2 %, gradients at most 1.25 times as far as SpeechBrain's"),
        Expect("dropout", "dropout of 10 %", "drops 9.5 to 10.5 %, scales the rest by 1/0.9"))),
    Check("large", "tools/bench/train.py with large.yaml, CTC alone", ".speed:large", 75, (
        *_STOCK, Expect("mfu", "model FLOPs utilisation of a step", f"at least {100 * MIN_MFU:.0f} %"))),
    Check("training", "sbkit train with the flagship", ".runs:flagship", 50, _TRAINED),
    Check("precisions", "sbkit train in bf16 and fp16", ".runs:precisions", 40, (
        Expect("bf16", "bf16", "loss falls, no step skipped"),
        Expect("fp16", "fp16, batches of 2000 s", "loss falls, at most 3 steps skipped, none in the last epoch"))),
    # How fast, and what communication and memory cost.
    Check("flagship", "tools/bench/train.py with the flagship", ".speed:flagship", 75, _STOCK),
    Check("attention", "attention's kernels by shape", ".values:attention", 50, (
        Expect("finite", "gradients of masked bf16 attention, without cuDNN's", "finite for 24 lengths"),
        Expect("shapes", "a new shape, with cuDNN's attention off and on", "no slower off than on"),
        Expect("heads", "the kernel for the heads of the flagship and of large.yaml", "a fused one", on_fake_gpu=True),
        Expect("rounding", "steps of new lengths, rounded to nothing, 0.32 s and 1.28 s",
               "the rounding that training chooses within 15 % of the best"))),
    Check("memory", "peak memory of a step against the estimate of sbkit check", ".speed:memory", 30, (
        Expect("flagship", "the flagship", "within 15 %", on_fake_gpu=True),
        Expect("large", "large.yaml", "within 15 %", on_fake_gpu=True))),
    Check("pair", "two cards, over NCCL", ".pair:check", 40, (
        Expect("overlap", "communication that runs beside the backward", "at least 50 %", cards=2),
        Expect("same", "training loss of an epoch on one card and on two", "within 1 %", cards=2),
        Expect("equal", "weights of both ranks", "equal in every bit", cards=2),
        Expect("fails", "one rank fails before an all-reduce", "all end within 10 s", cards=2, on_fake_gpu=True))),
    Check("finetune", "tools/bench/finetune.py with an encoder of wav2vec 2.0's base size", ".speed:finetuning", 50, (
        Expect("step", "a step of fine-tuning against SpeechBrain's wrapper and Brain",
               f"at least {FINETUNE_RATIO} times their best precision"),)),
    Check("compiled", "sbkit train compiled, and with CUDA graphs", ".runs:compiled", 175, (
        Expect("compile", "--compile", "no graph compiled after the first epoch, loss as without"),
        Expect("graphs", "--graphs true", "loss as without CUDA graphs"))),
    # What is proven without a card, too.
    Check("ship", "sbkit export, transcribe and the engine on the card", ".runs:ship", 130, (
        Expect("export", "sbkit export", "a bundle whose formats agree", on_fake_gpu=True),
        Expect("torch", "transcribe --model torch on the card", "the words of the CPU's ONNX model"),
        Expect("onnx", "transcribe --model onnx on the card", "the same"),
        Expect("threads", "compiled with reduce-overhead, asked by 32 threads", "the same words, no error"))),
    Check("joint", "sbkit train with large.yaml, unmodified", ".runs:large", 45, _TRAINED),
    Check("resume", "SIGTERM in the midst of an epoch, and the same command again", ".runs:resume", 45, (
        Expect("stops", "SIGTERM", "a checkpoint, exit code 143", on_fake_gpu=True),
        Expect("exact", "weights after resuming", "as near to those of a run never stopped as two such runs are"),
        Expect("second", "the same on cuda:1", "the same", cards=2))),
    Check("tests", "pytest -m gpu", ".runs:tests", 130, (
        Expect("tests", "all tests marked gpu", "pass", on_fake_gpu=True),)),
)


@dataclass(frozen=True)
class Observation:
    """What a check has observed for one of its lines."""

    key: str
    seen: str
    verdict: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """The result of a check, with an observation for each line."""

    check: Check
    seen: list[Observation]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    log: str = ""

    def lines(self) -> list[tuple[Expect, Observation]]:
        """Pair expectations with observations, line by line."""
        return list(zip(self.check.expects, self.seen, strict=True))

    @property
    def verdict(self) -> str:
        """The worst verdict of its lines; one that counts before one that doesn't."""
        found = {seen.verdict for seen in self.seen}
        return next(each for each in (*BAD, OK, DRY_RUN, NOT_SHOWN) if each in found)


def complete(check: Check, found: Iterable[Observation], how: str, late: bool, cards: int) -> list[Observation]:
    """Give every line a verdict, even those that the check did not reach.

    how : what ended its process early; ``""`` if nothing did
    late : whether that was its time limit
    """
    by_key = {each.key: each for each in found}

    def missing(expect: Expect) -> Observation:
        if expect.cards > cards:
            return Observation(expect.key, f"needs {expect.cards} cards", NOT_SHOWN)
        return Observation(expect.key, how or "the check ended without reporting it", NOT_RUN if late else FAILED)

    return [by_key.get(expect.key) or missing(expect) for expect in check.expects]


def without_values(check: Check, found: Iterable[Observation]) -> list[Observation]:
    """Replace the verdicts of lines that a fake GPU can't show: values and speeds mean nothing there."""
    shown = {each.key for each in check.expects if each.on_fake_gpu}
    return [each if each.key in shown else
            replace(each, verdict=NOT_SHOWN, seen=f"{NO_VALUES}: {each.seen}") for each in found]


def left_out(check: Check, why: str, verdict: str) -> Result:
    """Make the result of a check that wasn't run."""
    return Result(check, [Observation(each.key, why, verdict) for each in check.expects])


def passed(results: Sequence[Result]) -> bool:
    """Whether nothing falls short, and everything that could be run was."""
    return not any(each.verdict in BAD for result in results for each in result.seen)


def headline(results: Sequence[Result]) -> str:
    """Summarise the verdicts in one line.

    >>> kernels = Check("kernels", "", "", 1, (Expect("losses", "losses", ""), Expect("speed", "speed", "")))
    >>> headline([Result(kernels, [Observation("losses", "", OK), Observation("speed", "", SHORT)])])
    '1 of 2 as expected; short: kernels (speed)'
    """
    lines = [(result.check.name, expect.what, seen.verdict) for result in results for expect, seen in result.lines()]
    judged = [line for line in lines if line[2] not in (NOT_SHOWN, DRY_RUN)]
    words = [f"{sum(line[2] == OK for line in judged)} of {len(judged)} as expected"]
    for verdict in (SHORT, FAILED):
        named = [f"{check} ({what})" for check, what, which in lines if which == verdict]
        words += [f"{verdict}: {', '.join(named)}"] if named else []
    for verdict in (NOT_RUN, NOT_SHOWN, DRY_RUN):
        count = sum(line[2] == verdict for line in lines)
        words += [f"{count} {verdict}"] if count else []
    return "; ".join(words)
