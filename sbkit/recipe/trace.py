"""A training batch through a recipe's own Brain on stand-in tensors: shapes, and whether all meets on one device.

Stand-ins (torch's FakeTensor) have shapes, types and devices and no memory, so neither data nor a GPU is
needed, and a model of any size takes no room. What runs is what training runs: the task's ``compute_forward`` and
``compute_objectives``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from speechbrain.core import Stage
from speechbrain.nnet import attention
from speechbrain.utils.run_opts import RunOptions
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.parts import for_good
from sbkit.recipe.report import Section, listed
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.values import static

#: Utterances of the batch that is sent through, and seconds of each.
UTTERANCES, SECONDS = 2, 3.0
#: What a module is called by.
_CALLS = ("forward", "encode", "decode")
# (what came, what was wanted) in torch's words.
_MISMATCHES = (
    re.compile(r"got \[\d+, (?P<got>\d+)\] X \[(?P<wanted>\d+), \d+\]"),
    re.compile(r"\(\d+x(?P<got>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"to have (?P<wanted>\d+) channels, but got (?P<got>\d+) channels"),
    re.compile(r"shape \[\*, (?P<wanted>\d+)\], but got input of size\s?\[.*?(?P<got>\d+)\]"),
)
_OTHER_DEVICE = re.compile(r"two different devices (\S+), (\S+)|Expected all tensors to be on the same device")


class Trace:
    """What a forward showed."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.task: Any = task_of(built)
        """The class that is to train; None where nobody knows what it needs."""
        self.brain: Any = None
        """The recipe's Brain, where it could be built."""
        self.keys: Any = None
        """The task's keys, where the recipe has what it needs."""
        self.outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Class and shape of what each object of the recipe gave, by key, in the order of a batch's way."""
        self.tried = False
        self.complete = False
        self.note = ""
        """Why the forward ended early, where that is no mistake."""

    def shape(self, key: str) -> tuple[int, ...] | None:
        """What the object under a key gave, where the forward came that far."""
        return self.outputs[key][1] if key in self.outputs else None


@contextlib.contextmanager
def stand_ins() -> Iterator[FakeTensorMode]:
    """Within it, tensors have shapes and no memory; real weights count as if they had none."""
    told = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs a traceback for each mismatch, which is told better below
    # SpeechBrain keeps rotary tables for the process: a stand-in left there would reach the run that follows.
    tables = attention._get_precomputed_values.memo
    attention._get_precomputed_values.memo = {}
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            warnings.simplefilter("ignore")
            yield mode
    finally:
        attention._get_precomputed_values.memo = tables
        logging.disable(told)


@functools.cache
def gpu_stand_ins() -> bool:
    """Whether tensors can pretend to be on a GPU here: torch 2.9 and older need a driver for that."""
    real = torch.ones(1)
    try:
        with stand_ins():
            real.to("cuda:0")
    except RuntimeError:
        return False
    return True


def task_of(built: Built) -> Any:
    """The class that is to train, the recipe's ``brain``; None where that is no task.

    Nobody knows what a Brain of any other kind needs, or what a script of one's own does with the parts of its recipe.
    """
    named = built.hparams.get("brain")
    return named if hasattr(named, "Keys") and hasattr(named, "stand_in") else None


def build_brain(task: Any, hparams: Mapping[str, Any], precision: str = "fp32", **more: Any) -> Any:
    """A Brain of a recipe that is not to train: without folder and checkpoints. ``more``: keys of another value."""
    kept = {key: value for key, value in hparams.items() if key not in ("output_folder", "schedule", "precision")}
    more = {"freeze": for_good(hparams.get("freeze")), **more}
    return task(modules=hparams["modules"], hparams={**kept, **more}, checkpointer=None,
                run_opts=RunOptions(device="cpu", precision=precision, overridden_args={"device", "precision"}))


def trace(built: Built, modules: Mapping[str, nn.Module], findings: Findings) -> Trace:
    """Run a training batch through the recipe's Brain on stand-ins; the first mismatch is told with its line."""
    found = Trace(built)
    task = found.task
    if task is None:
        found.note = "the forward: " + ("its brain is no task of sbkit's" if "brain" in built.nodes else
                                        "the recipe names no brain, so what its parts compute is its script's affair")
        return found
    needed = dict.fromkeys((*task.parts, *(key for key in task.Keys.declared() if key in built.missing)))
    missing = [key for key in needed if built.hparams.get(key) is None]
    if missing:
        found.note = f"the forward: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing or not built"
        return found
    found.tried = True
    with _telling(found, findings), torch.no_grad():
        found.keys = task.Keys.read(built.hparams)
        if _tell_clashes(found.keys, built, findings) or not task.check_parts(found.keys, built, findings):
            return found
        found.brain = build_brain(task, {**built.hparams, "modules": modules}, accelerate=False)
        with stand_ins():
            _run(found, "cpu")
    return found


def _tell_clashes(keys: Any, built: Built, findings: Findings) -> bool:
    """Tell of keys that don't go together; gives whether there are any."""
    clashes = list(keys.clashes())
    for key, message, hint in clashes:
        node = built.nodes.get(key, built.nodes["modules"])
        findings.error("clash", node.place if key in built.nodes else Place(node.place.file), key, message, hint)
    return bool(clashes)


def trace_moved(before: Trace, modules: nn.ModuleDict, findings: Findings) -> None:
    """The same forward with the modules on stand-ins of a GPU: it fails where something was left behind.

    modules: all that a Brain moves, on the ``meta`` device; they end as stand-ins
    """
    found = Trace(before.built)
    found.brain = before.brain
    # Without cuDNN: an LSTM would ask it, and so a driver that may not be there, how to lay out its weights.
    with _telling(found, findings), torch.no_grad(), stand_ins(), torch.backends.cudnn.flags(enabled=False):
        modules.to_empty(device="cuda:0")
        _run(found, "cuda:0")


@contextlib.contextmanager
def _telling(found: Trace, findings: Findings) -> Iterator[None]:
    """What goes wrong inside becomes a finding, or a note where it's no mistake."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        node, _ = _blame(error, found.built)
        where = node.key if node else "the features"
        found.note = (f"the forward behind {where}, which reads values of tensors on the host (.item() or the like) or "
                      "makes shapes of them; that also makes a GPU wait")
    except Exception as error:  # whatever a layer says to a shape it can't take
        _tell(error, found.built, findings, next(reversed(found.outputs), "features"))


def _run(found: Trace, device: str) -> None:
    batch = found.brain.stand_in(UTTERANCES, SECONDS).to(device)
    with _watched(found):
        outputs = found.brain.compute_forward(batch, Stage.TRAIN)
        found.brain.compute_objectives(outputs, batch, Stage.TRAIN)
    found.complete = True


@contextlib.contextmanager
def _watched(found: Trace) -> Iterator[None]:
    """Within it, what each object of the recipe gives is noted the first time."""
    watched = [(key, obj) for key, obj in found.built.hparams.items() if isinstance(obj, nn.Module)]
    patched: list[tuple[nn.Module, str]] = []
    for key, module in watched:
        for name in _CALLS:
            call = getattr(module, name, None)
            if callable(call) and name not in vars(module):
                vars(module)[name] = _noting(call, key, module, found)
                patched.append((module, name))
    try:
        yield
    finally:
        for module, name in patched:
            del vars(module)[name]


def _noting(call: Callable[..., Any], key: str, module: nn.Module, found: Trace) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        first = out
        while isinstance(first, (tuple, list)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            found.outputs.setdefault(key, (type(module).__name__, tuple(first.shape)))
        return out

    return noted


# ---------------------------------------------------------------------------------------------- what went wrong


def _blame(error: BaseException, built: Built) -> tuple[Node | None, nn.Module | None]:
    """The innermost object of the recipe whose code was running, and the innermost layer."""
    node, layer = None, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            layer = owner
            node = built.origin(owner) or node
    return node, layer


def _tell(error: Exception, built: Built, findings: Findings, stage: str) -> None:
    node, layer = _blame(error, built)
    place, key = (node.place, node.key) if node is not None else (Place(built.nodes["modules"].place.file), stage)
    inside = f" (in its {type(layer).__name__})" if layer is not None and built.origin(layer) is not node else ""
    text = " ".join(str(error).split())
    if _OTHER_DEVICE.search(text) and any(f.code == "not-owned" and f.key == key for f in findings):
        return  # that is why
    if _OTHER_DEVICE.search(text):
        findings.error("device-mismatch", place, key,
                       f"a tensor stays on the CPU while the rest is on a device{inside}",
                       "hold it as a buffer, or move it in forward with .to(x.device)")
        return
    if isinstance(error, SbkitError):
        findings.error("forward", place, key, error.message, error.hint or "")
        return
    for pattern in _MISMATCHES:
        if match := pattern.search(text):
            got, wanted = int(match["got"]), int(match["wanted"])
            message = f"{got} values a frame come in and {wanted} are expected{inside}"
            argument = _argument(node, wanted)
            if node is not None and argument is not None:
                place, key = node.place_of(argument), node.key_of(argument)
                suggestion = f"set {argument} to {got}, or make what comes before it give {wanted}"
            else:
                suggestion = f"make what comes before it give {wanted}"
            findings.error("shape-mismatch", place, key, message, suggestion)
            return
    findings.error("forward", place, key, f"the forward fails{inside}: {type(error).__name__}: {text[:300]}",
                   "compare its arguments with the shapes that come in" if isinstance(error, RuntimeError) else
                   _texts(node))


def _texts(node: Node | None) -> str:
    """Options among the arguments of a layer, one of which may be misspelt."""
    given = node.value.items() if node is not None and isinstance(node.value, dict) else ()
    shown = [f"{key} {value!r}" for key, child in given if isinstance(value := static(child), str)]
    return f"it gets {listed(shown)}" if shown else "look at its arguments"


def _argument(node: Node | None, value: int) -> str | None:
    """The argument of a layer that has this value."""
    if node is None or not isinstance(node.value, dict):
        return None
    found = [key for key, child in node.value.items() if static(child) == value and isinstance(key, str)]
    return next((key for key in found if "in" in key), found[0] if found else None)


# ---------------------------------------------------------------------------------------------- the table


def section(found: Trace) -> Section | None:
    """What each object of the recipe gives, and what the task says of it."""
    if not found.outputs:
        return None
    rows = [[key, kind, f"[{', '.join(['B', *map(str, shape[1:])])}]"] for key, (kind, shape) in found.outputs.items()]
    values: dict[str, Any] = {key: list(shape) for key, (_, shape) in found.outputs.items()}
    remarks, more = found.brain.describe() if found.complete else ([], {})
    return Section("Shapes", ["key", "class", "output"], rows,
                   [*remarks, f"of utterances of {SECONDS:g} seconds"], values | more)
