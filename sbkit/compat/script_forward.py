"""A script's ``compute_forward`` as a function of waveforms, run as far as one of its outputs.

What follows that output, such as a beam search or a rescoring, needs minutes and can't be traced, and the output
doesn't depend on it. So the call that makes the output is found in a whole run, and later runs end there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from speechbrain.core import Stage
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from sbkit.compat.evaluation_pass import evaluation_mode
from sbkit.compat.script_test_set import TestSet, with_signals

Brain = Any  # an sbkit.Brain
Batch = Any  # what a script's collate function makes
Result = Any  # what a script's compute_forward returns
Place = tuple[int | str, ...]
"""Where a tensor is in what ``compute_forward`` returns: indices and keys, from the outside in."""
_LOG_SOFTMAX = (torch.log_softmax, torch.Tensor.log_softmax, torch.nn.functional.log_softmax)


class Origin(NamedTuple):
    """Which call makes a tensor: the n-th, from 0, of a module, or of torch's log_softmax."""

    module: nn.Module | None
    call: int
    place: Place = ()
    """Where it is in what the module returns."""


@dataclass
class Traced:
    """What a whole ``compute_forward`` returned, and the calls that may have made it."""

    result: Result
    module_calls: list[tuple[nn.Module, object]]
    log_softmaxes: list[Tensor]

    def origin(self, tensor: Tensor) -> Origin | None:
        """Return which call made a tensor; None if it is none that can be found again."""
        for number, (module, output) in reversed(list(enumerate(self.module_calls))):  # the outermost is the last
            for place, part in tensors_in(output):
                if part is tensor:
                    earlier = [other for other, _ in self.module_calls[:number]]
                    return Origin(module, sum(other is module for other in earlier), place)
        for number, output in enumerate(self.log_softmaxes):
            if output is tensor:
                return Origin(None, number)
        return None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that were called, each once."""
        return list({id(module): module for module, _ in self.module_calls}.values())


def tensors_in(result: object, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors in what a script returned, with their places."""
    if isinstance(result, Tensor):
        yield place, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from tensors_in(value, (*place, key))
    elif isinstance(result, (tuple, list)):
        for number, value in enumerate(result):
            yield from tensors_in(value, (*place, number))
    elif is_dataclass(result) and not isinstance(result, type):
        for key, value in vars(result).items():
            yield from tensors_in(value, (*place, key))


def tensor_at(result: Result, place: Place) -> Result:
    """Return what is at a place."""
    for step in place:
        result = getattr(result, step) if isinstance(step, str) and is_dataclass(result) else result[step]
    return result


class ScriptForward:
    """Runs ``compute_forward`` on waveforms, in evaluation mode, without gradients and autocast.

    test_set : a batch gets everything but its waveforms from one of its rows
    stage : that ``compute_forward`` is given
    """

    def __init__(self, brain: Brain, test_set: TestSet, stage: Stage):
        self.brain = brain
        self.test_set = test_set
        self.stage = stage
        self._first_batch = test_set.batch(0)
        self.place: Place = ()
        self.origin: Origin | None = None

    def output_is(self, place: Place, origin: Origin | None) -> None:
        """Run only as far as this output from now on.

        origin : what makes it; None: ``compute_forward`` runs to its end
        """
        self.place = place
        self.origin = origin

    def whole(self, signals: Tensor, relative_lengths: Tensor, row: int | None = None) -> Traced:
        """Run it to its end on waveforms [B, S]; the rest of the batch is of a row of the test set."""
        calls: list[tuple[nn.Module, object]] = []

        def note(module: nn.Module, inputs: object, output: object) -> None:
            calls.append((module, output))

        mode = _LogSoftmaxes()
        handle = register_module_forward_hook(note)
        try:
            with self.evaluating(), torch.no_grad(), mode:
                result = self.brain.compute_forward(self._batch(signals, relative_lengths, row), self.stage)
        finally:
            handle.remove()
        return Traced(result, calls, mode.outputs)

    def __call__(self, signals: Tensor, relative_lengths: Tensor, row: int | None = None) -> Tensor:
        """Compute the output for waveforms [B, S]; the rest of the batch is of a row of the test set."""
        with self.evaluating(), torch.no_grad():
            return self.unguarded(self._batch(signals, relative_lengths, row))

    def traced(self, signals: Tensor, relative_lengths: Tensor) -> Tensor:
        """Compute the output as :meth:`__call__` does, for a tracer."""
        return self.unguarded(with_signals(self._first_batch, self.test_set.signal_key, signals, relative_lengths,
                                           dummies=True))

    def unguarded(self, batch: Batch) -> Tensor:
        """Compute the output for a batch, in whatever mode the layers are."""
        try:
            with _ending_at(self.origin):
                result = self.brain.compute_forward(batch, self.stage)
        except _Made as made:
            return made.tensor
        output: Tensor = tensor_at(result, self.place)
        return output

    def _batch(self, signals: Tensor, relative_lengths: Tensor, row: int | None) -> Batch:
        batch = self._first_batch if row is None else self.test_set.batch(row)
        return with_signals(batch, self.test_set.signal_key, signals, relative_lengths)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch all layers to evaluation, and undo on exit what a forward changes."""
        with self.brain.restoring(), evaluation_mode(self.brain.layer_roots):
            yield


class _Made(BaseException):
    """Ends a ``compute_forward`` whose output has been made."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class _LogSoftmaxes(TorchFunctionMode):
    """Notes what torch's log_softmax returns.

    ends_with : the call, counted from 0, that ends the forward; None: none does
    """

    def __init__(self, ends_with: int | None = None):
        super().__init__()
        self.outputs: list[Tensor] = []
        self.ends_with = ends_with

    def __torch_function__(self, func: Callable[..., Result], types: object, args: tuple[object, ...] = (),
                           kwargs: dict[str, object] | None = None) -> Result:
        output = func(*args, **(kwargs or {}))
        if func in _LOG_SOFTMAX:
            self.outputs.append(output)
            if self.ends_with is not None and len(self.outputs) == self.ends_with + 1:
                raise _Made(output)
        return output


@contextlib.contextmanager
def _ending_at(origin: Origin | None) -> Iterator[None]:
    """Raise ``_Made`` inside this context when a call has returned; None: never."""
    if origin is None:
        yield
    elif origin.module is None:
        with _LogSoftmaxes(origin.call):
            yield
    else:
        with _ending_after(origin.module, origin):
            yield


@contextlib.contextmanager
def _ending_after(module: nn.Module, origin: Origin) -> Iterator[None]:
    """Have a call of a module raise ``_Made`` to its caller.

    It is the class that does so, and not a hook: a tracer that has entered the module must leave it first.
    """
    kind = type(module)
    calls = 0

    def call(self: nn.Module, *args: object, **kwargs: object) -> Result:
        nonlocal calls
        output = kind.__call__(self, *args, **kwargs)
        if calls == origin.call:
            raise _Made(tensor_at(output, origin.place))
        calls += 1
        return output

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    try:
        yield
    finally:
        module.__class__ = kind
