"""Inspection of every layer while a batch is run again, to find the first value that is not finite."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from sbkit.errors import summary
from sbkit.train import rng as rng_state
from sbkit.train.forward_state import ForwardState

logger = logging.getLogger(__name__)

_MOST_GRADIENTS = 20  # names to keep; usually one bad value spoils all gradients before it


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
    def broken(self) -> int:
        return self.nan + self.inf

    @property
    def largest(self) -> float:
        return max(abs(self.low or 0.0), abs(self.high or 0.0))


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

    loss: float | None = None
    layers: list[Layer] = field(default_factory=list)
    first: int | None = None  # index in layers of the first output that is not finite
    gradient_first: str | None = None  # the layer whose output first got a gradient that is not finite
    gradients: dict[str, Values] = field(default_factory=dict)  # parameters whose gradient is not finite
    gradient_count: int = 0  # the number of such parameters
    gradient_norm: float | None = None
    parameters: dict[str, Values] = field(default_factory=dict)  # parameters that are not finite
    inputs: dict[str, Values] = field(default_factory=dict)  # tensors of the batch that are not finite
    utterance_losses: list[float] = field(default_factory=list)
    error: str | None = None  # why the run failed

    @property
    def what(self) -> str:
        """What was not finite: "loss", "gradient" or "nothing"."""
        if self.loss is not None and not math.isfinite(self.loss):
            return "loss"
        return "gradient" if self.gradient_count else "nothing"

    @property
    def first_layer(self) -> Layer | None:
        return None if self.first is None else self.layers[self.first]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Ran(NamedTuple):
    """The loss of a batch, and the loss of each utterance [B] if the task provides it."""

    total: torch.Tensor
    utterance_losses: torch.Tensor | None = None


def losses_alone(
    run: Callable[[Any], Ran],
    modules: nn.Module,
    batches: Sequence[Any],
    *,
    rng: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> list[float]:
    """Return the loss of each batch, starting from the same random state; nan for one that can't be run."""
    losses = []
    with _undisturbed(modules, device), torch.no_grad():
        for batch in batches:
            if rng is not None:
                rng_state.restore(dict(rng), device)
            try:
                losses.append(float(run(batch).total))
            except Exception as error:  # an utterance may be too short alone; the others still help
                logger.info("A batch could not be run by itself: %s", error)
                losses.append(math.nan)
    return losses


def before(found: Inspection) -> str:
    """Name what was still finite right before the first bad layer."""
    return f"the output of {found.layers[found.first - 1].name}" if found.first else "the batch"


def measure(tensor: torch.Tensor) -> Values:
    """Return the range of a tensor, and its counts of values that are not finite."""
    flat, dtype, shape = tensor.detach(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    if not flat.numel():
        return Values(dtype, shape, None, None)
    if not flat.is_floating_point():
        return Values(dtype, shape, float(flat.min()), float(flat.max()))
    finite = flat.isfinite()
    bad = int(flat.numel() - finite.sum())
    good = flat if not bad else flat[finite]
    low, high = (float(v) for v in good.float().aminmax()) if good.numel() else (None, None)
    if not bad:
        return Values(dtype, shape, low, high)
    rows = (~finite).reshape(shape[0], -1).any(1).nonzero().flatten().tolist() if len(shape) > 1 else []
    return Values(dtype, shape, low, high, int(flat.isnan().sum()), int((flat == math.inf).sum()),
                  int((flat == -math.inf).sum()), rows)


def examine(
    run: Callable[[Any], Ran],
    modules: nn.Module,
    batch: object,
    *,
    rng: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
    scale: float = 1.0,
    keep_layers: bool = False,
) -> Inspection:
    """Run a batch forward and backward and inspect it, without changing the model.

    Buffers, gradients and random generators are restored. The same computations run whatever is found, because layers
    may communicate with other ranks (synchronised normalisation).

    Arguments
    ---------
    run : computes ``Ran`` from a batch, including autocast
    modules : the modules with the layers and parameters to inspect
    rng : the random state before the batch was first run
    scale : the loss scale (fp16)
    keep_layers : keep all layers, not only those up to the first bad one
    """
    found = Inspection()
    found.inputs = {name: v for name, t in tensors_in(batch) if (v := measure(t)).bad}
    found.parameters = _bad(modules.named_parameters())
    with _undisturbed(modules, device), _eager():
        if rng is not None:
            rng_state.restore(dict(rng), device)
        with _watched(modules, found) as watch:
            try:
                loss, each = run(batch)
                found.utterance_losses = [] if each is None else each.float().tolist()
                found.loss = float(loss.detach())
                watch.forward = False
                if loss.requires_grad:
                    (loss.float() * scale).backward()
                    _look_at_gradients(modules, found, scale)
            except Exception as error:  # an error is also a finding
                found.error = summary(error)
    found.first = _first(found)
    if not keep_layers:
        found.layers = [] if found.first is None else found.layers[max(0, found.first - 3): found.first + 1]
        found.first = None if found.first is None else len(found.layers) - 1
    return found


def _first(found: Inspection) -> int | None:
    """Return the index of the first bad layer; one with only -inf counts if nothing else explains the loss."""
    broken = [i for i, layer in enumerate(found.layers) if layer.output.broken]
    if not broken and found.what == "loss":
        broken = [i for i, layer in enumerate(found.layers) if layer.output.minus_inf]
    return broken[0] if broken else None


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules without compilation inside this context, so that hooks are called."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@dataclass
class _Watch:
    forward: bool = True


@contextlib.contextmanager
def _watched(modules: nn.Module, found: Inspection) -> Iterator[_Watch]:
    """Record outputs of all modules inside this context, and the first one with a gradient that is not finite."""
    watch, handles = _Watch(), []
    calls: dict[str, int] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            if not watch.forward:  # activation checkpointing runs a forward again during backward
                return
            calls[name] = calls.get(name, 0) + 1
            results = [t for _, t in tensors_in(output)]
            if not results:
                return
            inputs = [measure(t) for _, t in tensors_in((args, kwargs)) if t.is_floating_point()]
            values = [measure(t) for t in results]
            found.layers.append(Layer(
                name, type(module).__name__, calls[name], max(inputs, key=_worst, default=None),
                max(values, key=_worst),
            ))
            for tensor in results:
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(back_for(name))
        return hook

    def back_for(name: str) -> Callable[[torch.Tensor], None]:
        def back(gradient: torch.Tensor) -> None:
            if found.gradient_first is None and not bool(gradient.isfinite().all()):
                found.gradient_first = name
        return back

    try:
        for name, module in modules.named_modules():
            if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and (
                    not hasattr(module, "_orig_mod")):
                # torch.compile inserts its own name.
                name = name.replace("_orig_mod.", "").removesuffix("._orig_mod")
                handles.append(module.register_forward_hook(hook_for(name), with_kwargs=True))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _undisturbed(modules: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Restore buffers and other statistics, gradients and random generators on exit."""
    state = ForwardState(modules)
    state.save()
    gradients = [(parameter, parameter.grad) for parameter in modules.parameters()]
    generators = rng_state.capture(device)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        state.restore()
        rng_state.restore(generators, device)


def _look_at_gradients(modules: nn.Module, found: Inspection, scale: float) -> None:
    norms = []
    for name, parameter in modules.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        values = measure(gradient)
        if values.bad:
            found.gradient_count += 1
            if len(found.gradients) < _MOST_GRADIENTS:
                found.gradients[name] = values
        norms.append(float(gradient.float().norm()))
    found.gradient_norm = math.sqrt(sum(n * n for n in norms)) / scale


def _bad(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for name, tensor in named:
        values = measure(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
        if values.bad and len(found) < _MOST_GRADIENTS:
            found[name] = values
    return found


def _worst(values: Values) -> tuple[int, float]:
    return values.bad, values.largest


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in tuples, lists, dicts and batches, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        keys = getattr(value, "_fields", None) or range(len(value))
        for key, item in zip(keys, value, strict=True):
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif is_dataclass(value) or type(value).__module__.startswith("speechbrain.dataio."):
        for key, item in vars(value).items():
            if not key.startswith("_"):
                yield from tensors_in(item, f"{path}.{key}" if path else key)
