"""Weights of a source as tensors alone: which there are, how they fit a model, and into it."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.nn.adapters import is_added

#: What torch's weight_norm called its two tensors before it was a parametrization.
_OLD_NAMES = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
_LISTED = 6  # groups that a message names
_AGAIN = "was it downloaded to its end? fetch it again"


class TensorFiles:
    """The tensors of some files, of which none is read before it is asked for.

    Arguments
    ---------
    paths : safetensors, or files of torch.save that hold tensors and nothing else
    prefixes : what the encoder's tensors begin with in a model that has more than the encoder
    """

    def __init__(self, paths: Sequence[Path], prefixes: Sequence[str]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        """By the names that the encoder alone would have."""
        self._read: dict[str, Any] = {}
        found: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for path in paths:
            found |= _safetensors(path) if path.suffix == ".safetensors" else _saved(path)
        prefix = next((each for each in prefixes if any(name.startswith(each) for name in found)), "")
        for name, (read, shape) in found.items():
            own = _renamed(name.removeprefix(prefix))
            self.shapes[own], self._read[own] = shape, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()


def _safetensors(path: Path) -> dict[str, tuple[Any, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        return {name: (lambda name=name: file.get_tensor(name), tuple(file.get_slice(name).get_shape()))
                for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SbkitError(f"{path} is not whole, or no safetensors file: {error}", hint=_AGAIN) from error


def _saved(path: Path) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Of torch.save, without running anything that stands in it."""
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)  # of an old torch
    except pickle.UnpicklingError as error:
        raise SbkitError(f"{path} holds more than tensors, and what else is in it is not run",
                         hint="save the model anew with transformers: save_pretrained writes safetensors") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SbkitError(f"{path} is not whole, or no file of torch.save: {first}", hint=_AGAIN) from error
    if not isinstance(state, Mapping) or not all(isinstance(each, Tensor) for each in state.values()):
        raise SbkitError(f"{path} holds other things than tensors by name", hint="name a folder of transformers")
    return {name: (lambda value=value: value, tuple(value.shape)) for name, value in state.items()}


def _renamed(name: str) -> str:
    head, _, last = name.rpartition(".")
    return f"{head}.{_OLD_NAMES[last]}" if last in _OLD_NAMES and head.endswith("conv") else name


# ---------------------------------------------------------------------------------------------- into a model


def check(model: nn.Module, there: TensorFiles, source: str) -> list[str]:
    """Refuse weights that the model can't do with; gives what is worth telling of them.

    A name in the model's ``drawn_anew`` may be missing, as training alone uses it; adapters begin as they are drawn.
    """
    own = {name: tuple(value.shape) for name, value in model.state_dict().items() if not is_added(name)}
    missing = own.keys() - there.shapes.keys()
    drawn = missing & set(getattr(model, "drawn_anew", ()))
    if missing - drawn:
        raise SbkitError(f"{source} lacks {len(missing - drawn)} of the {len(own)} tensors that its {_kind(model)} "
                         f"needs: {_groups(missing - drawn)}", hint="are its config.json and its weights one model's?")
    other = {name for name in own.keys() & there.shapes.keys() if own[name] != there.shapes[name]}
    if other:
        name = min(other)
        raise SbkitError(f"{source}: {len(other)} tensors have another shape than its config.json says, such as "
                         f"{name}: {list(there.shapes[name])}, not {list(own[name])}",
                         hint="are its config.json and its weights one model's?")
    surplus = there.shapes.keys() - own.keys()
    told = [f"{len(own) - len(drawn)} tensors taken"]
    if surplus:
        told.append(f"left, since this encoder has no use for them: {_groups(surplus)}")
    if drawn:
        told.append(f"drawn anew, since it has none: {', '.join(sorted(drawn))}")
    return told


@torch.no_grad()
def fill(model: nn.Module, there: TensorFiles) -> None:
    """Put the tensors into the model, one at a time."""
    for name, value in model.state_dict(keep_vars=True).items():
        if name in there.shapes:
            value.copy_(there[name])


def _kind(model: nn.Module) -> str:
    return f"{type(model).__name__} encoder"


def _groups(names: Iterable[str]) -> str:
    """Tensors by what they belong to, layers together: ``encoder.layers (12), lm_head (2)``."""
    counted = Counter(_group(name) for name in sorted(names))
    shown = [f"{group} ({count})" for group, count in counted.most_common(_LISTED)]
    more = [f"{len(counted) - _LISTED} more kinds"] if len(counted) > _LISTED else []
    return ", ".join([*shown, *more])


def _group(name: str) -> str:
    head = re.split(r"\.\d+\.", name, maxsplit=1)[0]
    parts = head.split(".")
    return ".".join(parts[:-1][:3]) or name if head == name else head
