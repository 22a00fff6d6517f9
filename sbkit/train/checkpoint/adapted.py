"""Checkpoints of adapted models: small files with what was trained, and one file with the frozen base.

    checkpointer: !new:sbkit.train.checkpoint.Checkpointer
        recoverables:
            model: !ref <trained>
    trained: !new:sbkit.train.checkpoint.adapted.Adapted
        model: !ref <model>
        base: !ref <adapters>           # its frozen parameters are saved once, in FOLDER/base-<hash>.safetensors
        folder: !ref <save_folder>
"""

from __future__ import annotations

import hashlib
import re
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

#: Key in the state of the hash of the base.
BASE = "base"
_COPY_HINT = "copy it again from the run's save folder"


class Adapted(nn.Module):
    """A model with a state dict that holds the hash of the base's frozen parameters instead of these.

    model : torch.nn.Module
        The whole model, including the base.
    base : sbkit.nn.adapters.Adapters or torch.nn.Module
        The adapters of the frozen part, or a part with frozen parameters.
    folder : str or Path
        Folder of the base's file, which is written at the start of a run, and read if a checkpoint has another base.
    """

    def __init__(self, model: nn.Module, base: Adapters | nn.Module, folder: str | Path):
        super().__init__()
        base = base.module if isinstance(base, Adapters) else base
        self.model = model
        self.folder = Path(folder)
        in_model = {id(parameter) for parameter in model.parameters()}
        if not all(id(parameter) in in_model for parameter in base.parameters()):
            raise SbkitError("bad-adapted",
                             "Adapted: the base is not part of the model",
                             hint="put it into the model's ModuleList")
        self._base = {name: p for name, p in base.named_parameters() if not p.requires_grad}
        if not self._base:
            raise SbkitError("bad-adapted",
                             "Adapted: nothing in the base is frozen, so a checkpoint would hold all of it",
                             hint="give it adapters (sbkit.nn.adapters.LoRA), or save the model itself")
        self._hashed: tuple[tuple[int, ...], str] = (), ""  # versions of the base's tensors, and their hash

    # ------------------------------------------------------------ the base

    def base_hash(self) -> str:
        """Return the SHA-256 of the base's names, shapes and values."""
        versions = tuple(parameter._version for parameter in self._base.values())
        if self._hashed[0] != versions:
            self._hashed = versions, hash_of(self._base)
        return self._hashed[1]

    def start_afresh(self) -> None:
        """Write the base at the start of a run, unless its file exists."""
        path = base_file(self.folder, self.base_hash())
        if ranks.is_main() and not path.exists():
            with atomic_write(path, "wb") as out:
                out.write(save({name: p.detach().cpu().contiguous() for name, p in self._base.items()}))

    # ------------------------------------------------------------ a checkpoint

    def saved(self) -> list[Tensor]:
        """Return all tensors that the run saves, in checkpoints and in the base's file."""
        return list(super().state_dict(keep_vars=True).values())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # takes nothing
        """Return the tensors of the model without the base's frozen parameters, and the hash of these."""
        in_base = {id(parameter) for parameter in self._base.values()}
        whole = super().state_dict(keep_vars=True)
        trained = {name: value.detach() for name, value in whole.items() if id(value) not in in_base}
        return trained | {BASE: self.base_hash()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # torch's own
        """Load a state; if it has another base, read that from the folder."""
        difference = differences(self.state_dict(), state_dict)
        if difference:
            raise RuntimeError(difference)
        if state_dict[BASE] != self.base_hash():
            path = base_file(self.folder, state_dict[BASE])
            if not path.is_file():
                raise SbkitError("missing-base",
                                 f"the checkpoint was trained on another base model, and {path} doesn't exist",
                                 hint="copy it from the run's save folder, or start from the same encoder as the run",
                                 file=path)
            base = read_base(path, state_dict[BASE])
            difference = differences(self._base, base)
            if difference:
                raise SbkitError("other-model",
                                 f"{path} is the base of another model: {difference}",
                                 hint="did the recipe change?",
                                 file=path)
            with torch.no_grad():
                for name, parameter in self._base.items():
                    parameter.copy_(base[name])
        trained = {name: value for name, value in state_dict.items() if name != BASE}
        return super().load_state_dict(trained, strict=False)


def base_file(folder: Path, expected_hash: str) -> Path:
    """Return the file of the base with this hash in a folder of checkpoints; the hash may come from elsewhere."""
    if not re.fullmatch("[0-9a-f]{64}", expected_hash):
        raise SbkitError("damaged-checkpoint",
                         f"a checkpoint in {folder} names its base by {expected_hash[:80]!r}, which is not a hash",
                         hint=_COPY_HINT, file=folder)
    return folder / f"base-{expected_hash[:16]}.safetensors"


def read_base(path: Path, expected_hash: str) -> dict[str, Tensor]:
    """Read the parameters of a base from its file, and check them against their hash."""
    try:
        base = load_file(path)
    except Exception as error:  # safetensors has its own error for each kind of damage
        raise SbkitError("damaged-checkpoint", f"{path} is damaged: {error}", hint=_COPY_HINT, file=path) from error
    if hash_of(base) != expected_hash:
        raise SbkitError("damaged-checkpoint",
                         f"{path} is damaged: its values don't match the hash in its name",
                         hint=_COPY_HINT, file=path)
    return base


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors' names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, parameter in sorted(tensors.items()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        values = parameter.detach().cpu().contiguous().reshape(-1)  # a number has no bytes to view
        digest.update(values.view(torch.uint8).numpy().data if len(values) else b"")
    return digest.hexdigest()
