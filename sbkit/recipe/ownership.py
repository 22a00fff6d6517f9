"""Checks that all tensors reachable from a recipe are under ``modules``, are trained and are saved.

A Brain moves, trains, synchronises and saves only what is under ``modules``. A layer that is reached only through a
searcher, a list or a partial stays on the CPU and keeps its initial weights.
"""

from __future__ import annotations

import functools
import os
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.time_domain import SpeedPerturb
from speechbrain.decoders.scorer import BaseRescorerInterface
from speechbrain.processing.features import Deltas
from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, Checkpointer, get_default_hook
from speechbrain.utils.parameter_transfer import Pretrainer
from torch import nn

from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.nn.global_norm import GlobalNorm
from sbkit.recipe.build import Built
from sbkit.recipe.keys import is_task
from sbkit.recipe.names import brain_class
from sbkit.recipe.report import listed
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.values import unwrapped

_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType,
           torch.dtype, torch.device, torch.Size, torch.Generator)
#: Keys that sbkit's Brain itself adds to checkpoints, and those that a task adds.
_SAVED_BY_BRAIN = ("ema",)
_SAVED_BY_TASK = ("ema", "schedule", "normalize", "train_logger")
#: A limit of objects to visit, more than any recipe has, for a data set in a list.
_MAX_OBJECTS = 500_000


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor and how it was reached."""

    value: torch.Tensor
    path: str
    """The Python expression for it, such as ``searcher.modules[0].w.weight``."""
    module: nn.Module | None
    """The innermost module around it."""
    registered: bool
    """Whether it is a parameter or buffer of that module, so that ``.to`` moves it."""
    key: str
    """The key of the innermost object around it that the recipe builds."""
    place: Place
    """The place of that."""


def tensors(built: Built) -> Iterator[Tensor]:
    """All tensors reachable from the objects of a recipe, once for each module that contains them."""
    seen: set[int] = set()
    keep: list[object] = []  # keeps objects alive, so that no other object gets the same id
    todo: deque[tuple[object, str, nn.Module | None, bool, str, Node | None]] = deque()
    for key, value in built.hparams.items():
        todo.append((value, key, None, False, key, built.nodes.get(key)))
    while todo and len(seen) < _MAX_OBJECTS:
        obj, path, module, registered, key, node = todo.popleft()
        if isinstance(obj, torch.Tensor):
            yield Tensor(obj, path, module, registered, key, node.place if node else Place())
            continue
        if isinstance(obj, _LEAVES) or id(obj) in seen:
            continue
        seen.add(id(obj))
        keep.append(obj)
        origin = built.origin(obj)
        if origin is not None and (node is None or origin is not node):
            key, node = origin.key, origin
        if isinstance(obj, nn.Module):
            module = obj
        for name, inner, is_registered in _inside(obj):
            todo.append((inner, f"{path}{name}", module, is_registered, key, node))


def _inside(obj: object) -> Iterator[tuple[str, object, bool]]:
    """The contents of an object: (part of the path, value, whether a module has registered it)."""
    if isinstance(obj, Mapping):
        yield from ((f"[{name}]", value, False) for name, value in list(obj.items()))
    elif isinstance(obj, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{i}]", value, False) for i, value in enumerate(obj))
    elif isinstance(obj, functools.partial):
        yield from ((f".args[{i}]", value, False) for i, value in enumerate(obj.args))
        yield from ((f".{name}", value, False) for name, value in obj.keywords.items())
        yield "", obj.func, False
    elif isinstance(obj, types.MethodType):
        yield "", obj.__self__, False
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents, False
            except ValueError:  # an empty cell
                continue
    elif isinstance(obj, nn.Module):
        for name, value in vars(obj).items():
            if name == "_modules":
                yield from ((f".{inner}", module, False) for inner, module in value.items() if module is not None)
            elif name in ("_parameters", "_buffers"):
                yield from ((f".{inner}", tensor, True) for inner, tensor in value.items() if tensor is not None)
            else:
                yield f".{name}", value, False
    else:
        fields = vars(obj) if hasattr(obj, "__dict__") else {
            name: getattr(obj, name) for name in getattr(type(obj), "__slots__", ()) if hasattr(obj, name)}
        yield from ((f".{name}", value, False) for name, value in fields.items())


# ---------------------------------------------------------------------------------------------- modules


class Owned:
    """The modules under ``modules``, with their parameters and buffers."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        self.roots = dict(modules)
        self.modules = {id(m): m for root in self.roots.values() for m in root.modules()}
        self.parameters = {id(p): p for root in self.roots.values() for p in root.parameters()}
        self.buffers = {id(b): b for root in self.roots.values() for b in root.buffers()}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.parameters or id(tensor) in self.buffers


def check_modules(built: Built, findings: Findings) -> dict[str, nn.Module] | None:
    """Check that everything under ``modules`` is a module; return the modules, None without ``modules``."""
    node = built.nodes.get("modules")
    modules = built.hparams.get("modules")
    if node is None or not isinstance(modules, Mapping):
        return None
    for name, module in modules.items():
        if module is None:  # an optional part that the recipe leaves out
            continue
        if not isinstance(module, nn.Module):
            hint = "only torch.nn.Module objects can be trained and saved"
            if isinstance(module, (list, tuple)):
                hint = "write a list of layers as !new:torch.nn.ModuleList"
            findings.error("no-module", node.place_of(name), node.key_of(name),
                           f"this is {type(module).__name__}, not a module", hint)
        elif not _can_name(name):
            findings.error("no-module", node.place_of(name), node.key_of(name),
                           f"{name!r} can't be the name of a module",
                           "choose a word without dots that isn't a method of torch.nn.ModuleDict")
    return {name: module for name, module in modules.items() if isinstance(module, nn.Module) and _can_name(name)}


def _can_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and "." not in name and not hasattr(nn.ModuleDict(), name)


def check_ownership(built: Built, owned: Owned, findings: Findings) -> None:
    """Add findings about parameters that are not under ``modules``, by the key that builds them."""
    unowned: dict[str, list[Tensor]] = {}
    for tensor in tensors(built):
        if tensor.registered and tensor.value not in owned:
            unowned.setdefault(tensor.key, []).append(tensor)
    for key, obj in built.hparams.items():
        if _keeps_statistics(obj) and id(obj) not in owned.modules:
            findings.warning("not-owned", built.nodes[key].place, key,
                             f"{type(obj).__name__} keeps running statistics and is not under modules: it never leaves "
                             "training mode, so validation changes them", _fixes(key, owned))

    pretrained = _pretrained(built)
    moved = _moved_by_others(built)
    for key, unowned_tensors in unowned.items():
        parameters = {id(t.value): t for t in unowned_tensors if isinstance(t.value, nn.Parameter)}
        if not parameters or _is_copied(key, built, owned):
            continue  # `report_left_behind` reports constants, unless the forward works with them
        place = unowned_tensors[0].place
        what = _describe_holder(key, list(parameters.values()), built)
        if parameters.keys() <= pretrained:
            if not parameters.keys() <= moved:
                findings.warning("not-owned", place, key,
                                 f"{what.kind}, whose weights the pretrainer loads, is not under modules{what.via}: it "
                                 "would stay on the CPU unless what uses it moves it", _fixes(key, owned))
            continue
        count = sum(t.value.numel() for t in parameters.values())
        is_trained = any(t.value.requires_grad for t in parameters.values())
        findings.error(
            "not-owned", place, key,
            f"{what.kind} with {count:,} parameters is not under modules{what.via}: it would "
            f"stay on the CPU, {'never be trained and never be saved' if is_trained else 'and not be saved'}",
            _fixes(key, owned))


class _Holder(NamedTuple):
    kind: str
    """The class of what holds some parameters, in words."""
    via: str
    """How it is reached, if its key doesn't say that; in brackets."""


def _describe_holder(key: str, parameters: Sequence[Tensor], built: Built) -> _Holder:
    """Describe what holds these parameters of a key: one module, or else the object of the key."""
    first = parameters[0]
    in_one_module = len({id(t.module) for t in parameters}) == 1
    holder = first.module if in_one_module else built.hparams.get(key)
    kind = type(holder).__name__ if isinstance(holder, nn.Module) else "a layer"
    via = "" if first.path.startswith(key.split(".")[0]) else f" (it's reached through {first.path})"
    return _Holder(kind, via)


def _moved_by_others(built: Built) -> set[int]:
    """Ids of the parameters that SpeechBrain's rescorers, and classes like them, move to a device themselves."""
    movers = [obj for obj in built.hparams.values() if hasattr(obj, "to_device")]
    parts = [part for mover in movers for part in vars(mover).values() if isinstance(part, nn.Module)]
    return {id(parameter) for part in parts for parameter in part.parameters()}


def _is_copied(key: str, built: Built, owned: Owned) -> bool:
    """Whether the object of a key is only a pattern that an owned module has copied, as in SpeechBrain's SepFormer."""
    pattern = built.hparams.get(key)
    node = built.nodes.get(key)
    if not isinstance(pattern, nn.Module) or id(pattern) in owned.modules:
        return False
    shapes = {name: parameter.shape for name, parameter in pattern.named_parameters()}

    def is_copy(layer: nn.Module) -> bool:
        return type(layer) is type(pattern) and shapes == {
            name: parameter.shape for name, parameter in layer.named_parameters()}

    for name, taker in built.nodes.items():
        holder = owned.modules.get(id(built.hparams.get(name))) if node in taker.children() else None
        if holder is not None and not _reaches(holder, pattern) and any(map(is_copy, holder.modules())):
            return True
    return False


def _reaches(holder: object, wanted: object) -> bool:
    """Whether an object holds another, also where torch doesn't look, such as in a list."""
    todo, seen = [holder], dict[int, object]()
    while todo and len(seen) < _MAX_OBJECTS:
        obj = todo.pop()
        if obj is wanted:
            return True
        if id(obj) not in seen and not isinstance(obj, (*_LEAVES, torch.Tensor)):
            seen[id(obj)] = obj
            todo += [inner for _, inner, _ in _inside(obj)]
    return False


def _pretrained(built: Built) -> set[int]:
    """Ids of the parameters that a Pretrainer, SpeechBrain's or one like it, loads again in each run."""
    pretrainers = [obj for key, obj in built.hparams.items() if key == "pretrainer" or isinstance(obj, Pretrainer)]
    loaded = [obj for pretrainer in pretrainers for obj in getattr(pretrainer, "loadables", {}).values()]
    return {id(parameter) for obj in loaded if isinstance(obj, nn.Module) for parameter in obj.parameters()}


def missing_weights(pretrainer: Pretrainer) -> Iterator[tuple[str, str, str]]:
    """The name, the problem and the advice for each path of a Pretrainer that can't be a file, a URL or on the Hub."""
    for name in filter(pretrainer.is_loadable, pretrainer.loadables):
        path = pretrainer.paths.get(name)
        if isinstance(pretrainer.loadables[name], Tokenizer) and name not in pretrainer.custom_hooks:
            yield (name, "a Tokenizer isn't loaded so", f"leave {name} out, and give its file as tokenizer.model, or "
                   "all of a run by --init_from RUN --init_tokenizer keep")
        elif path is None:
            yield name, f"there is no path for {name}", f"add {name}: FILE to its paths"
        elif not isinstance(path, str) or path.startswith(("http:", "https:")) or Path(path).is_file():
            continue
        elif Path(path).is_absolute() or path[0] in ".~" or path.count("/") < 2 or Path(path).parent.is_dir():
            # a local path that doesn't exist would be looked up on the Hub
            yield (name, f"there is no file {path}",
                   "name a file, a URL, or owner/model/file on the Hugging Face Hub")


def check_pretrainer(built: Built, findings: Findings) -> None:
    """Add an error for each of the pretrainer's files that a task's run wouldn't find; a script may not load them."""
    pretrainer = built.hparams.get("pretrainer")
    if isinstance(pretrainer, Pretrainer) and is_task(brain_class(built.root)):
        for name, problem, hint in missing_weights(pretrainer):
            findings.error("no-file", built.nodes["pretrainer"].place, f"pretrainer.paths.{name}", problem, hint)


def _keeps_statistics(obj: object) -> bool:
    """Whether it normalises by statistics of the corpus, which SpeechBrain's keeps outside of its state dict."""
    return isinstance(obj, GlobalNorm) or (isinstance(obj, nn.Module) and getattr(obj, "norm_type", None) == "global")


def _fixes(key: str, owned: Owned) -> str:
    if "[" in key:
        return "give it its own key, and refer to that under modules"
    name = key.split(".")[-1]
    reference = key if "." not in key else key.replace(".", "[", 1).replace(".", "][") + "]"
    fix = f"write `{name}: !ref <{reference}>` under modules"
    lists = [n for n, module in owned.roots.items() if isinstance(module, nn.ModuleList)]
    return fix + (f", or put `!ref <{reference}>` into the ModuleList {lists[0]}" if lists else "")


def left_behind(built: Built, before: Owned) -> list[Tensor]:
    """Constants that are still on the CPU after ``modules`` were moved; ``check_ownership`` is for parameters.

    Attributes of SpeechBrain's own layers don't count, nor the buffers of its Deltas, SpeedPerturb and rescorers: they
    move them, such as the window of its STFT, or works on the CPU.

    before: what was owned before the move; parameters are moved in place, wherever else they are referred to
    """
    moving = _moved_in_forward(built)
    copied = {key for key in built.hparams if _is_copied(key, built, before)}

    def stays(tensor: Tensor) -> bool:
        value = tensor.value
        if value.device.type != "cpu" or not value.dim() or not value.numel():  # scalars work on any device
            return False
        if isinstance(value, nn.Parameter) or id(value) in before.parameters:
            return False
        if tensor.key in copied or id(tensor.module) in moving or isinstance(tensor.module, Deltas):
            return False
        if not tensor.registered and type(tensor.module).__module__.startswith("speechbrain."):
            return False
        name = tensor.path.rpartition(".")[2]
        return not hasattr(tensor.module, f"{name}_orig")  # computed anew by torch's spectral_norm

    return [tensor for tensor in tensors(built) if stays(tensor)]


def _moved_in_forward(built: Built) -> set[int]:
    """Ids of the layers inside SpeechBrain's SpeedPerturb and rescorers."""
    augmentations = [augmentation for obj in built.hparams.values() if isinstance(obj, Augmenter)
                     for augmentation in obj.augmentations.values()]
    parts: list[object] = []
    for obj in [*built.hparams.values(), *augmentations]:
        if isinstance(obj, SpeedPerturb):
            parts += obj.resamplers
        elif isinstance(obj, BaseRescorerInterface):
            parts.append(getattr(obj, "lm", None))
    return {id(layer) for part in parts if isinstance(part, nn.Module) for layer in part.modules()}


def report_left_behind(left: list[Tensor], owned: Owned, findings: Findings) -> None:
    """Warn of tensors that don't move with the modules: buffers outside of them, and attributes that aren't buffers."""
    reported = {finding.key for finding in findings if finding.code == "not-owned"}
    groups: dict[str, list[Tensor]] = {}
    for tensor in left:
        if not (tensor.registered and tensor.key in reported):  # those move once their module is under modules
            groups.setdefault(tensor.key, []).append(tensor)
    for key, of_key in groups.items():
        first = of_key[0]
        paths = listed(dict.fromkeys(tensor.path for tensor in of_key), limit=3)
        if all(tensor.registered for tensor in of_key):
            hint = _fixes(key, owned)
        elif first.module is None:
            hint = "register it as a buffer of a module that is under modules"
        else:
            hint = f"make it a buffer of {type(first.module).__name__} (register_buffer), or move it in forward"
        findings.warning("left-behind", first.place, key,
                         f"{paths} would stay on the CPU when the modules move to a device", hint)


# ---------------------------------------------------------------------------------------------- checkpoints


def recoverables(built: Built) -> dict[str, Any] | None:
    """The objects that the checkpointer saves, by name; None without a checkpointer."""
    checkpointer = built.hparams.get("checkpointer")
    return dict(checkpointer.recoverables) if isinstance(checkpointer, Checkpointer) else None


def saved_by(recoverable: object) -> dict[int, torch.Tensor]:
    """Parameters and buffers by id that are in the file of a recoverable, or in a file that it is based on."""
    if not isinstance(recoverable, nn.Module):
        return {}
    # A class may have a method that returns them.
    saved: Callable[[], Iterable[object]] | None = getattr(recoverable, "saved", None)
    values = saved() if callable(saved) else recoverable.state_dict(keep_vars=True).values()
    return {id(value): value for value in values if isinstance(value, torch.Tensor)}


def check_saved(built: Built, owned: Owned, findings: Findings) -> None:
    """Check that each parameter is in exactly one recoverable, and other objects with a state in at least one.

    Weights that the pretrainer loads in each run need no recoverable if they aren't trained.
    """
    saved = recoverables(built)
    node = built.nodes.get("checkpointer")
    if saved is None or node is None:
        return
    _check_saved_once(built, owned, saved, node.place, findings)

    custom_hooks = built.hparams["checkpointer"].custom_save_hooks
    for name, obj in saved.items():
        if name not in custom_hooks and get_default_hook(obj, DEFAULT_SAVE_HOOKS) is None:
            findings.error("not-savable", node.place, f"checkpointer.recoverables.{name}",
                           f"there is no way to save {type(obj).__name__}, so the first checkpoint would fail",
                           "remove it, or give the checkpointer a custom_save_hooks for it")
    _check_states(built, saved, findings)


def _check_saved_once(built: Built, owned: Owned, saved: Mapping[str, object], place: Place,
                      findings: Findings) -> None:
    """Check that each parameter under ``modules`` is in exactly one recoverable.

    place : where the checkpointer is written
    """
    tensors_of = {name: saved_by(obj) for name, obj in saved.items()}
    pretrained = _pretrained(built)
    need_no_file = {id(parameter) for parameter in owned.parameters.values()  # a script may not train them
                    if id(parameter) in pretrained and not (parameter.requires_grad and "brain" in built.hparams)}
    for root_name, root in owned.roots.items():
        parameters = dict(root.named_parameters())
        names_by_holders: dict[tuple[str, ...], list[str]] = {}
        for name, parameter in parameters.items():
            if id(parameter) not in need_no_file:
                holders = tuple(holder for holder, held in tensors_of.items() if id(parameter) in held)
                names_by_holders.setdefault(holders, []).append(name)
        for holders, names in names_by_holders.items():
            if not holders:
                advice = f"add `{root_name}: !ref <{root_name}>` to the recoverables"
                trained = {id(parameters[name]) for name in names} & pretrained
                frozen_key = _pretrained_key(built, trained, pretrained)
                if frozen_key:
                    advice += f"; or, to keep the pretrainer's weights, write `freeze: {{{frozen_key}: true}}`"
                findings.error("not-saved", place, "checkpointer.recoverables",
                               f"{len(names)} parameters of {root_name} are in no checkpoint, such as {names[0]}",
                               advice)
            elif len(holders) > 1:
                findings.warning("saved-twice", place, "checkpointer.recoverables",
                                 f"{len(names)} parameters of {root_name} are saved by {' and by '.join(holders)}",
                                 f"keep one of {listed(holders)}: loading the last overwrites the others")


def _pretrained_key(built: Built, trained: set[int], pretrained: set[int]) -> str:
    """The first key of a module that has some of the trained parameters and is wholly pretrained; empty without one."""
    for key, module in built.hparams.items():
        ids = {id(parameter) for parameter in module.parameters()} if isinstance(module, nn.Module) else set()
        if not ids.isdisjoint(trained) and ids <= pretrained:
            return key
    return ""


def _check_states(built: Built, saved: Mapping[str, object], findings: Findings) -> None:
    """Warn of objects with a state that no checkpoint holds."""
    recoverable_ids = {id(obj) for obj in saved.values()}
    saved_by_brain = _SAVED_BY_TASK if is_task(brain_class(built.root)) else _SAVED_BY_BRAIN
    unread = {finding.key for finding in findings if finding.code == "unread-key"}  # their state is no loss
    for key, obj in built.hparams.items():
        if id(obj) in recoverable_ids or key in saved_by_brain or key in unread:
            continue
        if isinstance(obj, (Checkpointer, type)):
            continue
        has_hook = not isinstance(obj, nn.Module) and get_default_hook(obj, DEFAULT_SAVE_HOOKS) is not None
        if has_hook or _keeps_statistics(obj):
            findings.warning("not-saved", built.nodes[key].place, key,
                             f"{type(obj).__name__} has a state that no checkpoint holds, so a resumed run loses it",
                             f"add `{key}: !ref <{key}>` to the checkpointer's recoverables")


# ---------------------------------------------------------------------------------------------- optimizers


def optimized_by(built: Built) -> str:
    """What trains the parameters: ``opt_class``, ``init_optimizers`` of the user's Brain, or empty if unknown."""
    brain = built.hparams.get("brain")
    makers = [cls for cls in getattr(brain, "__mro__", ()) if "init_optimizers" in vars(cls)]
    if makers and makers[0].__name__ != "Brain":
        return "init_optimizers"
    if brain is None or "opt_class" in built.hparams or "opt_class" in built.missing:
        return "opt_class"
    return ""


def check_optimizer(built: Built, owned: Owned, findings: Findings) -> None:
    """Check that there is an optimizer, that it can be built, and that at least one parameter is trained."""
    opt_class = built.hparams.get("opt_class")
    node = built.nodes.get("opt_class")
    if not optimized_by(built):
        findings.error("missing-key", built.nodes["brain"].place, "opt_class",
                       "the recipe lacks this key, so nothing would be trained",
                       "write `opt_class: !name:torch.optim.AdamW` and its arguments under it")
    if owned.parameters and not any(p.requires_grad for p in owned.parameters.values()):
        findings.error("not-trained", built.nodes["modules"].place, "modules",
                       "no parameter of these would be trained: requires_grad is false for all of them",
                       "leave at least one layer unfrozen")
    if node is None or not callable(opt_class):
        return
    try:
        opt_class([nn.Parameter(torch.zeros(1))])
    except Exception as error:  # each optimizer has its own errors for wrong arguments
        own = error if isinstance(error, SbkitError) else None
        name = node.tag.partition(":")[2].rpartition(".")[2] or "it"
        findings.error("not-built" if own is None else own.code, *node.culprit_of(error),
                       f"{name} refuses its arguments: {error if own is None else own.message}",
                       (None if own is None else own.hint) or "")
        return
    optimizer = unwrapped(opt_class)[0]
    if built.hparams.get("fsdp") and "fsdp" in built.nodes and getattr(optimizer, "needs_whole_parameters", False):
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets it
        report = findings.error if several else findings.warning
        report("setting", built.nodes["fsdp"].place, "fsdp",
             f"the optimizer {optimizer.__name__} needs unsharded parameters, so a run on several devices can't start",
             "remove this, or use opt_class: !name:torch.optim.AdamW")
