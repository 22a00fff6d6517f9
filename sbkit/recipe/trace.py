"""Runs a training batch through the recipe's Brain on torch's fake tensors, to find shapes and mismatches.

Fake tensors have shapes, types and devices but no memory, so neither data nor a GPU is needed, and the size of the
model doesn't matter. The code is that of training: the task's ``compute_forward`` and ``compute_objectives``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from speechbrain.core import Stage
from speechbrain.nnet import attention
from speechbrain.nnet.RNN import LiGRU_Layer
from speechbrain.utils.run_opts import RunOptions
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import sbkit
from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.keys import SCRIPT, Task, TaskClass, TaskKeys, is_task
from sbkit.recipe.leftovers import FakeTensors, restored
from sbkit.recipe.parts import permanently_frozen
from sbkit.recipe.report import Section, listed
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.values import static
from sbkit.system.console import logging_disabled

#: Utterances of the batch, and seconds of each.
UTTERANCES = 2
SECONDS = 3.0
#: Methods of modules that a forward calls.
_CALLS = ("forward", "encode", "decode")
# Torch's messages about sizes that don't match.
_MISMATCHES = (
    re.compile(r"got \[\d+, (?P<given>\d+)\] X \[(?P<wanted>\d+), \d+\]"),
    re.compile(r"\(\d+x(?P<given>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"to have (?P<wanted>\d+) channels, but got (?P<given>\d+) channels"),
    re.compile(r"shape \[\*, (?P<wanted>\d+)\], but got input of size\s?\[.*?(?P<given>\d+)\]"),
)
_HOME = Path(sbkit.__file__).parent
_PYTHON = Path(sysconfig.get_paths()["stdlib"])
_OTHER_DEVICE = re.compile(r"two different devices (\S+), (\S+)|Expected all tensors to be on the same device")


class Trace:
    """The result of running a forward on fake tensors."""

    def __init__(self, built: Built) -> None:
        self.built = built
        brain = built.hparams.get("brain")
        self.task: TaskClass = brain if is_task(brain) else None
        """The class under ``brain``; None if it isn't a task, so that its requirements are unknown."""
        self.brain: Task = None
        """The recipe's Brain, None if it couldn't be built."""
        self.keys: TaskKeys = None
        """The task's keys, None if the recipe lacks some that are needed."""
        self.outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        """The class of each object of the recipe and the shape of its output, by key, in the order of the calls."""
        self.stage = "forward"
        """What ran last: the forward or the loss."""
        self.complete = False
        self.note = ""
        """Why the forward ended early, if that isn't a mistake."""
        self.unchecked: list[str] = []
        """What the task could not check, for the report's notes."""

    def shape(self, key: str) -> tuple[int, ...] | None:
        """The shape of the output of the object under a key; None if it wasn't called."""
        return self.outputs[key][1] if key in self.outputs else None


@contextlib.contextmanager
def fake_tensors(*holders: object) -> Iterator[FakeTensors]:
    """Within it, new tensors have shapes but no memory, and real weights are treated like them.

    holders : objects that may hold fake tensors afterwards, and are restored
    """
    fakes = FakeTensors()
    # Otherwise a layer of torch.compile that is called within this mode would never be compiled afterwards.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    # SpeechBrain's function caches rotary tables. Torch logs tracebacks of mismatches, which become findings here.
    with restored(fakes, attention._get_precomputed_values, *holders), logging_disabled(logging.ERROR), \
            warnings.catch_warnings(), eager, fakes.recorded(), fakes.mode, WholeSequences(), \
            mock.patch.object(LiGRU_Layer, "_ligru_cell", _ligru):
        warnings.simplefilter("ignore")
        yield fakes


T = TypeVar("T")


def on_fake_tensors(holder: Task | nn.Module, compute: Callable[[FakeTensorMode], T]) -> T:
    """Return what ``compute`` returns on fake tensors; the Brain or module, and all objects in it, are unchanged."""
    with getattr(holder, "restoring", contextlib.nullcontext)(), fake_tensors(holder) as fakes:
        result = compute(fakes.mode)
    fakes.raise_if_left()
    return result


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Within it, torch.autocast isn't switched off because there is no GPU, and nothing asks a driver."""
    with mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False), \
            mock.patch.object(torch.cuda, "is_bf16_supported", lambda *options: True):
        yield


class WholeSequences(TorchFunctionMode):
    """Computes torch's recurrent layers for all frames at once: with the same shapes, matrix products and gradients.

    One frame after another would take minutes on fake tensors, and cuDNN's and oneDNN's layers need real ones.
    """

    def __torch_function__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),  # any of torch's
                           kwargs: Mapping[str, Any] | None = None) -> object:
        if func in _CELLS:
            return _cell(_CELLS[func], *args, **(kwargs or {}))
        if func in _LAYERS:
            return _sequence(_LAYERS[func], *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# The gates of each kind.
_LAYERS = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
_CELLS = {torch.lstm_cell: 4, torch.gru_cell: 3, torch.rnn_tanh_cell: 1, torch.rnn_relu_cell: 1}


def _sequence(gates: int, input: Tensor, hx: Any, params: Sequence[Tensor],  # a state, or two of an LSTM
              has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
              batch_first: bool) -> tuple[Tensor, ...]:
    """The outputs of a stack of layers [B, T, directions x H], or [T, B, ...] as given, and their last states."""
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    directions = 2 if bidirectional else 1
    passes = num_layers * directions
    weights_per_pass = len(params) // passes
    outputs: list[Tensor] = []
    for index in range(passes):
        w_ih, w_hh, *more = params[index * weights_per_pass:(index + 1) * weights_per_pass]
        # Any states of each frame, which need gradients too, as the first ones may.
        before = (input[..., :1] + _one_value(input, states, index)).expand(*input.shape[:-1], w_hh.shape[1])
        output = _cell(gates, input, before, w_ih, w_hh, *more[:2 if has_biases else 0])
        has_projection = len(more) % 2  # of an LSTM
        outputs.append(functional.linear(output, more[-1]) if has_projection else output)
        if (index + 1) % directions == 0:
            input = torch.cat(outputs[-directions:], -1)
            if train and dropout and index + 1 < passes:
                input = functional.dropout(input, dropout)
    lasts = [output.flatten(0, -2)[:1, :1] for output in outputs]
    ends = [torch.stack([one.to(last.dtype) + last for one, last in zip(state, lasts, strict=True)])
            for state in states]
    return (input, *ends)


def _one_value(input: Tensor, states: Sequence[Tensor], index: int) -> Tensor | int:
    """A number that depends on all first states of a pass."""
    return sum(_beside(input, state)[index].flatten()[0].to(input.dtype) for state in states)


def _cell(gates: int, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor,  # a state, or that of an LSTM and its cell
          b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:  # like the state
    before, *cell = hx if isinstance(hx, (tuple, list)) else (hx,)
    projected = functional.linear(input, w_ih, b_ih) + functional.linear(_beside(input, before), w_hh, b_hh)
    first, *others = projected.chunk(gates, -1)
    state = torch.tanh(first)
    for gate in others:
        state = state * torch.sigmoid(gate)
    if not cell:
        return state
    return state, state + _beside(input, cell[0]).to(state.dtype)


def _beside(input: Tensor, state: Tensor) -> Tensor:
    """The state, if it is on the input's device, as torch's layers demand."""
    if state.device != input.device:
        raise RuntimeError("Expected all tensors to be on the same device, but the input of a recurrent layer is on "
                           f"{input.device}, and its first state on {state.device}")
    return state


def _ligru(layer: LiGRU_Layer, projected: Tensor, first: Tensor) -> Tensor:
    """The states of SpeechBrain's light GRU, which is written as a loop over frames, for all frames at once."""
    before = projected[..., :first.shape[-1]]
    candidate, gate = (projected + layer.u(before)).chunk(2, -1)
    gate = torch.sigmoid(gate)
    states: Tensor = gate * before + (1 - gate) * layer.act(candidate)
    return states


def build_brain(task: TaskClass, hparams: Mapping[str, Any], precision: str = "fp32", **more: Any) -> Task:
    """Build the Brain of a recipe, without output folder and checkpoints; ``more`` replaces values of keys."""
    values = {key: value for key, value in hparams.items()
              if key not in ("output_folder", "schedule", "precision", "grad_accumulation_factor")}
    values["freeze"] = permanently_frozen(hparams.get("freeze"))
    values.update(more)
    return task(modules=hparams["modules"], hparams=values, checkpointer=None,
                run_opts=RunOptions(device="cpu", precision=precision, overridden_args={"device", "precision"}))


def trace(built: Built, modules: Mapping[str, nn.Module], findings: Findings) -> Trace:
    """Run a training batch through the recipe's Brain on fake tensors; the first mismatch becomes a finding."""
    traced = Trace(built)
    task = traced.task
    if task is None:
        if "brain" in built.missing:
            reason = "its brain could not be built"
        elif "brain" in built.nodes:
            reason = "its brain is not a task of sbkit"
        else:
            reason = f"the recipe has no brain, so only its script knows what its parts compute; {SCRIPT}"
        traced.note = f"the forward: {reason}"
        return traced

    misfits = task.Keys.misfits(built.hparams)
    for key, message, hint, code in misfits:
        findings.error(code, built.root.place_of(key), key, message, hint)
    needed = dict.fromkeys((*task.parts, *(key for key in task.Keys.declared() if key in built.missing)))
    missing = [key for key in needed if built.hparams.get(key) is None] or [key for key, *_ in misfits]
    if missing:
        what = "of the wrong class" if misfits else "missing or not built"
        traced.note = f"the forward: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} {what}"
        return traced

    with _reporting(traced, findings), torch.no_grad():
        traced.keys = task.Keys.read(built.hparams)
        clashes = list(traced.keys.clashes())  # keys that can't be combined
        for key, message, hint, code in clashes:
            node = built.nodes.get(key, built.nodes["modules"])
            findings.error(code, node.place if key in built.nodes else Place(node.place.file), key, message, hint)
        if clashes or not task.check_parts(traced.keys, built, findings):
            return traced
        traced.brain = build_brain(task, {**built.hparams, "modules": modules}, accelerate=False)
        on_fake_tensors(traced.brain, lambda _: _run(traced, "cpu"))
    return traced


def trace_moved(before: Trace, modules: nn.ModuleDict, findings: Findings) -> Trace:
    """Repeat the forward with the modules on a fake GPU; it fails where a tensor is still on the CPU.

    modules : all that a Brain moves, on the ``meta`` device
    """
    traced = Trace(before.built)
    traced.brain = before.brain

    def run(_: FakeTensorMode) -> None:
        for layer in modules.modules():  # each once, wherever a recipe names it
            layer.to_empty(device="cuda:0", recurse=False)
        _run(traced, "cuda:0")

    with _reporting(traced, findings), torch.no_grad(), without_driver():
        on_fake_tensors(traced.brain, run)
    return traced


@contextlib.contextmanager
def _reporting(traced: Trace, findings: Findings) -> Iterator[None]:
    """Turn errors within it into findings, or into a note if they aren't mistakes."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        node, _ = _blame(error, traced.built)
        where = node.key if node else "the features"
        traced.note = (f"the {traced.stage} after {where}, which reads values of tensors on the host "
                       f"(.item() or similar){own_line(error)} or computes shapes from them; that also stalls a GPU")
    except Exception as error:  # each layer has its own errors for a shape that doesn't fit
        call = needs_real_tensors(error)
        if call is None:
            _report(error, traced, findings)
        else:
            node, _ = _blame(error, traced.built)
            traced.note = (f"the {traced.stage} from {call}{f' in {node.key}' if node else ''} on, which needs real "
                           "tensors or a driver")


def own_line(error: BaseException) -> str:
    """The innermost line of the user's own code in which an error was raised, as part of a message."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not Path(frame.filename).is_relative_to(_HOME) and "site-packages" not in frame.filename \
                and not Path(frame.filename).is_relative_to(_PYTHON):
            return f" at {Path(os.path.relpath(frame.filename))}:{frame.lineno}"
    return ""


def needs_real_tensors(error: BaseException) -> str | None:
    """The name of the call that needs real tensors or a real GPU, if that is why a run on fake tensors failed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for caller, frame in itertools.pairwise(frames):
        if frame.f_code.co_name == "run_fallback_kernel":  # torch then runs the real operation on zeros
            return str(frame.f_locals["func"].name())
        if frame.f_code.co_name == "_lazy_init" and frame.f_globals["__name__"] == "torch.cuda":
            return f"{caller.f_globals['__name__']}.{caller.f_code.co_name}"
    return str(error.func.name()) if isinstance(error, UnsupportedOperatorException) else None


def _run(traced: Trace, device: str) -> None:
    batch = traced.brain.dummy_batch(UTTERANCES, SECONDS).to(device)
    with _recording_shapes(traced):
        outputs = traced.brain.compute_forward(batch, Stage.TRAIN)
        traced.stage = "loss"
        traced.brain.compute_objectives(outputs, batch, Stage.TRAIN)
    traced.complete = True


@contextlib.contextmanager
def _recording_shapes(traced: Trace) -> Iterator[None]:
    """Within it, record the shape of the first output of each object of the recipe."""
    watched = [(key, obj) for key, obj in traced.built.hparams.items() if isinstance(obj, nn.Module)]
    patched: list[tuple[nn.Module, str]] = []
    for key, module in watched:
        for name in _CALLS:
            call = getattr(module, name, None)
            if callable(call) and name not in vars(module):
                vars(module)[name] = _recording(call, key, module, traced)
                patched.append((module, name))
    try:
        yield
    finally:
        for module, name in patched:
            del vars(module)[name]


def _recording(call: Callable[..., Any], key: str, module: nn.Module, traced: Trace) -> Callable[..., Any]:
    @functools.wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> object:
        _check_call(call, key, module, traced.task, args, kwargs)
        out = call(*args, **kwargs)
        first = out
        while isinstance(first, (tuple, list)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            traced.outputs.setdefault(key, (type(module).__name__, tuple(first.shape)))
        return out

    return recorded


# ---------------------------------------------------------------------------------------------- what went wrong


def _check_call(call: Callable[..., Any], key: str, module: nn.Module, task: TaskClass, args: tuple[Any, ...],
                   kwargs: Mapping[str, Any]) -> None:
    """Raise if a part of the recipe doesn't take its arguments; Python's own error has only their number."""
    try:
        signature = inspect.signature(call)
    except (ValueError, TypeError):  # C functions may have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        arguments = [*map(_shown, args), *(f"{name} {_shown(value)}" for name, value in kwargs.items())]
        declaration = task.Keys.declared().get(key) if task is not None else None
        if re.match(r"speechbrain\..*\.huggingface", type(module).__module__):
            hint = "hparams/finetune.yaml trains a pretrained encoder"
        else:
            hint = "wrap it in a module that takes them"
            if declaration is not None:
                hint += f"; this key is {declaration.what}"
        raise SbkitError(
            "forward",
            f"it is called with {' and '.join(arguments)}, but {type(module).__name__}.{call.__name__} takes "
            f"{listed(signature.parameters) or 'nothing'}", hint=hint, key=key) from None


def _shown(value: object) -> str:
    """The type and shape of an argument."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(['B', *map(str, value.shape[1:])])}]"


def _blame(error: BaseException, built: Built) -> tuple[Node | None, nn.Module | None]:
    """The innermost object of the recipe whose code raised an error, and the innermost layer."""
    node, layer = None, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # A call that is refused here never enters the module that it was for.
        owner = frame.f_locals.get("module" if frame.f_code is _check_call.__code__ else "self")
        if isinstance(owner, nn.Module):
            layer = owner
            node = built.origin(owner) or node
    return node, layer


def _report(error: Exception, traced: Trace, findings: Findings) -> None:
    """Report an error of the forward or the loss, at the object of the recipe that is to blame."""
    built = traced.built
    node, layer = _blame(error, built)
    if node is not None:
        place = node.place
        key = node.key
    elif traced.stage == "loss" or own_line(error):
        place = built.nodes["brain"].place
        key = "brain"
    else:
        place = Place(built.nodes["modules"].place.file)
        key = next(reversed(traced.outputs), "features")
    inside = f" (in its {type(layer).__name__})" if layer is not None and built.origin(layer) is not node else ""
    text = " ".join(str(error).split())

    if isinstance(error, SbkitError):
        findings.report(error, place, key)
        return
    if _OTHER_DEVICE.search(text):
        if not any(finding.code == "not-owned" and finding.key == key for finding in findings):  # that explains it
            findings.error("device-mismatch", place, key,
                           f"a tensor stays on the CPU while the rest is on a device{inside}",
                           "register it as a buffer, or move it in forward with .to(x.device)")
        return
    mismatch = next(filter(None, (pattern.search(text) for pattern in _MISMATCHES)), None)
    if mismatch is not None:
        _report_mismatch(int(mismatch["given"]), int(mismatch["wanted"]), inside, node, place, key, findings)
        return

    hint = "compare its arguments with the input's shape"
    if not isinstance(error, RuntimeError):  # one of the layer's texts may be misspelt
        values = {name: static(child) for name, child in _arguments(node).items()}
        texts = [f"{name} {value!r}" for name, value in values.items() if isinstance(value, str)]
        hint = f"it gets {listed(texts)}" if texts else "check its arguments"
    findings.error("forward", place, key,
                   f"the {traced.stage} fails{inside}{own_line(error)}: {type(error).__name__}: {text[:300]}", hint)


def _report_mismatch(size: int, wanted: int, inside: str, node: Node | None, place: Place, key: str,
                     findings: Findings) -> None:
    """Report an input of a wrong size, at the argument that says which size is expected, if there is one.

    node : the object that gets the input; ``place`` and ``key`` are its own, or where it is probably used
    """
    names = [name for name, child in _arguments(node).items() if static(child) == wanted and isinstance(name, str)]
    argument = next((name for name in names if "in" in name), names[0] if names else None)  # an input size, if any
    hint = f"make the layer before it output {wanted}"
    if node is not None and argument is not None:
        place = node.place_of(argument)
        key = node.key_of(argument)
        hint = f"set {argument} to {size}, or {hint}"
    findings.error("shape-mismatch", place, key,
                   f"the input has {size} values per frame, and {wanted} are expected{inside}", hint)


def _arguments(node: Node | None) -> dict[Any, Node]:
    """The named arguments of an object of the recipe."""
    return node.value if node is not None and isinstance(node.value, dict) else {}


# ---------------------------------------------------------------------------------------------- the table


def section(traced: Trace) -> Section | None:
    """The report's table of output shapes, with the task's remarks."""
    if not traced.outputs:
        return None
    rows = [[key, kind, f"[{', '.join(['B', *map(str, shape[1:])])}]"] for key, (kind, shape) in traced.outputs.items()]
    values: dict[str, Any] = {key: list(shape) for key, (_, shape) in traced.outputs.items()}
    remarks: list[str] = []
    if traced.complete:
        remarks, facts = traced.brain.describe()
        values |= facts
    return Section("Shapes", ["key", "class", "output"], rows,
                   [*remarks, f"for utterances of {SECONDS:g} seconds"], values)
