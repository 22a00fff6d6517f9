"""A batch that is run again, to find the first layer, gradient and utterances that are not finite, and why."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import speechbrain as sb
import torch
from speechbrain.core import Stage
from torch import nn

from sbkit.errors import summary
from sbkit.train import rng as rng_state
from sbkit.train.batches import MicroBatch, rows, tensors_in, utterance_ids
from sbkit.train.distributed import ranks
from sbkit.train.forward_state import ForwardState
from sbkit.train.precision import losses_in_fp32
from sbkit.train.step import Loss

logger = logging.getLogger(__name__)

_NEAR_HALF_MAX = 1e4  # the largest fp16 is 65504, and sums of such values exceed it
_GROWN = 1e6  # activations of a healthy model stay far below


class KeptBatch(NamedTuple):
    """A micro-batch, and the state of the random generators (``rng.capture``) before it was run, if kept."""

    batch: MicroBatch
    rng: Mapping[str, torch.Tensor] | None = None


@dataclass
class Values:
    """A summary of a tensor's values; ``low`` and ``high`` are of the finite ones."""

    dtype: str
    shape: list[int]
    low: float | None
    high: float | None
    nan: int = 0
    inf: int = 0
    minus_inf: int = 0  # counted separately: a mask or a log of 0 may intend it
    rows: list[int] = field(default_factory=list)  # indices in the first dimension with a bad value

    @property
    def bad(self) -> int:
        return self.nan + self.inf + self.minus_inf

    @property
    def largest(self) -> float:
        return max(abs(self.low or 0.0), abs(self.high or 0.0))

    def wrong(self) -> str:
        """Describe the values that are not finite: "12 nan and 3 inf of 4096 values, float16"."""
        named = [(self.nan, "nan"), (self.inf, "inf"), (self.minus_inf, "-inf")]
        counts = " and ".join(f"{count} {name}" for count, name in named if count)
        return f"{counts} of {math.prod(self.shape)} values, {self.dtype}"


def measure(tensor: torch.Tensor) -> Values:
    """Return the range of a tensor, and its counts of values that are not finite."""
    flat, dtype, shape = tensor.detach(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    finite = flat.isfinite()
    good = flat[finite]
    low, high = (float(value) for value in good.float().aminmax()) if good.numel() else (None, None)
    if good.numel() == flat.numel():
        return Values(dtype, shape, low, high)
    bad_rows = (~finite).reshape(shape[0], -1).any(1).nonzero().flatten().tolist() if len(shape) > 1 else []
    return Values(dtype, shape, low, high, int(flat.isnan().sum()), int((flat == math.inf).sum()),
                  int((flat == -math.inf).sum()), bad_rows)


@dataclass
class Layer:
    """The input and output of one call of a module."""

    name: str
    kind: str
    call: int
    inputs: Values | None
    output: Values


@dataclass
class Inspection:
    """The result of running a batch again."""

    ids: list[str]
    inputs: dict[str, Values]
    """Tensors of the batch that are not finite."""
    parameters: list[str]
    """Parameters that are not finite."""
    loss: float | None = None
    layers: list[Layer] = field(default_factory=list)
    gradient_first: str | None = None
    """The layer whose output first got a gradient that is not finite."""
    gradients: list[str] = field(default_factory=list)
    """Parameters whose gradient is not finite."""
    utterance_losses: list[float] = field(default_factory=list)
    """Of each utterance run alone, if the loss is not finite."""
    error: str | None = None
    """Why the run failed."""

    @property
    def what(self) -> str:
        """What was not finite: "loss", "gradient" or "nothing"."""
        if self.loss is not None and not math.isfinite(self.loss):
            return "loss"
        return "gradient" if self.gradients else "nothing"

    @property
    def first(self) -> int | None:
        """The index of the first bad layer; one with only -inf counts if nothing else explains the loss."""
        bad = [i for i, layer in enumerate(self.layers) if layer.output.nan + layer.output.inf]
        if not bad and self.what == "loss":
            bad = [i for i, layer in enumerate(self.layers) if layer.output.bad]
        return bad[0] if bad else None

    @property
    def bad_ids(self) -> list[str]:
        """The ids of utterances with values that are not finite, as far as known."""
        found = {row for values in self.inputs.values() for row in values.rows}
        found.update(i for i, loss in enumerate(self.utterance_losses) if not math.isfinite(loss))
        if not found and self.first is not None:
            output = self.layers[self.first].output
            found.update(output.rows if output.shape[:1] == [len(self.ids)] else [])
        return [self.ids[i] for i in sorted(found) if i < len(self.ids)]

    def where(self) -> str:
        """Describe in one line where values are not finite."""
        if self.first is not None:
            layer = self.layers[self.first]
            source = ""
            if layer.inputs is not None and layer.inputs.bad and not self.inputs:
                before = f"the output of {self.layers[self.first - 1].name}" if self.first else "the batch"
                source = f"; its input is not finite either, although {before} is"
            elif layer.inputs is not None:
                source = f", from an input {layer.inputs.dtype} of at most {layer.inputs.largest:.3g}"
            return (f"the first layer whose output is not finite is {layer.name} ({layer.kind}, call "
                    f"{layer.call}): {layer.output.wrong()}{source}")
        if self.error:
            return f"running the batch again ended with {self.error}"
        if self.what == "loss":
            return f"every layer's output is finite, but the loss is {self.loss}"
        if self.what == "gradient":
            first = (f"; in backward, the first such gradient is at the output of {self.gradient_first}"
                     if self.gradient_first else "")
            more = ", ..." if len(self.gradients) > 4 else ""
            return (f"the loss is {self.loss:.4g}, but the gradients of {len(self.gradients)} parameters are "
                    f"not finite ({', '.join(self.gradients[:4])}{more}){first}")
        return f"when run again, everything was finite (loss {self.loss:.4g})"

    def cause(self, scale: float) -> str:
        """Return what probably happened and what to do, if known; ``scale``: the loss scale of fp16."""
        layer = None if self.first is None else self.layers[self.first]
        if self.inputs:
            return (f"the batch itself is damaged: {', '.join(map(repr, self.inputs))} holds values that are not "
                    "finite; check those recordings")
        if self.parameters:
            return (f"parameters are already not finite ({', '.join(self.parameters[:4])}), because of an earlier "
                    "update; resume from an older checkpoint with a lower learning rate or gradient clipping")
        if layer is not None and layer.inputs is not None and layer.inputs.bad:
            return ("an operation outside of layers: a division by 0, a log or root of 0, or a mask that "
                    "hides everything")
        largest = 0.0 if layer is None or layer.inputs is None else max(layer.inputs.largest, layer.output.largest)
        if layer is not None and layer.output.dtype == "float16" and largest > _NEAR_HALF_MAX:
            return f"fp16 overflow: values reach {largest:.3g}, and the largest fp16 is 65504; use --precision bf16"
        if largest > _GROWN:
            return f"activations have grown to {largest:.3g}: lower the learning rate or warm up for longer"
        if layer is None and self.what == "loss":
            return ("the loss computation: too few frames for the labels (`sbkit check` lists such utterances), a "
                    "label of probability 0, the log of 0 or a division by 0")
        if self.gradient_first is not None and scale > 1:
            return (f"the loss scale of {scale:.6g} is too high for fp16; this is normal at first, since it halves by "
                    "itself; if it continues, use --precision bf16")
        if self.gradient_first is not None:
            return (f"the output of {self.gradient_first} goes into a square root, norm, log or division at 0: its "
                    "value is finite, but its gradient is not; add a small epsilon there")
        if self.what == "nothing":
            return "" if self.error else (
                "it could not be reproduced: the weights have changed since, or an operation is not deterministic; "
                "if it happens again, try --precision fp32 and a lower learning rate")
        return "training diverged: lower the learning rate, warm up for longer, or clip gradients"


def examine(brain: sb.Brain, kept: KeptBatch, step: int, scale: float = 1.0) -> Inspection:
    """Run a batch forward and backward as in training, but without DDP, and inspect it.

    Nothing is changed: buffers, gradients and random generators are restored. The same computations run for every
    result, because layers may communicate with other ranks (synchronised normalisation).

    step : the number of the step, from 1, on which what the Brain computes may depend
    """
    modules = brain.modules
    inputs = {name: measure(tensor) for name, tensor in tensors_in(kept.batch)}
    found = Inspection(utterance_ids(kept.batch), {name: values for name, values in inputs.items() if values.bad},
                       _not_finite(modules.named_parameters()))
    with _unchanged(brain, step), _eager():
        try:
            with _watched(modules, found):
                loss = _loss(brain, kept)
            found.loss = float(loss.detach())
            if loss.requires_grad:
                (loss.float() * scale).backward()
                found.gradients = _not_finite((name, p.grad) for name, p in modules.named_parameters())
        except Exception as error:  # an error is also a finding
            found.error = summary(error)
    return found


def run_utterances_alone(brain: sb.Brain, kept: Sequence[KeptBatch], found: Sequence[Inspection], step: int) -> None:
    """Compute ``utterance_losses`` of batches whose loss is not finite; all ranks must call it.

    Layers may communicate with other ranks, so all run as many utterances.
    """
    alone = [(batch, one.utterance_losses, row) for batch, one in zip(kept, found, strict=True)
             if one.what == "loss" and not one.inputs and not one.error for row in range(len(one.ids))]
    others = max(ranks.gather_objects(len(alone))) - len(alone)
    with _unchanged(brain, step) as state:
        for batch, losses, row in [*alone, *((kept[0], [], 0) for _ in range(others))]:
            losses.append(_loss_alone(brain, batch, row))
            state.restore()  # so that its statistics don't affect the other utterances
            state.save()


def _loss(brain: sb.Brain, kept: KeptBatch) -> torch.Tensor:
    if kept.rng is not None:
        rng_state.restore(dict(kept.rng), brain.device)
    with brain.training_ctx:
        predictions = losses_in_fp32(brain.compute_forward(kept.batch, Stage.TRAIN), brain.training_ctx)
        loss = brain.compute_objectives(predictions, kept.batch, Stage.TRAIN)
    return loss.total if isinstance(loss, Loss) else loss


@torch.no_grad()
def _loss_alone(brain: sb.Brain, kept: KeptBatch, row: int) -> float:
    """Return the loss of one utterance, with its padding, from the same random state; nan if it can't be run."""
    try:
        return float(_loss(brain, kept._replace(batch=rows(kept.batch, row, row + 1))))
    except Exception as error:  # an utterance may be too short alone; the others still help
        logger.info("Utterance %d of the batch could not be run by itself: %s", row, error)
        return math.nan


@contextlib.contextmanager
def _unchanged(brain: sb.Brain, step: int) -> Iterator[ForwardState]:
    """Go to a step inside this context; restore statistics, gradients and random generators on exit."""
    state = ForwardState(brain.modules)
    state.save()
    gradients = [(parameter, parameter.grad) for parameter in brain.modules.parameters()]
    generators = rng_state.capture(brain.device)
    now, brain.optimizer_step = brain.optimizer_step, step - 1
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        # Gradients must not be averaged over ranks.
        with torch.enable_grad(), brain.no_sync():
            yield state
    finally:
        brain.optimizer_step = now
        for parameter, gradient in gradients:
            parameter.grad = gradient
        state.restore()
        rng_state.restore(generators, brain.device)


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules without compilation inside this context, so that hooks are called."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _watched(modules: nn.Module, found: Inspection) -> Iterator[None]:
    """Record outputs of all modules inside this context, and later the first one with a bad gradient.

    Backward is outside of it, where activation checkpointing runs a forward again.
    """
    calls: dict[str, int] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            calls[name] = calls.get(name, 0) + 1
            results = [tensor for _, tensor in tensors_in(output)]
            if not results:
                return
            inputs = [measure(t) for _, t in tensors_in((args, kwargs)) if t.is_floating_point()]
            found.layers.append(Layer(name, type(module).__name__, calls[name], _worst(inputs) if inputs else None,
                                      _worst([measure(tensor) for tensor in results])))
            for tensor in results:
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(lambda gradient: note(name, gradient))
        return hook

    def note(name: str, gradient: torch.Tensor) -> None:
        if found.gradient_first is None and not bool(gradient.isfinite().all()):
            found.gradient_first = name

    handles = []
    for name, module in modules.named_modules():
        if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not hasattr(module, "_orig_mod"):
            name = name.replace("_orig_mod.", "").removesuffix("._orig_mod")  # which torch.compile inserts
            handles.append(module.register_forward_hook(hook_for(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _worst(values: Sequence[Values]) -> Values:
    return max(values, key=lambda one: (one.bad, one.largest))


def _not_finite(named: Iterable[tuple[str, torch.Tensor | None]]) -> list[str]:
    return [name for name, tensor in named if tensor is not None and not bool(tensor.isfinite().all())]
