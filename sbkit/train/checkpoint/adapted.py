"""Checkpoints of an adapted model: megabytes of what was trained, beside one file of the base that they rest on.

    checkpointer: !new:sbkit.train.checkpoint.Checkpointer
        recoverables:
            model: !ref <trained>
    trained: !new:sbkit.train.checkpoint.adapted.Adapted
        model: !ref <model>
        base: !ref <adapters>           # whose frozen parameters lie in FOLDER/base-<hash>.safetensors, once
        folder: !ref <save_folder>
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.nn.adapters import Adapters
from sbkit.system.console import atomic_write
from sbkit.train.checkpoint.state import differences
from sbkit.train.distributed import ranks

#: What the state holds beside tensors: the hash of the base.
BASE = "base"
_AGAIN = "copy it once more from where the run was"


class Adapted(nn.Module):
    """A model whose state dict leaves out the frozen parameters of its base and names these by their hash.

    Arguments
    ---------
    model : torch.nn.Module
        What trains, the base within it.
    base : sbkit.nn.adapters.Adapters or torch.nn.Module
        What was added to the part that stays as it is, or a part with frozen parameters itself.
    folder : str or Path
        Where the base's file is written when a run begins, and looked for when a checkpoint of another base is loaded.
    """

    def __init__(self, model: nn.Module, base: Adapters | nn.Module, folder: str | Path):
        super().__init__()
        base = base.module if isinstance(base, Adapters) else base
        self.model, self.folder = model, Path(folder)
        inside = {id(parameter) for parameter in model.parameters()}
        if not all(id(parameter) in inside for parameter in base.parameters()):
            raise SbkitError("Adapted: the base is not a part of the model", hint="put it into the model's ModuleList")
        self._base = {name: p for name, p in base.named_parameters() if not p.requires_grad}
        if not self._base:
            raise SbkitError("Adapted: nothing in the base is frozen, so a checkpoint would hold all of it",
                             hint="give it adapters (sbkit.nn.adapters.LoRA), or save the model itself")
        self._hashed: tuple[tuple[int, ...], str] = (), ""

    # ------------------------------------------------------------ the base

    def base_hash(self) -> str:
        """SHA-256 of the base's names, shapes and values."""
        versions = tuple(parameter._version for parameter in self._base.values())
        if self._hashed[0] != versions:
            self._hashed = versions, _hash_of(self._base)
        return self._hashed[1]

    def base_file(self, named: str) -> Path:
        """Where the base of this hash lies."""
        return base_file(self.folder, named)

    def start_afresh(self) -> None:
        """Write the base beside the checkpoints that are to come."""
        path = self.base_file(self.base_hash())
        if ranks.is_main() and not path.exists():
            with atomic_write(path, "wb") as out:
                out.write(save({name: p.detach().cpu().contiguous() for name, p in self._base.items()}))

    @torch.no_grad()
    def _take_base(self, named: str) -> None:
        path = self.base_file(named)
        if not path.is_file():
            raise SbkitError(f"the checkpoint rests on another base than this one, and {path} is not there",
                             hint="copy it from the run's save folder, or begin with the encoder the run began with")
        found = read_base(path, named)
        unlike = differences(self._base, found)
        if unlike:
            raise SbkitError(f"{path} is the base of another model: {unlike}", hint="has the recipe changed?")
        for name, parameter in self._base.items():
            parameter.copy_(found[name])

    # ------------------------------------------------------------ a checkpoint

    def saved(self) -> list[Tensor]:
        """All that the run's files hold: each checkpoint's own, and the base."""
        return list(super().state_dict(keep_vars=True).values())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # takes nothing
        """All tensors of the model but the base's frozen parameters, and the hash of these."""
        base = {id(parameter) for parameter in self._base.values()}
        kept = super().state_dict(keep_vars=True)
        return {name: value.detach() for name, value in kept.items() if id(value) not in base} | {
            BASE: self.base_hash()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Take a state; its base is read from the folder where this model has another."""
        unlike = differences(self.state_dict(), state_dict)
        if unlike:
            raise RuntimeError(unlike)
        if state_dict[BASE] != self.base_hash():
            self._take_base(state_dict[BASE])
        own = {name: value for name, value in state_dict.items() if name != BASE}
        return super().load_state_dict(own, strict=False)


def base_file(folder: Path, named: str) -> Path:
    """Where a folder of checkpoints has the base of this hash."""
    return folder / f"base-{named[:16]}.safetensors"


def read_base(path: Path, named: str) -> dict[str, Tensor]:
    """The parameters of a base from its file, whose values have to be those of this hash."""
    try:
        found = load_file(path)
    except Exception as error:  # safetensors has its own for each way in which a file can be damaged
        raise SbkitError(f"{path} is damaged: {error}", hint=_AGAIN) from error
    if _hash_of(found) != named:
        raise SbkitError(f"{path} is damaged: its values are not those that it is named by", hint=_AGAIN)
    return found


def _hash_of(base: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(base.items()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data if tensor.numel() else b""
