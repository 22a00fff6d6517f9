"""The hook that saves an object to a file, or loads it, and what no hook saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from speechbrain.core import Brain
from speechbrain.nnet.schedulers import InverseSquareRootScheduler
from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    get_default_hook,
    torch_save,
    torch_save_once_per_node,
)
from torch.optim import Optimizer

from sbkit.train.checkpoint.state import load_file

Hook = Callable[..., Any]  # saves an object to a path, or loads it
TENSORS = (torch_save, torch_save_once_per_node)  # hooks that only save a state dict


def saving_hook(obj: object, custom: Hook | None = None) -> Hook:
    """Return the hook that saves an object, by SpeechBrain's rules."""
    hook = custom or get_default_hook(obj, DEFAULT_SAVE_HOOKS)
    if hook is None:
        raise _unknown("save", obj)
    return hook


def loading_hook(obj: object, custom: Hook | None = None) -> Hook:
    """Return the hook that loads an object, by SpeechBrain's rules."""
    hook = custom or get_default_hook(obj, DEFAULT_LOAD_HOOKS) or get_default_hook(obj, _MISSING_LOAD_HOOKS)
    if hook is None:
        raise _unknown("load", obj)
    return hook


def _unknown(verb: str, obj: object) -> RuntimeError:
    return RuntimeError(f"Don't know how to {verb} {type(obj)}. Register default hook or add custom hook "
                        "for this object.")


def _load_attributes(obj: object, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
    del end_of_epoch  # SpeechBrain gives it to every load hook; attributes don't depend on it
    vars(obj).update(load_file(path))


# SpeechBrain can save this one but not load it, so a resume would fail.
_MISSING_LOAD_HOOKS: dict[type, Hook] = {InverseSquareRootScheduler: _load_attributes}


def unsaved_state(recoverables: Mapping[str, Any]) -> list[str]:
    """Return warnings about modules in recoverables with state outside of the state dict, and a Brain's optimizers."""
    saved = set(map(id, recoverables.values()))
    warnings = []
    for name, obj in recoverables.items():
        for path, module in obj.named_modules() if isinstance(obj, torch.nn.Module) else ():
            hook = get_default_hook(module, DEFAULT_SAVE_HOOKS)
            if path and hook not in TENSORS and id(module) not in saved:
                warnings.append(f"{name}.{path} ({type(module).__name__}) has state that is not in the state dict of "
                                f"{name!r} and so is not saved: add it to the recoverables")
        for attribute, optimizer in vars(obj).items() if isinstance(obj, Brain) else ():
            if isinstance(optimizer, Optimizer) and id(optimizer) not in saved and _has_tensors(optimizer):
                warnings.append(f"{attribute} ({type(optimizer).__name__}) is not among the recoverables, so a run "
                                "that resumes differs from one that was never stopped: in init_optimizers, call "
                                f"self.checkpointer.add_recoverable({attribute!r}, self.{attribute})")
    return warnings


def _has_tensors(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a state, as those have after a step; plain SGD has none."""
    return any(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())
