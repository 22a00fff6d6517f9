"""What training a recipe will need, as parameters, memory, the largest batch that fits and hours per epoch.

The memory of a step is counted while forward and backward run on fake tensors: it is that of all tensors alive at the
same time. The hours are estimated from the number of operations, unless a measurement is given.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from sbkit.data.augment import planned_seconds
from sbkit.nn.accelerate import restore
from sbkit.nn.adapters import Adapters
from sbkit.nn.pretrained import Encoder
from sbkit.recipe import flops, speed
from sbkit.recipe.batch_size import BatchSize
from sbkit.recipe.flops import FlopCounter, Kernel
from sbkit.recipe.keys import Task
from sbkit.recipe.ownership import Owned
from sbkit.recipe.patterns import flattened
from sbkit.recipe.price import GUESS_FACTOR
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.trace import Trace, build_brain
from sbkit.recipe.values import unwrapped
from sbkit.system import memory as host
from sbkit.system.console import counted, time_span

GIB = 2**30
#: Memory of common GPUs in GB, for planning without one.
SIZES = (16, 24, 40, 80, 141)
#: Share of a device's memory that a step may use; the rest is for the context, the allocator and kernels.
USABLE = 0.85
#: Workspace of cuBLAS for matrix products: 32 MiB each in the threads of forward and backward.
WORKSPACE = 64 << 20
#: A GPU's memory is allocated in blocks of this many bytes.
BLOCK = 512
#: Share of an encoder's parameters that adapters train, where the recipe has none: that of lora.yaml.
ADAPTERS = 0.02
#: Seconds of the longest utterance if the corpus sets no limit.
LONGEST = 20.0
#: Operations for which a GPU copies inputs that are not contiguous.
_COPYING = {getattr(torch.ops.aten, name) for name in (
    "native_layer_norm", "native_layer_norm_backward", "convolution", "convolution_backward", "cumsum",
    "_softmax", "_log_softmax", "_log_softmax_backward_data")}
_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Lion": 1, "Adafactor": 0}


@dataclass(frozen=True)
class BatchCost:
    """The cost of forward and backward for one micro-batch."""

    utterances: int
    seconds: float
    """The duration of each utterance."""
    memory: int
    """Peak bytes besides weights, gradients and optimizer states."""
    operations: float
    """FLOPs of training on a second of audio."""
    typical: float | None = None
    """The duration of the utterances for which that is counted, by the corpus; None: ``seconds``."""
    layers: str = ""
    """Which layers compute them."""
    kernels: Sequence[Kernel] = ()
    """The kernels of the micro-batch."""

    @property
    def batch_seconds(self) -> float:
        return self.utterances * self.seconds


@dataclass(frozen=True)
class StepMeasurement:
    """A measurement of a few real steps on a device."""

    device: str
    batch_seconds: float
    step_seconds: float
    peak_bytes: int | None = None
    planned: float | None = None
    """Seconds for a second of audio in steps as long as those of the run, if they were measured too."""
    planned_seconds: float | None = None
    """The audio of such a step."""


class MemoryCounter(FlopCounter):
    """Counts operations, and the bytes of the tensors that are alive at the same time.

    These include temporary tensors of a GPU's kernels, as far as they are known.
    """

    def __init__(self, weights: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(weights)
        self.weights = {weight.untyped_storage()._cdata for weight in weights}  # counted separately
        self.alive: dict[int, weakref.finalize[[int, int], torch.UntypedStorage]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: OpOverload, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> object:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.alive and key not in self.weights:
                size = -(-storage.nbytes() // BLOCK) * BLOCK
                self.alive[key] = weakref.finalize(storage, self._free, key, size)
                self.now += size
                self.peak = max(self.peak, self.now)
        temporary: list[torch.Tensor] = []  # tensors of these sizes
        if func._overloadpacket in _COPYING:
            temporary = [value for value in args if isinstance(value, torch.Tensor) and not _taken_as_it_is(value)]
        elif func._overloadpacket is torch.ops.aten._softmax_backward_data:
            temporary = [args[1]]  # the product of gradient and output
        self.peak = max(self.peak, self.now + sum(tensor.numel() * tensor.element_size() for tensor in temporary))
        return out

    def _free(self, key: int, size: int) -> None:
        del self.alive[key]
        self.now -= size


def _taken_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether convolutions and norms take a tensor without a copy: in either of two layouts."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def count(traced: Trace, owned: Owned, precision: str, batch_seconds: float, typical: float | None = None) -> BatchCost:
    """Count the cost of one micro-batch of the longest utterances by running it on fake tensors.

    typical : ``flops.typical_seconds`` of the corpus, if it is known
    """
    hparams = traced.built.hparams
    longest = min(longest_utterance(hparams), batch_seconds)
    utterances = max(1, int(batch_seconds / longest))
    brain = build_brain(type(traced.brain), hparams, precision="fp32" if precision == "fp32" else "bf16")
    try:
        counted = flops.run(brain, utterances, longest, MemoryCounter, gpu=True)
        if typical is not None:
            operations = flops.operations_per_second(brain, typical)
        else:
            operations = counted.operations / (utterances * longest)
        layers = flops.layer_shares(brain, counted)
    finally:
        restore(nn.ModuleDict(owned.roots))
    return BatchCost(utterances, longest, counted.peak, operations, typical, layers, counted.kernels)


def longest_utterance(hparams: Mapping[str, Any]) -> float:
    """Seconds of the longest utterance that a recipe trains on; the memory of attention grows with its square."""
    longest = getattr(hparams.get("corpus"), "max_duration", None) or LONGEST
    return float(planned_seconds(hparams.get("augment"), longest))


def update_bytes(brain: Task) -> int:
    """The bytes that an update moves: it reads and writes weights, states and averages, and reads gradients twice, for
    their norm too."""
    trained = _bytes_of(p for p in brain.modules.parameters() if p.requires_grad)
    averages = brain.keys.moving_average is not None
    return 2 * trained * (2 + states_per_parameter(vars(brain.hparams).get("opt_class")) + averages)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def states_per_parameter(opt_class: object) -> int:
    """How many numbers the optimizer stores per parameter: what its class says, or else torch's by name."""
    inner, arguments = unwrapped(opt_class)
    declared: int | None = getattr(inner, "states_per_parameter", None)
    if declared is not None:
        return declared
    name = getattr(inner, "__name__", "")
    if name == "SGD" and arguments.get("momentum"):
        return 1
    return _STATES.get(name, 2)


@dataclass(frozen=True)
class CostEstimate:
    """What a training run needs, in bytes and hours."""

    parameters: int
    frozen: int
    """The number of parameters that are never trained."""
    weights: int
    """Bytes that don't depend on the batch: weights, gradients, optimizer states, cuBLAS's work space."""
    cost: BatchCost
    hours_per_100: float | None
    """Hours of computation for 100 hours of audio; None if the speed of the device is unknown."""
    device: str
    measured: StepMeasurement | None = None
    inexact: Sequence[str] = ()
    """Why the count of memory is too high, if it is."""
    unfreezes: int = 0
    """Steps after which all temporarily frozen parts are trained; the estimate is for the time after that."""
    update: int = 0
    """Bytes that an update reads and writes."""
    full_weights: int = 0
    """``weights`` if all of a pretrained encoder trains; 0: the recipe tunes none."""
    adapter_weights: int = 0
    """``weights`` if only adapters in it train, and its head."""
    launch_seconds: float = 0.0
    """Seconds in which a GPU's host launches the kernels of a micro-batch; 0: on a CPU, and with graphs."""

    def least_step_seconds(self, audio: float, limits: speed.Speed) -> float:
        """The least time of a step on so many seconds of audio."""
        return speed.least_step_seconds(
            audio / self.cost.batch_seconds, flops.least_seconds(self.cost.kernels, limits), self.launch_seconds,
            self.update / limits.bytes)

    @property
    def step_memory(self) -> int:
        """Total bytes with the planned micro-batch."""
        return self.weights + self.cost.memory

    def largest(self, memory: float) -> float:
        """Seconds of audio, including padding, whose micro-batch fits into ``memory`` bytes."""
        return max(0.0, (USABLE * memory - self.weights) / (self.cost.memory / self.cost.batch_seconds))

    def largest_text(self, memory: float) -> str:
        """The same as text, rounded to two digits because it is an estimate."""
        value = int(self.largest(memory))
        step = 10 ** max(len(str(value)) - 2, 0)
        return f"{value // step * step} s"

    def check_fits(self, findings: Findings, batching: Node | None, tried: Sequence[BatchSize] = ()) -> None:
        """Warn of a planned micro-batch that is too large for this device, unless a trial has shown that it fits.

        batching : where the recipe builds its Batching, whose ``max_batch_seconds`` is to blame
        """
        memory = _memory_here(self.device)
        if memory is None or self.step_memory <= USABLE * memory:
            return
        if any(size.seconds >= self.cost.batch_seconds for size in tried):
            return
        written = batching.value.get("max_batch_seconds") if batching and isinstance(batching.value, dict) else None
        if written is None:
            place = Place()
            key = "max_batch_seconds"
        else:
            written = written.source or written
            place = written.place
            key = written.key
        if self.largest(memory) >= self.cost.seconds:
            hint = (f"set max_batch_seconds to {self.largest_text(memory)} or less: the optimizer steps stay the same, "
                    "with more micro-batches")
        else:
            hint = (f"not even one utterance of {self.cost.seconds:g} s fits: set a lower max_duration, "
                    "activation_checkpointing, or, for a pretrained encoder, train adapters "
                    "(docs/how-to/finetune.md#adapters)")
        findings.warning("too-large", place, key, f"a micro-batch of {self.cost.batch_seconds:g} s needs about "
                         f"{_gib(self.step_memory)}, {self.device} has {_gib(memory)}", hint)


def estimate_cost(traced: Trace, owned: Owned, device: torch.device, precision: str,
                  measured: StepMeasurement | None = None, typical: float | None = None) -> CostEstimate | None:
    """Estimate the cost of a recipe whose forward was traced; None if it can't be estimated."""
    hparams = traced.built.hparams
    batch_seconds = getattr(hparams.get("batching"), "max_batch_seconds", None)
    if not traced.complete or not isinstance(batch_seconds, (int, float)):
        return None
    parameters = list({id(p): p for root in owned.roots.values() for p in root.parameters()}.values())
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    # A gradient, the optimizer's states and a moving average.
    copies = 1 + states_per_parameter(hparams.get("opt_class")) + (traced.keys.moving_average is not None)
    state = [tensor for root in owned.roots.values() for tensor in root.state_dict().values()]
    weights = _bytes_of(state) + _bytes_of(p for p in parameters if p.requires_grad) * copies + WORKSPACE
    full_weights, adapter_weights = _weights_of_tuning(hparams, weights, _bytes_of(frozen), copies)

    cost = count(traced, owned, precision, float(batch_seconds), typical)
    launches = len(cost.kernels) if device.type == "cuda" and not traced.brain.captures_steps else 0
    freeze = hparams.get("freeze")
    thaws = [value for value in flattened(freeze).values() if value is not True] if freeze else []
    estimate = CostEstimate(
        parameters=sum(p.numel() for p in parameters), frozen=sum(p.numel() for p in frozen), weights=weights,
        cost=cost, hours_per_100=None, device=str(device), measured=measured, inexact=_inexact(hparams, owned),
        unfreezes=int(max(thaws, default=0)), update=update_bytes(traced.brain), full_weights=full_weights,
        adapter_weights=adapter_weights, launch_seconds=launches * speed.LAUNCH_MS / 1000)

    if measured is not None:
        seconds_per_second = measured.planned or measured.step_seconds / measured.batch_seconds
        return replace(estimate, hours_per_100=100 * seconds_per_second)
    limits = speed.limits_of(device, precision)
    if limits is None:
        return estimate
    audio = traced.keys.batching.update_seconds
    return replace(estimate, hours_per_100=100 * estimate.least_step_seconds(audio, limits) / audio)


def _weights_of_tuning(hparams: Mapping[str, Any], weights: int, frozen: int, copies: int) -> tuple[int, int]:
    """``weights`` if all of the recipe's pretrained encoder trained, and if only adapters in it did; 0 without one.

    What adapters keep frozen could train instead, which makes fewer errors if its gradients and states fit.

    frozen : the bytes of the parameters that aren't trained
    copies : what is stored for each trained parameter, besides it
    """
    if any(isinstance(value, Adapters) for value in hparams.values()):
        return weights + frozen * copies, weights
    tuned = _bytes_of(parameter for value in hparams.values() if isinstance(value, Encoder)
                      for parameter in value.parameters() if parameter.requires_grad)
    if not tuned:
        return 0, 0
    return weights, weights - round((1 - ADAPTERS) * tuned) * copies


def _inexact(hparams: Mapping[str, Any], owned: Owned) -> list[str]:
    """Why less memory is needed than is counted."""
    remarks = []
    if hparams.get("activation_checkpointing"):
        remarks.append("activation_checkpointing needs less memory than is counted here")
    layers = (layer for root in owned.roots.values() for layer in root.modules())
    if any(isinstance(layer, nn.RNNBase) for layer in layers):
        remarks.append("an LSTM or GRU needs less memory than is counted here: what cuDNN saves of it is unknown")
    return remarks


def section(estimate: CostEstimate, tried: Sequence[BatchSize] = (), hours: float | None = None, passes: int = 1,
            epochs: int = 1) -> Section:
    """The cost as a table of the report.

    tried : results of ``sbkit tune``
    hours : of a pass through the corpus, if it is known
    passes : how often an epoch goes through it (``Batching.min_steps``)
    epochs : of the run
    """
    cost = estimate.cost
    frozen = f", {estimate.frozen:,} of them frozen" if estimate.frozen else ""
    rows = [
        ["parameters", f"{estimate.parameters:,}{frozen}"],
        ["weights, gradients, optimizer", _gib(estimate.weights)],
        [f"a micro-batch of {cost.batch_seconds:g} s ({cost.utterances} x {cost.seconds:g} s)", _gib(cost.memory)],
        ["total", _gib(estimate.step_memory)],
    ]
    total = memory_of(estimate.device)
    if total is not None:
        rows.append([f"largest max_batch_seconds on {estimate.device}, {total / GIB:.0f} GiB",
                     estimate.largest_text(total)])
    else:
        enough = [size for size in SIZES if estimate.largest(size * 1e9) >= cost.seconds]
        by_size = ", ".join(f"{size} GB: {estimate.largest_text(size * 1e9)}" for size in enough)
        rows.append(["largest max_batch_seconds by GPU", by_size or "none"])
    device = torch.device(estimate.device).type
    rows += [[f"largest by sbkit tune with {size.gib:g} GiB on {device}", f"{size.seconds} s"] for size in tried]

    if estimate.hours_per_100 is not None:
        hours_of = {"time for 100 hours of audio": 100.0}  # by the row of the table
        if hours is not None:
            times = f", {passes} times {time_span(3600 * hours)}" if passes > 1 else ""
            hours_of = {f"time of an epoch, {time_span(3600 * hours * passes)} of audio{times}": hours * passes,
                        f"time of the run, {counted(epochs, 'epoch')}": hours * passes * epochs}
        rows += [[f"{what}, one {device}", time_span(36 * estimate.hours_per_100 * audio_hours)]
                 for what, audio_hours in hours_of.items()]
    values = {
        "parameters": estimate.parameters, "frozen": estimate.frozen, "weights_bytes": estimate.weights,
        "batch_bytes": cost.memory, "batch_seconds": cost.batch_seconds,
        "operations_per_second_of_audio": cost.operations, "step_bytes": estimate.step_memory,
        "largest_here": total and estimate.largest(total),
        "largest_max_batch_seconds": {f"{size} GB": int(estimate.largest(size * 1e9)) for size in SIZES},
        "tried_max_batch_seconds": {f"{size.gib:g} GiB": size.seconds for size in tried},
        "hours_per_100_hours": estimate.hours_per_100, "audio_hours_per_epoch": hours and hours * passes,
        "epochs": hours and epochs, "measured": estimate.measured is not None, "device": estimate.device,
        "measured_bytes": estimate.measured.peak_bytes if estimate.measured is not None else None,
        "inexact": list(estimate.inexact),
    }
    remarks = [*_remarks(estimate), *filter(None, [cost.layers])]
    if estimate.unfreezes:
        remarks.append(f"freeze: these are for the time after step {estimate.unfreezes}; before, less is needed")
    if estimate.full_weights:
        remarks.append(_advise_tuning(estimate))
    return Section("Cost", ["what", "how much"], rows, remarks, values)


def _advise_tuning(estimate: CostEstimate) -> str:
    """Say whether to train the whole encoder or adapters: the whole one unless memory says no."""
    cost = estimate.cost
    whole = replace(estimate, weights=estimate.full_weights)
    adapters = replace(estimate, weights=estimate.adapter_weights)
    utterance = cost.memory / cost.batch_seconds * cost.seconds  # others can be further micro-batches
    needs = (f"tuning needs at least {_gib((whole.weights + utterance) / USABLE)} for the whole encoder, "
             f"{_gib((adapters.weights + utterance) / USABLE)} for adapters")

    memory = _memory_here(estimate.device)
    if memory is None:
        where = f"; {_smallest_gpus(whole, adapters)}"
        advice = "where it fits, train the whole encoder, which makes fewer errors"
    else:
        where = f"; {estimate.device} has {_gib(memory)}"
        if whole.largest(memory) >= cost.seconds:
            advice = "train the whole encoder, which makes fewer errors than adapters"
        elif adapters.largest(memory) >= cost.seconds:
            advice = "train adapters, or try a lower max_duration or activation_checkpointing first"
        else:
            advice = "neither fits: a lower max_duration, activation_checkpointing, or a smaller encoder"
    return f"{needs}{where}: {advice} (docs/how-to/finetune.md#adapters)"


def _smallest_gpus(whole: CostEstimate, adapters: CostEstimate) -> str:
    """Say on which of the common GPUs tuning fits."""
    for_whole, for_adapters = ([size for size in SIZES if way.largest(size * 1e9) >= way.cost.seconds]
                               for way in (whole, adapters))
    if for_whole:
        return f"the whole encoder fits from {for_whole[0]} GB on"
    if for_adapters:
        return f"the whole encoder fits on no single GPU, adapters from {for_adapters[0]} GB on"
    return "the whole encoder fits on no single GPU, nor do adapters"


def _remarks(estimate: CostEstimate) -> list[str]:
    measured = estimate.measured
    if measured is None:
        cost = estimate.cost
        return ["memory is counted on fake tensors, and the time is a guess, perhaps off by a factor of "
                f"{GUESS_FACTOR:g} (--measure times a few steps): a second of audio takes "
                f"{speed.flops(cost.operations)} in training, in utterances of "
                f"{cost.typical or cost.seconds:.3g} s", *estimate.inexact]
    largest = "the largest micro-batch that max_batch_seconds allows"
    if measured.planned is not None and measured.planned_seconds is not None:  # the price follows from this one
        text = (f"a micro-batch of typical utterances, {measured.planned_seconds:.3g} s of audio, takes "
                f"{time_span(measured.planned * measured.planned_seconds)}")
    else:
        text = (f"{largest}, {measured.batch_seconds:.3g} s of audio, takes {time_span(measured.step_seconds)}; the "
                "times scale this to all audio")
    remarks = [f"measured on {measured.device}: {text}"]
    if measured.peak_bytes:
        remarks.append(f"measured: a peak of {_gib(measured.peak_bytes)} with {largest}")
    return remarks


def memory_of(device: str) -> int | None:
    """The bytes of memory of a GPU; None for other devices, and for GPUs that aren't available."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.device(device)).total_memory


def _memory_here(device: str) -> int | None:
    """The bytes of memory of a device here, the machine's for a CPU; None if they are unknown."""
    return host.total() if torch.device(device).type == "cpu" and host.can_bound() else memory_of(device)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
