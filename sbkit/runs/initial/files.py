"""Reads tensors from files of several formats; no code in them can run."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file as load_safetensors
from speechbrain.utils.checkpoints import hook_on_loading_state_dict_checkpoint
from torch import nn

from sbkit.errors import SbkitError, first_line
from sbkit.train.averaging import weights_in
from sbkit.train.checkpoint.adapted import BASE
from sbkit.train.checkpoint.state import load_file

V = TypeVar("V")

_AGAIN = "copy, download or export it again"
#: The metadata field with the recipe's key for each index of a ModuleList, as JSON.
PARTS = "parts"
#: The state of SpeechBrain's InputNormalization.
STATISTICS = {"count", "glob_mean", "glob_std"}


def tensors_in(path: Path, lazily: bool = False) -> dict[str, Any] | None:
    """A state dict from a safetensors file, whatever its extension, or from a file of torch.

    None if the file is intact but has something else.

    lazily : read values on first use
    """
    if _is_safetensors(path):
        return _safetensors(path)
    try:
        if not _is_torchs(path):
            raise ValueError("its format is unknown")
        state = load_file(path, lazily=lazily)
    except SbkitError as error:
        as_tensors = "save it as a state dict of tensors, best as .safetensors"
        raise SbkitError(error.code, f"init_from: {error.message}",
                         hint=as_tensors if error.code == "unsafe-file" else error.hint,
                         file=path, key="init_from") from error
    except Exception as error:  # torch raises many types for other or truncated files
        raise SbkitError("damaged-file",
                         f"init_from: {path} is damaged, incomplete, or not a file of weights: {first_line(error)}",
                         hint=_AGAIN, file=path, key="init_from") from error
    return _plain(state)


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_safetensors(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise SbkitError("damaged-file", f"init_from: {path} is damaged or incomplete: {error}", hint=_AGAIN,
                         file=path, key="init_from") from error


def by_parts(path: Path, state: Mapping[str, V]) -> dict[str, V]:
    """A file's tensors, with a ModuleList's indices replaced by the recipe's keys if the metadata has these."""
    metadata: Any = {}  # whatever JSON the file has
    if _is_safetensors(path):
        with contextlib.suppress(SafetensorError, OSError, ValueError, RecursionError), \
                safe_open(path, framework="numpy") as file:  # foreign, or damaged: tensors_in reports it
            metadata = json.loads((file.metadata() or {}).get(PARTS, "{}"))
    keys = {}
    if isinstance(metadata, dict):
        keys = {index: key for index, key in metadata.items() if isinstance(key, str)}
    by_key = {}
    for name, value in state.items():
        index, dot, rest = name.partition(".")
        by_key[f"{keys.get(index, index)}{dot}{rest}"] = value
    return by_key


def plain_state(path: Path, lazily: bool = False) -> dict[str, Any] | None:
    """The tensors of a checkpoint's file, or a moving average of them; None for anything else."""
    if not _is_safetensors(path) and not zipfile.is_zipfile(path):
        return None  # a counter or the like
    state = _safetensors(path) if _is_safetensors(path) else load_file(path, lazily=lazily)
    if isinstance(state, Mapping) and weights_in(state) is not state:
        return dict(state)
    return _plain(state)


def looks_like_tensors(path: Path) -> bool:
    """Whether a file begins like one with tensors."""
    return _is_safetensors(path) or _is_torchs(path)


def _plain(state: object) -> dict[str, Any] | None:
    """Tensors by name, and the hash of an adapted model's base."""
    if not isinstance(state, Mapping):
        return None
    state = weights_in(hook_on_loading_state_dict_checkpoint(dict(state)))
    if set(state) == STATISTICS:  # an InputNormalization's
        statistics = {name: torch.as_tensor(value) for name, value in state.items()}
        return statistics if statistics["count"] > 0 else {}
    if not state:
        return None
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, str if name == BASE else torch.Tensor):
            return None
    return dict(state)


def _is_torchs(path: Path) -> bool:
    """Whether this is a zip archive of torch, or a pickle of its old format."""
    with open(path, "rb") as file:
        return zipfile.is_zipfile(path) or file.read(1) == b"\x80"


def _is_safetensors(path: Path) -> bool:
    """Judge by the extension, or by the header: eight bytes of length, then JSON."""
    if path.suffix == ".safetensors":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return False


# ------------------------------------------------------------ statistics of a corpus, which no state dict has


def counting_modules(modules: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules with running statistics of a whole corpus, by path."""
    for path, module in modules.named_modules():
        if getattr(module, "norm_type", "") == "global" and hasattr(module, "_load_statistics_dict"):
            yield path, module
