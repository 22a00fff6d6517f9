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
UTTERANCES, SECONDS = 2, 3.0
#: Methods of modules that a forward calls.
_CALLS = ("forward", "encode", "decode")
# Torch's messages about sizes that don't match.
_MISMATCHES = (
    re.compile(r"got \[\d+, (?P<given>\d+)\] X \[(?P<wanted>\d+), \d+\]"),
    re.compile(r"\(\d+x(?P<given>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"to have (?P<wanted>\d+) channels, but got (?P<given>\d+) channels"),
    re.compile(r"shape \[\*, (?P<wanted>\d+)\], but got input of size\s?\[.*?(?P<given>\d+)\]"),
)
_HOME, _PYTHON = Path(sbkit.__file__).parent, Path(sysconfig.get_paths()["stdlib"])
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
            mock.patch.object(torch.cuda, "is_bf16_supported", lambda *given: True):
        yield


class WholeSequences(TorchFunctionMode):
    """Computes torch's recurrent layers for all frames at once: with the same shapes, matrix products and gradients.

    One frame after another would take minutes on fake tensors, and cuDNN's and oneDNN's layers need real ones.
    """

    def __torch_function__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),  # any of torch's
                           kwargs: Mapping[str, Any] | None = None) -> object:
        if func in _CELLS:
            return _cell(_CELLS[func], *args, **(kwargs or {}))
        return (functools.partial(_sequence, _LAYERS[func]) if func in _LAYERS else func)(*args, **(kwargs or {}))


# The gates of each kind.
_LAYERS = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
_CELLS = {torch.lstm_cell: 4, torch.gru_cell: 3, torch.rnn_tanh_cell: 1, torch.rnn_relu_cell: 1}


def _sequence(gates: int, input: Tensor, hx: Any, params: Sequence[Tensor],  # a state, or two of an LSTM
              has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
              batch_first: bool) -> tuple[Tensor, ...]:
    """The outputs of a stack of layers [B, T, directions x H], or [T, B, ...] as given, and their last states."""
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    directions = 2 if bidirectional else 1
    number, outputs = num_layers * directions, list[Tensor]()
    count = len(params) // number
    for at in range(number):
        w_ih, w_hh, *more = params[at * count:(at + 1) * count]
        # Any states of each frame, which need gradients too, as the first ones may.
        before = (input[..., :1] + sum(_beside(input, state)[at].flatten()[0].to(input.dtype) for state in states)
                  ).expand(*input.shape[:-1], w_hh.shape[1])
        found = _cell(gates, input, before, w_ih, w_hh, *more[:2 if has_biases else 0])
        outputs.append(functional.linear(found, more[-1]) if len(more) % 2 else found)  # the projection of an LSTM
        if (at + 1) % directions == 0:
            input = torch.cat(outputs[-directions:], -1)
            if train and dropout and at + 1 < number:
                input = functional.dropout(input, dropout)
    lasts = [output.flatten(0, -2)[:1, :1] for output in outputs]
    ends = [torch.stack([one.to(last.dtype) + last for one, last in zip(each, lasts, strict=True)]) for each in states]
    return (input, *ends)


def _cell(gates: int, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor,  # a state, or that of an LSTM and its cell
          b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:  # like the state
    before, *cell = hx if isinstance(hx, (tuple, list)) else (hx,)
    projected = functional.linear(input, w_ih, b_ih) + functional.linear(_beside(input, before), w_hh, b_hh)
    first, *others = projected.chunk(gates, -1)
    found = torch.tanh(first)
    for gate in others:
        found = found * torch.sigmoid(gate)
    return (found, found + _beside(input, cell[0]).to(found.dtype)) if cell else found


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
    found: Tensor = gate * before + (1 - gate) * layer.act(candidate)
    return found


def build_brain(task: TaskClass, hparams: Mapping[str, Any], precision: str = "fp32", **more: Any) -> Task:
    """Build the Brain of a recipe, without output folder and checkpoints; ``more`` replaces values of keys."""
    kept = {key: value for key, value in hparams.items()
            if key not in ("output_folder", "schedule", "precision", "grad_accumulation_factor")}
    more = {"freeze": permanently_frozen(hparams.get("freeze")), **more}
    return task(modules=hparams["modules"], hparams={**kept, **more}, checkpointer=None,
                run_opts=RunOptions(device="cpu", precision=precision, overridden_args={"device", "precision"}))


def trace(built: Built, modules: Mapping[str, nn.Module], findings: Findings) -> Trace:
    """Run a training batch through the recipe's Brain on fake tensors; the first mismatch becomes a finding."""
    found = Trace(built)
    task = found.task
    if task is None:
        found.note = "the forward: " + ("its brain could not be built" if "brain" in built.missing else
                                        "its brain is not a task of sbkit" if "brain" in built.nodes else
                                        "the recipe has no brain, so only its script knows what its parts "
                                        f"compute; {SCRIPT}")
        return found
    misfits = task.Keys.misfits(built.hparams)
    for key, message, hint in misfits:
        findings.error("wrong-class", built.root.place_of(key), key, message, hint)
    needed = dict.fromkeys((*task.parts, *(key for key in task.Keys.declared() if key in built.missing)))
    missing = [key for key in needed if built.hparams.get(key) is None] or [key for key, *_ in misfits]
    if missing:
        what = "of the wrong class" if misfits else "missing or not built"
        found.note = f"the forward: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} {what}"
        return found
    with _reporting(found, findings), torch.no_grad():
        found.keys = task.Keys.read(built.hparams)
        clashes = list(found.keys.clashes())  # keys that can't be combined
        for key, message, hint in clashes:
            node = built.nodes.get(key, built.nodes["modules"])
            findings.error("clash", node.place if key in built.nodes else Place(node.place.file), key, message, hint)
        if clashes or not task.check_parts(found.keys, built, findings):
            return found
        found.brain = build_brain(task, {**built.hparams, "modules": modules}, accelerate=False)
        on_fake_tensors(found.brain, lambda _: _run(found, "cpu"))
    return found


def trace_moved(before: Trace, modules: nn.ModuleDict, findings: Findings) -> Trace:
    """Repeat the forward with the modules on a fake GPU; it fails where a tensor is still on the CPU.

    modules : all that a Brain moves, on the ``meta`` device
    """
    found = Trace(before.built)
    found.brain = before.brain

    def run(_: FakeTensorMode) -> None:
        for layer in modules.modules():  # each once, wherever a recipe names it
            layer.to_empty(device="cuda:0", recurse=False)
        _run(found, "cuda:0")

    with _reporting(found, findings), torch.no_grad(), without_driver():
        on_fake_tensors(found.brain, run)
    return found


@contextlib.contextmanager
def _reporting(found: Trace, findings: Findings) -> Iterator[None]:
    """Turn errors within it into findings, or into a note if they aren't mistakes."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        node, _ = _blame(error, found.built)
        where = node.key if node else "the features"
        found.note = (f"the {found.stage} after {where}, which reads values of tensors on the host "
                      f"(.item() or similar){own_line(error)} or computes shapes from them; that also stalls a GPU")
    except Exception as error:  # each layer has its own errors for a shape that doesn't fit
        call = needs_real_tensors(error)
        if call is None:
            _report(error, found, findings)
        else:
            node, _ = _blame(error, found.built)
            found.note = (f"the {found.stage} from {call}{f' in {node.key}' if node else ''} on, which needs real "
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


def _run(found: Trace, device: str) -> None:
    batch = found.brain.dummy_batch(UTTERANCES, SECONDS).to(device)
    with _recording_shapes(found):
        outputs = found.brain.compute_forward(batch, Stage.TRAIN)
        found.stage = "loss"
        found.brain.compute_objectives(outputs, batch, Stage.TRAIN)
    found.complete = True


@contextlib.contextmanager
def _recording_shapes(found: Trace) -> Iterator[None]:
    """Within it, record the shape of the first output of each object of the recipe."""
    watched = [(key, obj) for key, obj in found.built.hparams.items() if isinstance(obj, nn.Module)]
    patched: list[tuple[nn.Module, str]] = []
    for key, module in watched:
        for name in _CALLS:
            call = getattr(module, name, None)
            if callable(call) and name not in vars(module):
                vars(module)[name] = _recording(call, key, module, found)
                patched.append((module, name))
    try:
        yield
    finally:
        for module, name in patched:
            del vars(module)[name]


def _recording(call: Callable[..., Any], key: str, module: nn.Module, found: Trace) -> Callable[..., Any]:
    @functools.wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> object:
        _check_call(call, key, module, found.task, args, kwargs)
        out = call(*args, **kwargs)
        first = out
        while isinstance(first, (tuple, list)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            found.outputs.setdefault(key, (type(module).__name__, tuple(first.shape)))
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
        given = " and ".join([*map(_shown, args), *(f"{name} {_shown(value)}" for name, value in kwargs.items())])
        declared = task.Keys.declared().get(key) if task is not None else None
        pretrained = re.match(r"speechbrain\..*\.huggingface", type(module).__module__)
        raise SbkitError(
            f"it is called with {given}, but {type(module).__name__}.{call.__name__} takes "
            f"{listed(signature.parameters) or 'nothing'}",
            hint="hparams/finetune.yaml trains a pretrained encoder" if pretrained else
                 "wrap it in a module that takes them" + (f"; this key is {declared.what}" if declared else "")
        ) from None


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


def _report(error: Exception, found: Trace, findings: Findings) -> None:
    built = found.built
    node, layer = _blame(error, built)
    if node is not None:
        place, key = node.place, node.key
    elif found.stage == "loss" or own_line(error):
        place, key = built.nodes["brain"].place, "brain"
    else:
        place, key = Place(built.nodes["modules"].place.file), next(reversed(found.outputs), "features")
    inside = f" (in its {type(layer).__name__})" if layer is not None and built.origin(layer) is not node else ""
    text = " ".join(str(error).split())
    if _OTHER_DEVICE.search(text) and any(f.code == "not-owned" and f.key == key for f in findings):
        return  # that finding explains it
    if _OTHER_DEVICE.search(text):
        findings.error("device-mismatch", place, key,
                       f"a tensor stays on the CPU while the rest is on a device{inside}",
                       "register it as a buffer, or move it in forward with .to(x.device)")
        return
    if isinstance(error, SbkitError):
        findings.error("forward", place, key, error.message, error.hint or "")
        return
    for pattern in _MISMATCHES:
        if match := pattern.search(text):
            given, wanted = int(match["given"]), int(match["wanted"])
            message = f"the input has {given} values per frame, and {wanted} are expected{inside}"
            arguments = node.value.items() if node is not None and isinstance(node.value, dict) else ()
            named = [name for name, child in arguments if static(child) == wanted and isinstance(name, str)]
            argument = next((name for name in named if "in" in name), named[0] if named else None)  # an input size
            if node is not None and argument is not None:
                place, key = node.place_of(argument), node.key_of(argument)
                suggestion = f"set {argument} to {given}, or make the layer before it output {wanted}"
            else:
                suggestion = f"make the layer before it output {wanted}"
            findings.error("shape-mismatch", place, key, message, suggestion)
            return
    hint = "compare its arguments with the input's shape"
    if not isinstance(error, RuntimeError):  # one of the layer's texts may be misspelt
        texts = node.value.items() if node is not None and isinstance(node.value, dict) else ()
        shown = [f"{name} {value!r}" for name, child in texts if isinstance(value := static(child), str)]
        hint = f"it gets {listed(shown)}" if shown else "check its arguments"
    findings.error("forward", place, key,
                   f"the {found.stage} fails{inside}{own_line(error)}: {type(error).__name__}: {text[:300]}", hint)


# ---------------------------------------------------------------------------------------------- the table


def section(found: Trace) -> Section | None:
    """The report's table of output shapes, with the task's remarks."""
    if not found.outputs:
        return None
    rows = [[key, kind, f"[{', '.join(['B', *map(str, shape[1:])])}]"] for key, (kind, shape) in found.outputs.items()]
    values: dict[str, Any] = {key: list(shape) for key, (_, shape) in found.outputs.items()}
    remarks, more = found.brain.describe() if found.complete else ([], {})
    return Section("Shapes", ["key", "class", "output"], rows,
                   [*remarks, f"for utterances of {SECONDS:g} seconds"], values | more)
