"""States of recoverables: loading them from a file, and comparing them with a model."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speechbrain.utils.checkpoints import hook_on_loading_state_dict_checkpoint, torch_recovery

from sbkit.errors import SbkitError, shown_names, summary
from sbkit.recipe.report import listed
from sbkit.system import untrusted
from sbkit.train.checkpoint.files import CheckpointError

Hook = Callable[..., Any]  # loads an object from a path
Recoverable = Any  # a module, an optimizer, or another object with a state dict or its own hook
_NOT_OPTIONS = ("params", "lr", "initial_lr")  # entries of a parameter group that are not options of the recipe
# States of Adam, SGD and Muon with the shape of their parameter; factored or flattened ones have other names.
_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "momentum", "direction")
MAX_NAMED = 5  # how many keys of each kind an error lists


@contextlib.contextmanager
def plain_numbers() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` load numpy numbers and arrays inside this context: they contain no code.

    A scheduler that stores losses as numpy floats could otherwise be saved, but not loaded.
    """
    rebuild: Any = np.array(0.0).__reduce__()[0]  # a function; numpy says a text or anything
    scalar: Any = np.float64(0).__reduce__()[0]  # as above
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
    with torch.serialization.safe_globals([rebuild, scalar, np.ndarray, np.dtype, *sorted(kinds, key=str)]):
        yield


def load_file(path: str | os.PathLike[str], *, lazily: bool = False) -> Any:  # what was saved
    """Load a state from a file to the CPU; only tensors, numbers and containers, so no code can run.

    lazily : read values when they are used; the file must not change until then
    """
    try:
        with plain_numbers():
            return untrusted.load_tensors(path, mmap=lazily)
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):  # torch's words for what is no pickle of torch's
            raise NotLoaded("damaged-file", f"{path} is damaged or not a file of tensors",
                            hint="copy or download it again", file=path) from error
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # the rest is torch's advice to load it all the same
        example = f", such as {shown_names([named[1]])}" if named else ""
        raise CheckpointError(
            "unsafe-file",
            f"{path} holds more than tensors and numbers{example}, so loading it could run code",
            hint="save it again as a state dict, or give the recoverable its own load hook",
            file=path,
        ) from error
    except ValueError as error:
        raise NotLoaded("damaged-file", f"{path} is damaged or not a file of tensors ({error})",
                        hint="copy or download it again", file=path) from error


class OtherModel(CheckpointError):
    """Raised if a checkpoint belongs to another model."""


class NotLoaded(CheckpointError):
    """Raised if a file can't be loaded by its hook."""


def load_recoverable(obj: object, name: str, path: Path, hook: Hook, end_of_epoch: bool) -> None:
    """Load one recoverable with its hook; errors of the hook name the file."""
    try:
        if hook is torch_recovery:
            load_state(obj, path, name)
        else:
            with plain_numbers():
                hook(obj, path, end_of_epoch)
    except (SbkitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotLoaded("state-not-loaded", f"{path} can't be loaded into {name!r} ({summary(error)})",
                        file=path, key=name) from error


def load_state(obj: Recoverable, path: str | Path, name: str) -> None:
    """Load a state dict into a module, optimizer, scheduler or scaler, or raise an error if it does not fit."""
    state = read_state(path)
    difference = ""
    if isinstance(obj, torch.nn.Module):
        try:
            obj.load_state_dict(state, strict=True)
        except RuntimeError:
            difference = differences(obj.state_dict(), state)
            if not difference:
                raise
    elif isinstance(obj, torch.optim.Optimizer):
        difference = _group_differences(obj, state)
        if not difference:
            load_optimizer(obj, state, path)
    else:
        obj.load_state_dict(state)
    if difference:
        raise other_model(name, Path(path), difference)


def read_state(path: str | Path, *, lazily: bool = False) -> Any:  # what was saved
    """Load a state dict with the names that the modules have here; ``lazily`` as in ``load_file``."""
    state = load_file(path, lazily=lazily)
    return hook_on_loading_state_dict_checkpoint(state) if isinstance(state, dict) else state


def other_model(name: str, path: Path, difference: str) -> OtherModel:
    """Return the error for the file of a recoverable that belongs to another model; see ``differences``."""
    return OtherModel("other-model",
                      f"{path.parent} is a checkpoint of another model: {name!r} ({path.name}) differs: {difference}",
                      hint="use the recipe that this run started with, or another output_folder", file=path, key=name)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Load an optimizer's state dict; its options don't change, except for the learning rates."""
    groups = []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        options = {name: value for name, value in group.items() if name in saved and name not in _NOT_OPTIONS}
        groups.append({**saved, **options})
    needed = optimizer.defaults.keys() & optimizer.param_groups[0].keys()  # torch adds a default while it loads
    try:
        optimizer.load_state_dict({**state, "param_groups": groups})
        missing = sorted(name for group in optimizer.param_groups for name in needed - group.keys())
    except KeyError as error:
        missing = [str(error.args[0])]
    if missing:
        raise CheckpointError(
            "other-optimizer",
            f"{Path(path).parent} was saved with another optimizer than {type(optimizer).__name__}, which needs "
            f"{missing[0]!r}",
            hint="use the opt_class that this run started with, or another output_folder, where `sbkit train` goes on "
                 "from the weights with --init_from",
            file=path)


def differences(here: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Describe why ``saved`` can't be loaded into an object with the state dict ``here``; empty if it can.

    >>> differences({"a": torch.zeros(2, 3)}, {"a": torch.zeros(4, 3)})
    '1 of another shape (a: 4x3 saved, 2x3 here)'
    """
    if not isinstance(saved, Mapping):
        return f"the file holds a {type(saved).__name__}, not a state dict"
    missing = [key for key in here if key not in saved]
    extra = [key for key in saved if key not in here]
    shapes = [
        f"{key}: {_shape(saved[key])} saved, {_shape(value)} here" for key, value in here.items()
        if key in saved and isinstance(value, torch.Tensor) and _shape(saved[key]) != _shape(value)
    ]
    kinds = {"missing in the checkpoint": missing, "only in the checkpoint": extra,
             "of another shape": shapes}
    return "; ".join(f"{len(keys)} {what} ({listed(keys, MAX_NAMED)})" for what, keys in kinds.items() if keys)


def _group_differences(optimizer: torch.optim.Optimizer, state: object) -> str:
    if not isinstance(state, Mapping) or "param_groups" not in state:
        return "the file holds no optimizer state"
    here = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if here != saved:
        return f"its parameter groups have {saved} tensors, and {here} here"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    shapes = []
    for index, param in zip(order, params, strict=True):
        for key, value in state["state"].get(index, {}).items():
            if key in _LIKE_PARAMETERS and isinstance(value, torch.Tensor) and value.shape != param.shape:
                shapes.append(f"{key} of tensor {index}: {_shape(value)} saved, {_shape(param)} here")
                break
    return f"{len(shapes)} of another shape ({listed(shapes, MAX_NAMED)})" if shapes else ""


def _shape(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return "x".join(map(str, value.shape)) or "scalar"
