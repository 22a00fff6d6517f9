"""Running a batch again that was not finite, to measure each layer and find what was not finite first."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import speechbrain as sb
import torch
from torch import nn

from sbkit.data.batch import as_planned
from sbkit.errors import summary
from sbkit.train import rng
from sbkit.train.batches import KeptBatch, tensors_in, utterance_ids
from sbkit.train.forward_state import restoring


class Layer(NamedTuple):
    """The output of a layer, or another tensor of a forward; ``low`` and ``high`` are of its finite values."""

    name: str
    kind: str  # the layer's class, or "batch"
    dtype: str
    shape: list[int]
    low: float | None
    high: float | None
    nan: int
    inf: int
    minus_inf: int  # counted separately: a mask or a log of 0 may intend it
    rows: list[int]  # indices in the first dimension with a value that is not finite

    @property
    def is_bad(self) -> bool:
        """Whether it has a value that nobody intends."""
        return bool(self.nan or self.inf)


def measure(tensor: torch.Tensor, name: str, kind: str) -> Layer:
    """Return the range of a tensor, and its counts of values that are not finite."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    is_finite = values.isfinite()
    finite_values = values[is_finite]
    low = high = None
    if finite_values.numel():
        low, high = (float(value) for value in finite_values.float().aminmax())
    nan = inf = minus_inf = 0
    bad_rows: list[int] = []
    if finite_values.numel() < values.numel():
        nan = int(values.isnan().sum())
        inf = int((values == math.inf).sum())
        minus_inf = int((values == -math.inf).sum())
        if values.dim() > 1:
            bad_rows = (~is_finite).flatten(1).any(1).nonzero().flatten().tolist()
    return Layer(name, kind, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), low, high, nan, inf,
                 minus_inf, bad_rows)


@dataclasses.dataclass
class _Rerun:
    """What was measured while a batch was run again."""

    layers: list[Layer]
    bad_gradients: list[str] = dataclasses.field(default_factory=list)
    loss: float = 0.0
    error: str = ""


class Finding(NamedTuple):
    """What running a batch again has shown; a part of a report's file."""

    ids: list[str]
    """The batch's utterances."""
    bad_ids: list[str]
    """Those in which the first bad layer is not finite, as far as this is known."""
    bad: bool
    """Whether something was not finite again; never of a dummy batch, which gives no gradient."""
    where: str
    """What was not finite first, in words."""
    loss: str
    """The loss, or the error with which the forward ended."""


def examine(brain: sb.Brain, kept: KeptBatch, step: int, scale: float = 1.0) -> tuple[Finding, list[Layer]]:
    """Run a batch forward and backward as in training; return the first that is not finite, and all layers.

    Nothing is changed: buffers, gradients and random generators are restored, and no gradients are exchanged. The same
    computations run for every result, because layers may communicate with other ranks (synchronised normalisation).

    step : the number of the step, from 1, on which what the Brain computes may depend
    scale : the factor of the loss
    """
    rerun = _Rerun([measure(tensor, name or "tensor", "batch") for name, tensor in tensors_in(kept.batch)])
    steps_taken = brain.optimizer_step
    brain.optimizer_step = step - 1
    brain.write_numbers(step)
    try:
        _run_again(brain, kept, scale, rerun)
    except Exception as problem:  # an error is also a finding
        rerun.error = summary(problem)
    finally:
        brain.optimizer_step = steps_taken
        brain.write_numbers(steps_taken + 1)

    ids = utterance_ids(kept.batch)
    loss = rerun.error or f"{rerun.loss:.4g}"
    failed_again = bool(not math.isfinite(rerun.loss) or rerun.bad_gradients or rerun.error)
    if not failed_again or as_planned(kept.batch).is_dummy:
        where = f"when run again, everything was finite (loss {rerun.loss:.4g})"
        return Finding(ids, [], False, where, loss), rerun.layers
    where, bad_rows = _locate(rerun, len(ids))
    return Finding(ids, [ids[row] for row in bad_rows], True, where, loss), rerun.layers


def _run_again(brain: sb.Brain, kept: KeptBatch, scale: float, rerun: _Rerun) -> None:
    """Run a batch forward and backward, and add what is measured to ``rerun``, also if it ends with an error."""
    with (_without_compiled_layers(), restoring(brain.layer_roots, brain.device), torch.enable_grad(),
          brain.no_sync()):
        if kept.rng is not None:
            rng.restore(dict(kept.rng), brain.device)
        with _measuring_layers(brain.modules, rerun):  # not in backward, which computes checkpointed activations again
            total = brain.trainer.compute(kept.batch).loss.total
        rerun.loss = float(total.detach())
        if not total.requires_grad:
            return
        (total * scale).backward()
        for name, parameter in brain.modules.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                rerun.bad_gradients.append(name)


def _without_compiled_layers() -> contextlib.AbstractContextManager[object]:
    """Run layers as if they weren't compiled inside this context, since only then their hooks are called."""
    if "torch._dynamo" not in sys.modules:  # so nothing was compiled, and to import torch's compiler takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _measuring_layers(modules: nn.Module, rerun: _Rerun) -> Iterator[None]:
    """Add to ``rerun`` what layers compute inside this context."""
    with contextlib.ExitStack() as hooks:
        for path, module in modules.named_modules():
            if not path or isinstance(module, (nn.ModuleList, nn.ModuleDict)) or hasattr(module, "_orig_mod"):
                continue
            name = path.replace("_orig_mod.", "").removesuffix("._orig_mod")  # which torch.compile inserts
            handle = module.register_forward_hook(_measuring_hook(name, rerun), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _measuring_hook(name: str, rerun: _Rerun) -> Callable[..., None]:
    """Return a forward hook that adds a layer's output to ``rerun``, and later the gradient of it if that is bad."""
    def check_gradient(gradient: torch.Tensor) -> None:
        if not bool(gradient.isfinite().all()):
            rerun.bad_gradients.append(f"the output of {name}")

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        kind = type(module).__name__
        # Where no layer was bad so far, an operation outside of layers may have been, which the input shows.
        if not any(layer.is_bad for layer in rerun.layers):
            inputs = [measure(tensor, f"input of {name}", kind) for _, tensor in tensors_in((args, kwargs))]
            rerun.layers.extend(layer for layer in inputs if layer.is_bad)

        outputs = [tensor for _, tensor in tensors_in(output)]
        if outputs:
            measured = [measure(tensor, name, kind) for tensor in outputs]
            rerun.layers.append(max(measured, key=lambda layer: layer.nan + layer.inf + layer.minus_inf))
        for tensor in outputs:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(check_gradient)
    return hook


def _locate(rerun: _Rerun, batch_size: int) -> tuple[str, list[int]]:
    """Say what was not finite first, and in which rows of the batch, as far as this is known."""
    has_bad_loss = not math.isfinite(rerun.loss)
    # A log of 0 may be intended within a model, but not in a batch ...
    bad_layers = [layer for layer in rerun.layers if layer.is_bad or (layer.minus_inf and layer.kind == "batch")]
    if not bad_layers and has_bad_loss:  # ... unless nothing else explains the loss.
        bad_layers = [layer for layer in rerun.layers if layer.minus_inf]
    if bad_layers:
        first = bad_layers[0]
        counts = {"nan": first.nan, "inf": first.inf, "-inf": first.minus_inf}
        listed_counts = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
        where = (f"the first that is not finite is {first.name} ({first.kind}): {listed_counts} of "
                 f"{math.prod(first.shape)} values, {first.dtype}")
        has_row_for_each = first.shape[:1] == [batch_size]
        return where, first.rows if has_row_for_each else []
    if rerun.error:
        return f"running the batch again ended with {rerun.error}", []
    if has_bad_loss:
        return f"every layer's output is finite, but the loss is {rerun.loss}", []
    return (f"the loss is {rerun.loss:.4g}, but in backward the gradient of {rerun.bad_gradients[0]} is not finite",
            [])
