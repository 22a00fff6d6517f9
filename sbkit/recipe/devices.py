"""The table of modules and their devices, found by moving the modules to torch's ``meta`` device."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sbkit.recipe.build import Built
from sbkit.recipe.ownership import (
    Owned,
    left_behind,
    optimized_by,
    recoverables,
    report_left_behind,
    saved_by,
)
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace, trace_moved


def section(built: Built, owned: Owned) -> Section:
    """A table with one row per module of the recipe: its size, trainable share, optimizer and checkpoint.

    The column of the device is empty until ``check_moved`` fills it.
    """
    found = recoverables(built)
    saved = {name: saved_by(obj) for name, obj in (found or {}).items()}
    trains = {"opt_class": "yes", "": "no"}.get(by := optimized_by(built), by)
    rows = []
    for key, module in _listed(built, owned):
        parameters = list(module.parameters())
        size = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        state = parameters or list(module.state_dict(keep_vars=True).values())
        holders = [name for name, held in saved.items() if state and all(id(tensor) in held for tensor in state)]
        rows.append([key, type(module).__name__, f"{size:,}", f"{100 * trained / size:.0f}%" if size else "-", "",
                     (trains if trained else "no") if size else "-", (", ".join(holders) or "no") if state else "-"])
    total = [p for root in owned.roots.values() for p in root.parameters()]
    distinct = {id(p): p for p in total}.values()
    count = sum(p.numel() for p in distinct)
    columns = ["key", "class", "parameters", "trainable", "to device", "optimizer", "checkpoint"]
    remarks = [f"{count:,} parameters; moved to the meta device to find tensors that stay behind"]
    if found is None:
        rows = [[*row[:-1], "-"] for row in rows]
        remarks.append("the contents of checkpoints are unknown: the checkpointer is missing or could not be built")
    if any(isinstance(each, _BatchNorm) for root in owned.roots.values() for each in root.modules()):
        remarks.append("BatchNorm normalises over one micro-batch on all devices: if a step has several, the number of "
                       "devices and the size of a micro-batch change the training")
    return Section("Modules", columns, rows, remarks)


def _listed(built: Built, owned: Owned) -> list[tuple[str, nn.Module]]:
    """The modules that have a key in the recipe; for a container, its members."""
    keys: dict[int, tuple[str, nn.Module]] = {}
    for name, root in owned.roots.items():
        inner = [m for m in _members(root) if built.origin(m) is not None and m is not root]
        for module in inner or [root]:
            origin = built.origin(module)
            keys.setdefault(id(module), (origin.key if origin is not None and inner else name, module))
    return list(keys.values())


def _members(module: nn.Module) -> list[nn.Module]:
    """The members of a ModuleList, ModuleDict or Sequential, including nested ones; otherwise the module itself."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
        return [module]
    return [inner for child in module.children() for inner in _members(child)]


def check_moved(owned: Owned, table: Section, traced: Trace, findings: Findings) -> str:
    """Move the modules to ``meta`` to find tensors that stay behind, then run the forward on a fake GPU.

    A constant that stays behind is a finding, unless the forward that uses it works. The modules can't be used
    afterwards. Returns what couldn't be tried, if anything.
    """
    built, modules = traced.built, nn.ModuleDict(owned.roots)
    listed = _listed(built, owned)
    modules.to("meta")
    left, note = left_behind(built, owned), ""
    for row, (_, module) in zip(table.rows, listed, strict=True):
        inside = {id(each) for each in module.modules()}
        stays = [tensor for tensor in left if tensor.module is not None and id(tensor.module) in inside]
        kinds = {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}
        row[4] = f"{len(stays)} tensors stay on cpu" if stays else "no tensors" if not kinds else \
            "moved" if kinds == {"meta"} else "stays on cpu"
    if traced.complete:
        note = trace_moved(traced, modules, findings).note
        # tensors that the forward uses work, or were reported when it failed
        left = [t for t in left if t.path.split(".")[0].split("[")[0] not in traced.outputs]
    if traced.complete or (traced.task is None and "brain" not in built.nodes):
        report_left_behind(left, owned, findings)
    return f"on a GPU, {note}" if note else ""
