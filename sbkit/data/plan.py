"""The plan of an epoch: which utterances are in which optimizer step, derived from durations and labels alone.

The steps depend only on (durations, their rounding, labels, batching, epoch). Ranks, workers and micro-batches decide
who computes which part of a step, never what is in it, so a run on eight GPUs with accumulation takes the same
optimizer steps as a run on one. Step N is found without going through the steps before it, so resuming costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import numpy as np

from sbkit.data.buckets import Buckets
from sbkit.data.epoch_plan import EpochPlan, MicroBatchLimits
from sbkit.data.label_sampler import LabelSampler
from sbkit.data.part_sampler import Parts
from sbkit.data.shapes import Shape, Shapes, choose_shapes
from sbkit.errors import SbkitError
from sbkit.system.schema import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, Nullable, Number, require

if TYPE_CHECKING:
    from sbkit.data.augment import Augment
    from sbkit.data.columns import BatchColumns
    from sbkit.data.manifest import Manifest

#: Batches are padded to multiples of these seconds, so that shapes recur. On a CPU oneDNN generates code for each new
#: number of frames (in bf16 20 ms per step, and memory), and on a GPU ``--compile`` records each shape. Without it,
#: cuDNN and cuFFT make a plan for each new shape within a few milliseconds, so half of the rounding is enough there:
#: with lengths as in Common Voice it pads 1.4 %, and 155 of 3,900 batches per epoch have a new shape instead of 3,500.
ROUND_SECONDS = 0.32
GPU_ROUND_SECONDS = 0.16
#: Lengths below this number of units are rounded to multiples of a half, a quarter and so on: at most 12 % of padding,
#: and this many more shapes each time the length is halved.
UNITS = 8
Length = TypeVar("Length", float, np.ndarray)
if TYPE_CHECKING:
    Seconds: TypeAlias = float
else:
    Seconds = float | Literal["auto"]  # what a recipe may give; it is a number from then on


@dataclass
class Batching:
    """How utterances are grouped into micro-batches and optimizer steps; the ``batching`` of a recipe.

    max_batch_seconds: size of a micro-batch, which one device holds at once, in seconds including padding; ``auto``:
        what fits, at most ``step_seconds`` or what the longest utterances need. A run measures it before its first
        step, like ``sbkit tune``, and keeps it.
    step_seconds: audio of one optimizer update over all devices and micro-batches, in seconds including
        padding; ``null``: as much as ``max_batch_seconds``.
    buckets: number of groups of similar duration, from which steps are drawn, at most 200; ``null``: the number with
        the least cost of padding and incomplete steps, or more if padding exceeds 2 %.
    max_batch_utterances: a second limit on a micro-batch; ``null``: none.
    min_batch_utterances: the least utterances of a micro-batch, such as 2 for BatchNorm on one vector per utterance.
    clips_per: ``{speaker: 4}`` draws each step as 4 clips of each of several speakers, or of another column's values:
        as many speakers as ``step_seconds`` holds if all clips are as long as the longest (with ``Crop`` they are). A
        micro-batch has all 4 or none. Speakers with fewer clips are left out, and in each epoch also some clips of the
        others that don't fill a step.
    seed: seed of the order of utterances and steps.
    sort: with ``ascending`` or ``descending``, the first epoch (epoch 1) is ordered by duration and later
        ones are shuffled; with ``null`` or ``random``, all epochs are shuffled.
    min_steps: minimum number of optimizer steps of a run: if ``number_of_epochs`` have fewer, each epoch goes through
        the corpus several times. A recogniser needs a few hundred before it recognises anything; 0: no minimum.
    round_seconds: batches are padded to a multiple of it, as far as ``max_batch_seconds`` allows, so that shapes recur;
        0: no rounding; ``null``: 0.32 on a CPU and with ``--compile``, else 0.16.
    pad_to_shapes: whether a micro-batch is padded to one of at most 32 shapes (rows, samples, tokens), with rows that
        count nowhere; it may then have 5 % more than ``max_batch_seconds``. ``null``: on a GPU with ``graphs``, if the
        task and its layers allow it, and buckets aren't so wide that much more is computed.
    """

    max_batch_seconds: Seconds
    step_seconds: float | None = None
    buckets: int | None = None
    max_batch_utterances: int | None = None
    min_batch_utterances: int = 1
    clips_per: Mapping[str, int] | None = None
    seed: int = 1234
    sort: str | None = None
    round_seconds: float | None = None
    min_steps: int = 0
    pad_to_shapes: bool | None = None

    def __post_init__(self) -> None:
        self.auto = str(self.max_batch_seconds) == "auto"
        """Whether a run still has to measure ``max_batch_seconds``, which is ``step_seconds`` until then."""
        if self.auto:
            if self.step_seconds is None:
                raise SbkitError("impossible-batching", "batching: max_batch_seconds: auto needs step_seconds",
                                 hint="set step_seconds, the seconds of audio of an optimizer step: otherwise the "
                                      "result would depend on the GPU's memory", key="max_batch_seconds", value="auto")
            self.max_batch_seconds = self.step_seconds
        self._check_sizes()
        self._check_clips_per()
        self._check_numbers()
        self._check_sort()
        self._check_pad_to_shapes()
        if self.step_seconds is None:
            self.step_seconds = self.max_batch_seconds

    def _check_sizes(self) -> None:
        for name in ("max_batch_seconds", "step_seconds", "buckets", "max_batch_utterances"):
            allowed = SIZE if name in ("buckets", "max_batch_utterances") else POSITIVE
            require(f"batching: {name}", getattr(self, name),
                    allowed if name == "max_batch_seconds" else Nullable(allowed))
        require("batching: min_batch_utterances", self.min_batch_utterances, SIZE)

    def _check_clips_per(self) -> None:
        if self.clips_per is not None:
            if not isinstance(self.clips_per, Mapping) or len(self.clips_per) != 1:
                raise SbkitError("bad-value", f"batching: clips_per is {self.clips_per!r}",
                                 hint="expected a column and how many clips of each of its values, such as {speaker: "
                                      "4}", key="batching.clips_per", value=self.clips_per)
            for name, clips in self.clips_per.items():
                require(f"batching: clips_per: {name}", clips, SIZE)
            if self.buckets is not None or self.sort not in (None, "random"):
                raise SbkitError("conflicting-options", "batching: clips_per can't be combined with buckets or sort: "
                                 "it groups utterances by label, and these by duration",
                                 hint="leave out buckets and sort", key="batching.clips_per")

    def _check_numbers(self) -> None:
        require("batching: round_seconds", self.round_seconds, Nullable(NOT_NEGATIVE))
        require("batching: min_steps", self.min_steps, COUNT)
        require("batching: seed", self.seed, Number(whole=True))

    def _check_sort(self) -> None:
        if self.sort not in (None, "random", "ascending", "descending"):
            raise SbkitError("bad-value", f"batching: sort is {self.sort!r}",
                             hint="it is one of ascending, descending, random", key="batching.sort", value=self.sort)

    def _check_pad_to_shapes(self) -> None:
        if not (self.pad_to_shapes is None or isinstance(self.pad_to_shapes, bool)):
            raise SbkitError("bad-value", f"batching: pad_to_shapes is {self.pad_to_shapes!r}",
                             hint="it is true, false or null", key="batching.pad_to_shapes", value=self.pad_to_shapes)
        if self.pad_to_shapes and self.clips_per is not None:
            raise SbkitError("conflicting-options", "batching: pad_to_shapes can't be combined with clips_per, which "
                             "makes no buckets to pad",
                             hint="leave out pad_to_shapes; cropped clips have one shape anyway",
                             key="batching.pad_to_shapes")

    @property
    def clips(self) -> int:
        """The number of clips that stay together."""
        return next(iter(self.clips_per.values())) if self.clips_per else 1

    @property
    def micro_batch_limits(self) -> MicroBatchLimits:
        return MicroBatchLimits(self.max_batch_seconds, self.max_batch_utterances, self.min_batch_utterances,
                                self.clips)

    @property
    def min_capacity(self) -> int:
        """The utterances that a batch must have room for, so that any number can be cut into batches of the minimum
        size and of whole ``clips_per``."""
        return (2 * -(-self.min_batch_utterances // self.clips) - 1) * self.clips

    def most_seconds(self, longest: float) -> float:
        """The size that no micro-batch needs to exceed if utterances have at most so many seconds."""
        return max(self.max_batch_seconds, self.update_seconds, math.ceil(longest * self.min_capacity))

    @property
    def update_seconds(self) -> float:
        """``step_seconds``, which is a number after ``__post_init__``."""
        assert self.step_seconds is not None
        return self.step_seconds

    def rounding(self, device_type: str, compiled: bool = False) -> float:
        """Seconds to whose next multiple batches are padded on a device of this type."""
        if self.round_seconds is not None:
            return self.round_seconds
        return ROUND_SECONDS if device_type == "cpu" or compiled else GPU_ROUND_SECONDS


def unit_of(length: Length, unit: float) -> Length:
    """Return the unit that a length is rounded to: ``unit``, halved until ``UNITS`` of it are at most the length."""
    return unit * 2.0 ** np.minimum(0, np.floor(np.log2(length / (UNITS * unit))))


class Plan:
    """The buckets and step sizes of a corpus, from which ``epoch(e)`` makes the steps of an epoch.

    durations: ``[N]``, seconds of each utterance; the attribute ``durations`` has them rounded up.
    batching: see ``Batching``.
    ids: names of utterances for error messages.
    labels: ``[N]``, the number of each utterance's label, for ``Batching.clips_per``.
    parts: those of a mixture, see ``sbkit.data.part_sampler``.
    round_seconds: the ``Batching.rounding`` of the device. Buckets and batches are made from rounded durations, so
        that few shapes occur.
    epochs: epochs over which ``Batching.min_steps`` are spread: the number when the run began.

    An utterance longer than ``max_batch_seconds`` is an error, because it would not fit on the device.

    >>> plan = Plan([1.0, 1.2, 5.0, 5.5], Batching(max_batch_seconds=6, step_seconds=11, buckets=2))
    >>> sorted(sorted(plan.epoch(1).step(i).tolist()) for i in range(2))
    [[0, 1], [2, 3]]
    """

    def __init__(self, durations: Sequence[float] | np.ndarray, batching: Batching,
                 ids: Sequence[str] | None = None, round_seconds: float = 0.0, epochs: int | None = None,
                 labels: np.ndarray | None = None, parts: Parts | None = None):
        self.batching = batching
        self.round_seconds = round_seconds
        self.durations = np.ascontiguousarray(durations, dtype=np.float32)
        _refuse(self.durations, batching, ids)
        if labels is not None and parts is not None:
            raise SbkitError("conflicting-options", "batching: clips_per can't be used for a mixture: it groups "
                             "utterances by label, and a mixture by part",
                             hint="leave out clips_per, or train on one corpus", key="clips_per")
        if round_seconds:
            units = unit_of(self.durations, round_seconds)
            rounded = (np.ceil(self.durations / units - 1e-4) * units).astype(np.float32)
            longest = np.float32(batching.max_batch_seconds / batching.min_capacity)
            self.durations = np.maximum(self.durations, np.minimum(rounded, longest))
        seconds = batching.update_seconds
        least = batching.min_batch_utterances
        self.sampler: LabelSampler | Buckets
        if labels is None:
            self.sampler = Buckets(self.durations, seconds, batching.buckets, least, parts, batching.seed)
        else:
            # Without rounding, so that the number of labels in a step doesn't depend on the device.
            unrounded = np.asarray(durations, np.float32)
            self.sampler = LabelSampler(labels, unrounded, batching.clips_per or {}, seconds, least)
        self.edges = self.sampler.edges
        lengths = self.sampler.lengths
        self._bounds = np.concatenate([[0], np.cumsum(lengths)])
        """Where each step of a pass begins among the utterances that are drawn, and the end."""
        self.passes = 1
        """How often an epoch goes through the corpus."""
        if epochs:
            self.passes = max(1, -(-batching.min_steps // (len(lengths) * epochs)))
        self._tokens: np.ndarray | None = None  # of each utterance, if micro-batches are padded to shapes
        self._shapes: dict[int, Shapes] = {}  # by the number of ranks

    @classmethod
    def of(cls, train: Manifest, batching: Batching, augment: Augment | None, epochs: int,
           round_seconds: float = 0.0, columns: BatchColumns | None = None) -> Plan:
        """Make the plan of a run, with the durations that ``augment`` and the signals of ``columns`` may lead to."""
        durations = train.durations if augment is None else augment.planned(train.durations)
        durations = durations if columns is None else columns.longest(train, durations)
        labels = None
        for name in batching.clips_per or ():
            _, labels = train.column(name).numbered()
        return cls(durations, batching, ids=train.ids, round_seconds=round_seconds, epochs=epochs, labels=labels,
                   parts=Parts.of(train))

    def pad_to_shapes(self, tokens: np.ndarray | None = None, on: bool = True) -> None:
        """Let micro-batches have few shapes from now on, or not; steps stay as they are.

        tokens: ``[N]``, the number of tokens of each utterance; None: batches have none.
        """
        self._tokens = np.zeros(len(self.durations), np.int64) if tokens is None and on else tokens

    def shapes(self, world: int) -> Shapes | None:
        """The shapes of micro-batches on this many ranks; None if they aren't padded to shapes."""
        if self._tokens is None or not isinstance(self.sampler, Buckets):
            return None
        if world not in self._shapes:
            batching = self.batching
            self._shapes[world] = choose_shapes(
                self.sampler, self._tokens, world=world, least=batching.min_batch_utterances,
                max_batch_seconds=batching.max_batch_seconds, max_batch_utterances=batching.max_batch_utterances)
        return self._shapes[world]

    def _shape_of(self, place: int, world: int) -> tuple[Shape, int] | None:
        """The shape of the micro-batches of the step at a place of a pass, and their number on each rank."""
        shapes = self.shapes(world)
        if shapes is None or not isinstance(self.sampler, Buckets):
            return None
        steps_of_pass = len(self._bounds) - 1
        bucket = int(self.sampler.of_step[place % steps_of_pass])
        return shapes.of_bucket[bucket], shapes.micros[bucket]

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return self.passes * (len(self._bounds) - 1)

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of one epoch, counted from 1; every epoch, and every pass in it, is shuffled differently."""
        steps_of_pass = len(self._bounds) - 1
        utterances_of_pass = int(self._bounds[-1])
        members = []
        pass_numbers = []
        bounds = [self._bounds[:1]]
        orders = []
        for i in range(self.passes):
            number = self.passes * (epoch - 1) + 1 + i
            rng = np.random.Generator(np.random.PCG64([self.batching.seed % 2**64, number]))
            utterances, numbers = self.sampler.draw(rng, number)
            order = rng.permutation(steps_of_pass)
            if number <= 1 and self.batching.sort in ("ascending", "descending"):
                # Steps are numbered bucket by bucket, the shortest first.
                order = np.arange(steps_of_pass)
                if self.batching.sort == "descending":
                    order = order[::-1]
            members.append(utterances)
            pass_numbers.append(numbers)
            bounds.append(self._bounds[1:] + i * utterances_of_pass)
            orders.append(order + i * steps_of_pass)
        shape_of = None if self._tokens is None else self._shape_of
        return EpochPlan(self.durations, self.batching.micro_batch_limits, np.concatenate(members),
                         np.concatenate(bounds), np.concatenate(orders), pass_numbers, shape_of)

    def padded_seconds(self, world: int = 1) -> float:
        """The mean seconds of audio in a step on one of ``world`` devices, padding included, of up to 200 steps."""
        epoch = self.epoch(1)
        seconds_of_steps = []
        for i in np.unique(np.linspace(0, len(epoch) - 1, min(200, len(epoch))).round().astype(int)):
            micro_batches = epoch.share(i, 0, world)
            shape = epoch.shape(i, world)
            if shape is None:
                seconds = sum(len(rows) * float(epoch.durations[rows].max()) for rows in micro_batches if len(rows))
            else:
                seconds = len(micro_batches) * shape.rows * shape.seconds
            seconds_of_steps.append(seconds)
        return float(np.mean(seconds_of_steps))


def _refuse(durations: np.ndarray, batching: Batching, ids: Sequence[str] | None) -> None:
    """Refuse durations of which no plan can be made."""
    if not len(durations):
        raise SbkitError("no-utterances", "the training set is empty",
                         hint="prepare_report.json says what was left out")

    def some(rows: np.ndarray) -> str:
        """Name up to five rows."""
        names = [f"row {row}" if ids is None else ids[row] for row in rows[:5]]
        examples = [f"{name} ({durations[row]:.2f} s)" for name, row in zip(names, rows, strict=False)]
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        return ", ".join(examples) + more

    wrong = np.flatnonzero(~(np.isfinite(durations) & (durations > 0)))
    if len(wrong):
        raise SbkitError("damaged-preparation", f"utterances without a duration: {some(wrong)}",
                         hint="prepare the corpus again")
    long = np.flatnonzero(durations > batching.max_batch_seconds * (1 + 1e-6))
    if len(long):
        raise SbkitError("clip-too-long", "utterances are longer than max_batch_seconds "
                         f"({batching.max_batch_seconds:g} s), the audio of a whole micro-batch: {some(long)}",
                         hint="raise max_batch_seconds, or prepare with a smaller max_duration",
                         key="max_batch_seconds", value=batching.max_batch_seconds)
    min_capacity = batching.min_capacity
    if min_capacity == 1:
        return
    if len(durations) < batching.min_batch_utterances:
        raise SbkitError("impossible-batching", f"the training set has {len(durations)} utterances, but "
                         f"min_batch_utterances is {batching.min_batch_utterances}",
                         hint="lower min_batch_utterances, or add data", key="min_batch_utterances",
                         value=batching.min_batch_utterances)
    if (batching.max_batch_utterances or min_capacity) < min_capacity:
        raise SbkitError("impossible-batching", f"max_batch_utterances is {batching.max_batch_utterances}, but "
                         f"min_batch_utterances or clips_per needs {min_capacity} or more",
                         hint="raise max_batch_utterances", key="max_batch_utterances",
                         value=batching.max_batch_utterances)
    long = np.flatnonzero(min_capacity * durations > batching.max_batch_seconds * (1 + 1e-6))
    if len(long):
        raise SbkitError("impossible-batching", f"max_batch_seconds ({batching.max_batch_seconds:g} s) is too small: "
                         f"min_batch_utterances or clips_per needs room for {min_capacity} utterances, also of the "
                         f"longest: {some(long)}",
                         hint=f"raise it to {min_capacity * float(durations.max()):g}, or crop or leave out longer "
                              "ones", key="max_batch_seconds", value=batching.max_batch_seconds)
