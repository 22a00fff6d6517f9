"""Reads the weights of a source, as tensors only, checks that they fit a model, and loads them into it."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError, first_line
from sbkit.nn.adapters import is_added
from sbkit.system import untrusted

#: The names of weight_norm's two tensors in old versions of torch, and now.
_OLD_NAMES = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
_LISTED = 6  # groups of tensors in a message
_AGAIN = "if the download is incomplete, download it again"


class TensorFiles:
    """The tensors of some files; each is read only when it is used.

    paths : safetensors files, or files of torch.save that hold only tensors
    prefixes : possible prefixes of the encoder's tensors' names in a larger model
    """

    def __init__(self, paths: Sequence[Path], prefixes: Sequence[str]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes by name, where names are the encoder's own, without a prefix."""
        self._read: dict[str, Any] = {}
        tensors: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for path in paths:
            tensors |= _safetensors(path) if path.suffix == ".safetensors" else _saved(path)
        prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in tensors)), "")
        for name, (read, shape) in tensors.items():
            name_in_encoder = renamed(name.removeprefix(prefix))
            self.shapes[name_in_encoder] = shape
            self._read[name_in_encoder] = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()


def _safetensors(path: Path) -> dict[str, tuple[Any, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")  # its methods have no types
        return {name: (lambda name=name: file.get_tensor(name), tuple(file.get_slice(name).get_shape()))
                for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SbkitError("damaged-pretrained", f"{path} is incomplete or not a safetensors file: {error}", hint=_AGAIN,
                         file=path) from error


def _saved(path: Path) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Open a file of torch.save without running code from it."""
    try:
        state = untrusted.load_tensors(path, mmap=True)
    except pickle.UnpicklingError as error:
        raise SbkitError("unsafe-file", f"{path} holds more than tensors, so loading it could run code", file=path,
                         hint="save the model again with transformers: save_pretrained writes safetensors") from error
    except (OSError, ValueError) as error:
        raise SbkitError("damaged-pretrained", f"{path} is incomplete or not a file of torch.save: {first_line(error)}",
                         hint=_AGAIN, file=path) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise SbkitError("damaged-pretrained", f"{path} does not map names to tensors", file=path,
                         hint="name a folder that was written by save_pretrained of transformers")
    return {name: (lambda value=value: value, tuple(value.shape)) for name, value in state.items()}


def renamed(name: str) -> str:
    """Return the current name of a tensor of torch's weight_norm."""
    head, _, last = name.rpartition(".")
    return f"{head}.{_OLD_NAMES[last]}" if last in _OLD_NAMES and head.endswith("conv") else name


# ---------------------------------------------------------------------------------------------- into a model


def check(model: nn.Module, files: TensorFiles, source: str) -> list[str]:
    """Raise if the weights do not fit the model; returns lines to log about them.

    Tensors in the model's ``reinitialised``, which only training uses, and those of adapters may be missing: they keep
    their random values.
    """
    needed = {name: tuple(value.shape) for name, value in model.state_dict().items() if not is_added(name)}
    missing = needed.keys() - files.shapes.keys()
    random = missing & set(getattr(model, "reinitialised", ()))
    if missing - random:
        raise SbkitError("pretrained-mismatch", f"{source} lacks {len(missing - random)} of the {len(needed)} tensors "
                         f"that its encoder needs: {_groups(missing - random)}", value=source,
                         hint="are its config.json and its weights of the same model?")
    wrong = {name for name in needed.keys() & files.shapes.keys() if needed[name] != files.shapes[name]}
    if wrong:
        name = min(wrong)
        raise SbkitError("pretrained-mismatch",
                         f"{source}: {len(wrong)} tensors have another shape than its config.json "
                         f"says, such as {name}: {list(files.shapes[name])}, not {list(needed[name])}", value=source,
                         hint="are its config.json and its weights of the same model?")
    surplus = files.shapes.keys() - needed.keys()
    lines = [f"{len(needed) - len(random)} tensors loaded"]
    if surplus:
        lines.append(f"left out, since this encoder does not use them: {_groups(surplus)}")
    if random:
        lines.append(f"reinitialised, since the source lacks them: {', '.join(sorted(random))}")
    return lines


@torch.no_grad()
def fill(model: nn.Module, files: TensorFiles) -> None:
    """Copy the tensors into the model, reading one at a time."""
    for name, value in model.state_dict(keep_vars=True).items():
        if name in files.shapes:
            value.copy_(files[name])


def _groups(names: Iterable[str]) -> str:
    """Format names of tensors by module, all layers as one: ``encoder.layers (12), lm_head (2)``."""
    counted: Counter[str] = Counter()
    for name in sorted(names):
        group, *_ = re.split(r"\.\d+\.", name, maxsplit=1)
        if group == name:  # not of a list of layers
            group = ".".join(name.split(".")[:-1][:3]) or name
        counted[group] += 1
    shown = [f"{group} ({count})" for group, count in counted.most_common(_LISTED)]
    more = [f"{len(counted) - _LISTED} more kinds"] if len(counted) > _LISTED else []
    return ", ".join([*shown, *more])
