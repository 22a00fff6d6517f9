"""What a recipe costs: parameters, memory, the largest batch that fits, hours per epoch, before anything is paid.

The memory of a step is counted while forward and backward run on stand-ins: every tensor that would be alive at
once. The time is an estimate from the operations, unless a measurement is given.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from sbkit.nn.accelerate import restore
from sbkit.recipe import flops
from sbkit.recipe.batch_size import BatchSize
from sbkit.recipe.flops import Arithmetic
from sbkit.recipe.ownership import Owned
from sbkit.recipe.parts import opened
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.speed import speed_of
from sbkit.recipe.trace import Trace, build_brain

GIB = 2**30
#: Memory of common GPUs, for who plans without one at hand.
SIZES = (16, 24, 40, 80, 141)
#: Share of a device's memory that a plan may use: the rest is the context's, the allocator's and the kernels'.
USABLE = 0.85
#: Share of the fastest matrix product that training reaches on the whole.
EFFICIENCY = 0.35
#: Seconds of the longest utterance where nobody says.
LONGEST = 20.0
_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Lion": 1, "Adafactor": 0}


@dataclass(frozen=True)
class Cost:
    """One micro-batch of a recipe, forward and backward."""

    utterances: int
    seconds: float
    """Of each of them."""
    memory: int
    """Bytes alive at once beside weights, gradients and optimizer states."""
    operations: float
    """Floating point operations."""

    @property
    def batch_seconds(self) -> float:
        return self.utterances * self.seconds


@dataclass(frozen=True)
class Measured:
    """A few real steps on a device."""

    device: str
    batch_seconds: float
    step_seconds: float
    peak_bytes: int | None = None


class _Alive(Arithmetic):
    """Counts the bytes of the tensors that live at once, too."""

    def __init__(self, weights: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(weights)
        self.known = {weight.untyped_storage()._cdata for weight in weights}  # counted apart
        self.alive: dict[int, weakref.finalize[[int, int], torch.UntypedStorage]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.alive or key in self.known:
            return
        size = storage.nbytes()
        self.alive[key] = weakref.finalize(storage, self._free, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        del self.alive[key]
        self.now -= size


def count(traced: Trace, owned: Owned, precision: str, batch_seconds: float) -> Cost:
    """Run one micro-batch of the longest utterances on stand-ins and count."""
    hparams = traced.built.hparams
    longest = min(longest_utterance(hparams), batch_seconds)
    utterances = max(1, int(batch_seconds / longest))
    brain = build_brain(type(traced.brain), hparams, precision="fp32" if precision == "fp32" else "bf16")
    try:
        counted = flops.run(brain, utterances, longest, _Alive)
    finally:
        restore(nn.ModuleDict(owned.roots))
    return Cost(utterances, longest, counted.peak, float(counted.operations))


def longest_utterance(hparams: Mapping[str, Any]) -> float:
    """Seconds: attention's memory grows with the square of it, so a bill is for the longest."""
    longest = getattr(hparams.get("corpus"), "max_duration", None) or LONGEST
    return float(longest) * getattr(hparams.get("augment"), "stretch", 1.0)  # slower speech is longer


def states_per_parameter(opt_class: Any) -> int:
    """Numbers that the optimizer keeps for each parameter."""
    given: dict[str, Any] = {}
    while isinstance(opt_class, functools.partial):
        given = {**opt_class.keywords, **given}
        opt_class = opt_class.func
    name = getattr(opt_class, "__name__", "")
    return 1 if name == "SGD" and given.get("momentum") else _STATES.get(name, 2)


@dataclass(frozen=True)
class Bill:
    """What a run needs, in bytes and hours."""

    parameters: int
    frozen: int
    """How many of them never train."""
    weights: int
    """Bytes that are there whatever the batch: weights, gradients, optimizer states."""
    cost: Cost
    hours_per_100: float | None
    """Hours of computing for 100 hours of audio; None where nobody knows the device's speed."""
    device: str
    measured: Measured | None = None
    recomputes: bool = False
    """Activations are recomputed in backward, which the count doesn't know."""
    thaws: int = 0
    """Steps after which all trains that is frozen for a while; the bill is for the time after."""

    @property
    def step_memory(self) -> int:
        """Bytes that the planned micro-batch needs in all."""
        return self.weights + self.cost.memory

    def largest(self, memory: float) -> float:
        """Seconds of audio, padding counted, that fit into ``memory`` bytes."""
        return max(0.0, (USABLE * memory - self.weights) / (self.cost.memory / self.cost.batch_seconds))

    def largest_shown(self, memory: float) -> str:
        """The same in words; two digits say enough about an estimate."""
        value = int(self.largest(memory))
        step = 10 ** max(len(str(value)) - 2, 0)
        return f"{value // step * step} s"

    def check_fits(self, findings: Findings, batching: Node | None, tried: Sequence[BatchSize] = ()) -> None:
        """Warn of a planned micro-batch that is too large for the GPU at hand, unless a trial has shown that it fits.

        batching : where the recipe builds its Batching, whose ``max_batch_seconds`` is to blame
        """
        memory = memory_of(self.device)
        if memory is None or self.step_memory <= USABLE * memory:
            return
        if any(one.seconds >= self.cost.batch_seconds for one in tried):
            return
        node = batching.value.get("max_batch_seconds") if batching and isinstance(batching.value, dict) else None
        written = node and (node.source or node)
        findings.warning(
            "too-large", written.place if written else Place(), written.key if written else "max_batch_seconds",
            f"a micro-batch of {self.cost.batch_seconds:g} s needs about {_gib(self.step_memory)}, {self.device} has "
            f"{_gib(memory)}", f"set max_batch_seconds to {self.largest_shown(memory)} or less: the optimizer's steps "
            "stay as they are, they're computed in more micro-batches")


def make(traced: Trace, owned: Owned, device: torch.device, precision: str,
         measured: Measured | None = None) -> Bill | None:
    """The bill of a recipe whose forward was traced; None where it can't be made."""
    hparams = traced.built.hparams
    batch_seconds = getattr(hparams.get("batching"), "max_batch_seconds", None)
    if not traced.complete or not isinstance(batch_seconds, (int, float)):
        return None
    parameters = {id(p): p for root in owned.roots.values() for p in root.parameters()}.values()
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    held = sum(t.numel() * t.element_size() for root in owned.roots.values() for t in root.state_dict().values())
    weights = held + trained * (1 + states_per_parameter(hparams.get("opt_class")))
    cost = count(traced, owned, precision, float(batch_seconds))
    hours: float | None
    if measured is not None:
        hours = measured.step_seconds / measured.batch_seconds * 100
    else:
        speed = speed_of(device, precision)
        hours = None if speed is None else cost.operations / cost.batch_seconds * 100 / (speed * EFFICIENCY)
    freeze = hparams.get("freeze")
    turns = [value for value in opened(freeze).values() if value is not True] if freeze else []
    return Bill(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if not p.requires_grad), weights,
                cost, hours, str(device), measured, bool(hparams.get("activation_checkpointing")),
                int(max(turns, default=0)))


def section(bill: Bill, hours: float | None, planned: float, tried: Sequence[BatchSize] = ()) -> Section:
    """The bill as a table; ``hours``: of audio in an epoch, where they're known; ``tried``: what a tuning found."""
    cost = bill.cost
    rows = [
        ["parameters", f"{bill.parameters:,}" + (f", {bill.frozen:,} of them frozen" if bill.frozen else "")],
        ["weights, gradients, optimizer", _gib(bill.weights)],
        [f"a micro-batch of {planned:g} s ({cost.utterances} x {cost.seconds:g} s)", _gib(cost.memory)],
        ["together", _gib(bill.step_memory)],
    ]
    total = memory_of(bill.device)
    if total is not None:
        rows.append([f"largest max_batch_seconds on {bill.device}, {total / GIB:.0f} GiB", bill.largest_shown(total)])
    else:
        enough = [size for size in SIZES if bill.largest(size * 1e9) >= bill.cost.seconds]
        by_size = ", ".join(f"{size} GB: {bill.largest_shown(size * 1e9)}" for size in enough)
        rows.append(["largest max_batch_seconds by GPU", by_size or "none"])
    device = torch.device(bill.device).type
    rows += [[f"the same, tried by sbkit tune with {one.gib:g} GiB on {device}", f"{one.seconds} s"] for one in tried]
    if bill.hours_per_100 is not None:
        amount = hours if hours is not None else 100.0
        what = f"hours per epoch, {hours:.1f} h of audio" if hours is not None else "hours per 100 hours of audio"
        rows.append([f"{what}, one {device}", f"{bill.hours_per_100 * amount / 100:.2f}"])
    values = {
        "parameters": bill.parameters, "frozen": bill.frozen, "weights_bytes": bill.weights, "batch_bytes": cost.memory,
        "batch_seconds": cost.batch_seconds, "operations_per_second_of_audio": cost.operations / cost.batch_seconds,
        "largest_max_batch_seconds": {f"{size} GB": int(bill.largest(size * 1e9)) for size in SIZES},
        "tried_max_batch_seconds": {f"{one.gib:g} GiB": one.seconds for one in tried},
        "hours_per_100_hours": bill.hours_per_100, "measured": bill.measured is not None, "device": bill.device,
        "measured_bytes": bill.measured.peak_bytes if bill.measured is not None else None,
    }
    return Section("The bill", ["what", "how much"], rows, _remarks(bill), values)


def _remarks(bill: Bill) -> list[str]:
    measured = bill.measured
    if measured is None:
        amount = bill.cost.operations / bill.cost.batch_seconds / 1e9
        less = ["with activation_checkpointing less memory is needed than is counted here"] if bill.recomputes else []
        return [f"memory is counted on stand-ins; the time is an estimate from {amount:.2g} GFLOP a second of audio "
                "(--measure runs a few steps)", *less, *_thawing(bill)]
    remarks = [f"measured: a step of {measured.batch_seconds:g} s of audio takes {measured.step_seconds:.2f} s on "
               f"{measured.device}"]
    if measured.peak_bytes:
        remarks.append(f"measured: {_gib(measured.peak_bytes)} at once")
    return remarks + _thawing(bill)


def _thawing(bill: Bill) -> list[str]:
    return [f"freeze: this is for the time after its {bill.thaws} steps, in which less is needed"] if bill.thaws else []


def memory_of(device: str) -> int | None:
    """Bytes of a GPU that is at hand."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.device(device)).total_memory


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
