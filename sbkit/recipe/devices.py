"""The table of modules and their devices, found by moving the modules to torch's ``meta`` device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sbkit.recipe.build import Built
from sbkit.recipe.ownership import (
    Owned,
    Tensor,
    left_behind,
    optimized_by,
    recoverables,
    report_left_behind,
    saved_by,
)
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace, trace_moved

#: Columns of the table that are filled one by one.
TRAINABLE, TO_DEVICE, OPTIMIZER, CHECKPOINT = range(3, 7)


def section(built: Built, owned: Owned) -> Section:
    """A table with one row per module of the recipe: its size, trainable share, optimizer and checkpoint.

    The column of the device is empty until ``check_moved`` fills it.
    """
    saved = recoverables(built)
    saved_tensors = {name: saved_by(obj) for name, obj in (saved or {}).items()}
    rows = [_row(key, module, saved_tensors, built) for key, module in _listed(built, owned)]
    parameters = {id(p): p for root in owned.roots.values() for p in root.parameters()}
    count = sum(parameter.numel() for parameter in parameters.values())
    columns = ["key", "class", "parameters", "trainable", "to device", "optimizer", "checkpoint"]
    remarks = [f"{count:,} parameters; moved to the meta device to find tensors that stay behind"]
    if saved is None:
        rows = [[*row[:-1], "-"] for row in rows]
        remarks.append("the contents of checkpoints are unknown: the checkpointer is missing or could not be built")
    if any(isinstance(layer, _BatchNorm) for root in owned.roots.values() for layer in root.modules()):
        remarks.append("BatchNorm normalises over one micro-batch on all devices: if a step has several, the number of "
                       "devices and the size of a micro-batch change the training")
    return Section("Modules", columns, rows, remarks)


def _row(key: str, module: nn.Module, saved_tensors: Mapping[str, Mapping[int, object]], built: Built) -> list[str]:
    """A module's row; a dash where there is nothing to say.

    saved_tensors : what each recoverable saves, by the ids of tensors
    """
    parameters = list(module.parameters())
    state = parameters or list(module.state_dict(keep_vars=True).values())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    maker = optimized_by(built)
    optimizer = {"opt_class": "yes", "": "no"}.get(maker, maker)
    holders = [name for name, saved in saved_tensors.items() if all(id(tensor) in saved for tensor in state)]

    row = [key, type(module).__name__, f"{count:,}", "-", "", "-", "-"]
    if count:
        row[TRAINABLE] = f"{100 * trained / count:.0f}%"
        row[OPTIMIZER] = optimizer if trained else "no"
    if state:
        row[CHECKPOINT] = ", ".join(holders) or "no"
    return row


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
    built = traced.built
    modules = nn.ModuleDict(owned.roots)
    listed = _listed(built, owned)
    modules.to("meta")
    left = left_behind(built, owned)
    for row, (_, module) in zip(table.rows, listed, strict=True):
        row[TO_DEVICE] = _where(module, left)

    note = ""
    if traced.complete:
        note = trace_moved(traced, modules, findings).note
        # Tensors that the forward uses work, or were reported when it failed.
        left = [tensor for tensor in left if tensor.path.split(".")[0].split("[")[0] not in traced.outputs]
    is_script = traced.task is None and "brain" not in built.nodes
    if traced.complete or is_script:
        report_left_behind(left, owned, findings)
    return f"on a GPU, {note}" if note else ""


def _where(module: nn.Module, left: Sequence[Tensor]) -> str:
    """Say what of a module has moved.

    left : tensors that stayed behind, of any module
    """
    layers = {id(layer) for layer in module.modules()}
    staying = [tensor for tensor in left if tensor.module is not None and id(tensor.module) in layers]
    if staying:
        return f"{len(staying)} tensors stay on cpu"
    kinds = {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}
    if not kinds:
        return "no tensors"
    return "moved" if kinds == {"meta"} else "stays on cpu"
