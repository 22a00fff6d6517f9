"""Where every module ends up: a table, proved by moving the modules to a device that holds no memory."""

from __future__ import annotations

import torch
from torch import nn

from sbkit.recipe.build import Built
from sbkit.recipe.ownership import (
    Owned,
    Tensor,
    left_behind,
    optimized_by,
    recoverables,
    saved_by,
    tell_left_behind,
)
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace, gpu_stand_ins, trace_moved


def section(built: Built, owned: Owned) -> Section:
    """One row for each module that a YAML builds: size, trainable share, optimizer, checkpoint.

    The device is filled in by ``prove``.
    """
    saved = {name: saved_by(obj) for name, obj in (recoverables(built) or {}).items()}
    trains = {"opt_class": "yes", "": "no"}.get(by := optimized_by(built), by)
    rows = [_row(key, module, saved, trains) for key, module in _listed(built, owned)]
    total = [p for root in owned.roots.values() for p in root.parameters()]
    distinct = {id(p): p for p in total}.values()
    count = sum(p.numel() for p in distinct)
    columns = ["key", "class", "parameters", "trained", "after the move", "optimizer", "checkpoint"]
    return Section("Modules", columns, rows,
                   [f"{count:,} parameters; moved to the meta device to prove where each tensor goes"])


def _listed(built: Built, owned: Owned) -> list[tuple[str, nn.Module]]:
    """The modules that have a key of their own; a container's members instead of the container."""
    keys: dict[int, tuple[str, nn.Module]] = {}
    for name, root in owned.roots.items():
        inner = [m for m in _members(root) if built.origin(m) is not None and m is not root]
        for module in inner or [root]:
            origin = built.origin(module)
            keys.setdefault(id(module), (origin.key if origin is not None and inner else name, module))
    return list(keys.values())


def _members(module: nn.Module) -> list[nn.Module]:
    """What a ModuleList or ModuleDict holds, lists in lists opened."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
        return [module]
    return [inner for child in module.children() for inner in _members(child)]


def _row(key: str, module: nn.Module, saved: dict[str, dict[int, torch.Tensor]], trains: str) -> list[str]:
    parameters = list(module.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    holders = [name for name, held in saved.items() if parameters and all(id(p) in held for p in parameters)]
    return [key, type(module).__name__, f"{count:,}", f"{100 * trained / count:.0f}%" if count else "-", "",
            (trains if trained else "no") if count else "-", (", ".join(holders) or "no") if count else "-"]


def prove(owned: Owned, table: Section, traced: Trace, findings: Findings) -> None:
    """Move the modules to ``meta`` and see what stays; then run the forward as if they were on a GPU.

    A constant that stays is told of, unless the forward that uses it copes with that. The modules can't be
    used afterwards.
    """
    built, modules = traced.built, nn.ModuleDict(owned.roots)
    listed = _listed(built, owned)
    modules.to("meta")
    left = left_behind(built, owned)
    for row, (_, module) in zip(table.rows, listed, strict=True):
        row[4] = _place(module, left)
    if traced.complete and gpu_stand_ins():
        trace_moved(traced, modules, findings)
    elif traced.complete:
        table.remarks.append(f"no forward on a GPU: torch {torch.__version__} needs a driver to stand in for one")
    if traced.complete:  # the forward copes with what it uses, or it broke and says so
        left = [t for t in left if t.path.split(".")[0].split("[")[0] not in traced.outputs]
    if traced.complete or (traced.task is None and "brain" not in built.nodes):
        tell_left_behind(left, owned, findings)


def _place(module: nn.Module, left: list[Tensor]) -> str:
    inside = {id(m) for m in module.modules()}
    stays = [t for t in left if t.module is not None and id(t.module) in inside]
    if stays:
        return f"{len(stays)} tensors stay on cpu"
    devices = {t.device.type for t in [*module.parameters(), *module.buffers()]}
    if not devices:
        return "holds nothing"
    return "moved" if devices == {"meta"} else "stays on cpu"
