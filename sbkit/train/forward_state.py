"""State that forwards change (running means, codebooks), restored when a step is skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, get_default_hook
from torch import nn

from sbkit.train import rng
from sbkit.train.checkpoint.state import TENSORS

# A larger tensor is copied at each step only after it was seen to change: most of them are constant tables.
SMALL = 1 << 16

Kind = tuple[torch.Size, torch.dtype, torch.device]


class ModuleAttribute(NamedTuple):
    """An attribute of a module, whose value the module may replace."""

    owner: nn.Module
    name: str

    def get(self) -> torch.Tensor | float:
        return getattr(self.owner, self.name)


class ForwardState:
    """A copy of modules' buffers, and of statistics in modules with their own save hooks (``InputNormalization``).

        state.save()                    # before a step's first forward
        ...
        state.restore(found_inf)        # after its update; does not wait for the device

    Copies of tensors with the same dtype share one block of memory, so saving and restoring takes few kernels. Numbers
    on the host, and tensors with a new shape, can't be chosen on the device. Only for a step with such values does the
    host wait to learn whether the step was skipped. SpeechBrain's ``InputNormalization`` is such a case, but it makes
    the host wait in each forward anyway.
    """

    def __init__(self, modules: nn.Module):
        self._attributes = [*_buffers(modules), *_attributes(modules)]
        self._constants: dict[int, tuple[int, int]] = {}  # marks of large tensors that never changed
        self._before: dict[int, Any] = {}
        self._marks: dict[int, tuple[int, int]] = {}
        self._groups: list[_Group] = []
        self._written: set[int] = set()
        self._first_step_done = False
        self.found_new_buffers = False
        """Whether the last step wrote to a tensor for the first time, after the first step."""

    @torch.no_grad()
    def save(self) -> None:
        """Copy the present values."""
        for i, mark in list(self._constants.items()):
            if mark != _mark(self._attributes[i].get()):
                del self._constants[i]
        self._before = {i: attribute.get() for i, attribute in enumerate(self._attributes) if i not in self._constants}
        tensors = {i: value for i, value in self._before.items() if isinstance(value, torch.Tensor)}
        kinds = {i: _kind(value) for i, value in tensors.items()}
        if kinds != {i: kind for group in self._groups for i, kind in group.kinds.items()}:
            self._groups = _grouped(kinds)
        for group in self._groups:
            torch._foreach_copy_(list(group.before.values()), [tensors[i] for i in group.kinds])
        self._marks = {i: _mark(value) for i, value in tensors.items()}

    @torch.no_grad()
    def restore(self, where: torch.Tensor | None = None) -> None:
        """Restore the values of the last ``save``, always or only if ``where`` (a scalar on the device) is 1."""
        if not self._before:  # no save since the last call
            return
        now: dict[int, Any] = {i: self._attributes[i].get() for i in self._before}
        unrestorable = {i for i, before in self._before.items() if _differ(before, now[i])}
        if unrestorable and (where is None or bool(where > 0)):
            kept = {i: view for group in self._groups for i, view in group.before.items()}
            for i in unrestorable:
                setattr(*self._attributes[i], kept[i].clone() if i in kept else self._before[i])
        constants = self._find_written(now) if where is not None else []
        for group in self._groups:
            group.restore({i: now[i] for i in group.kinds if i not in unrestorable}, where)
        self._constants |= {i: _mark(now[i]) for i in constants}
        self._before = {}

    def _find_written(self, now: dict[int, Any]) -> list[int]:
        """Find which tensors this step wrote to; return the constant tables after the first step.

        BatchNorm's kernels leave no trace in a tensor's version, but its counter changes.
        """
        written = {i for i, mark in self._marks.items() if mark != _mark(now[i])}
        self.found_new_buffers = self._first_step_done and not written <= self._written
        self._written |= written
        large = [] if self._first_step_done else [
            (i, view) for group in self._groups for i, view in group.before.items() if view.numel() > SMALL]
        self._first_step_done = True
        return [i for i, view in large if _kind(now[i]) == _kind(view) and torch.equal(now[i], view)]


class _Group:
    """Two blocks of memory for tensors of one dtype on one device: their kept values and their present ones."""

    def __init__(self, kinds: dict[int, Kind]):
        self.kinds = kinds
        shapes = [shape for shape, _, _ in kinds.values()]
        _, dtype, device = next(iter(kinds.values()))
        self._before = torch.empty(sum(map(torch.Size.numel, shapes)), dtype=dtype, device=device)
        self._now = torch.empty_like(self._before)
        self.before = dict(zip(kinds, _views(self._before, shapes), strict=True))
        self._now_views = dict(zip(kinds, _views(self._now, shapes), strict=True))

    def restore(self, tensors: dict[int, torch.Tensor], where: torch.Tensor | None) -> None:
        if where is None:
            for i, tensor in tensors.items():
                if not torch.equal(tensor, self.before[i]):  # copying would change the version of an unchanged one
                    tensor.copy_(self.before[i])
        elif tensors:
            present, views = list(tensors.values()), [self._now_views[i] for i in tensors]
            torch._foreach_copy_(views, present)
            torch.where(where.to(self._now.device) > 0, self._before, self._now, out=self._now)
            torch._foreach_copy_(present, views)


def _views(whole: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    pieces = whole.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _grouped(kinds: dict[int, Kind]) -> list[_Group]:
    members: dict[Any, dict[int, Kind]] = {}
    for i, kind in kinds.items():
        members.setdefault(kind[1:], {})[i] = kind
    return [_Group(each) for each in members.values()]


def _kind(value: torch.Tensor) -> Kind:
    return value.shape, value.dtype, value.device


def _mark(value: object) -> tuple[int, int]:
    """Return a mark that changes when the tensor is written to or replaced."""
    return id(value), value._version if isinstance(value, torch.Tensor) else 0


def _differ(before: object, now: object) -> bool:
    """Return whether a value can't be restored on the device: its shape changed, or it is a number that changed."""
    if isinstance(before, torch.Tensor):
        return not isinstance(now, torch.Tensor) or _kind(now) != _kind(before)
    return now is not before and now != before


def _buffers(modules: nn.Module) -> list[ModuleAttribute]:
    found: dict[int, ModuleAttribute] = {}
    for owner in modules.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if _can_be_written(buffer):
                found.setdefault(id(buffer), ModuleAttribute(owner, name))
    return list(found.values())


def _attributes(modules: nn.Module) -> list[ModuleAttribute]:
    """Return tensors and numbers in modules with their own save hooks, which are in no state dict."""
    return [ModuleAttribute(owner, name)
            for owner in modules.modules() if get_default_hook(owner, DEFAULT_SAVE_HOOKS) not in TENSORS
            for name, value in vars(owner).items()
            if name != "training" and (isinstance(value, (int, float)) or _can_be_written(value))]


def _can_be_written(value: object) -> bool:
    """Return False for an expanded view and for a tensor without storage, which can't be copied to."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta" and \
        torch._debug_has_internal_overlap(value) != 1


@contextlib.contextmanager
def restoring(holders: Iterable[nn.Module], device: torch.device | str) -> Iterator[None]:
    """Restore the attributes of modules and the random generators on exit; clearing gradients is up to the caller."""
    generators = rng.capture(device)
    before = {module: {name: dict(value) if name in ("_parameters", "_buffers") else value
                       for name, value in vars(module).items()} for root in holders for module in root.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
        rng.restore(generators, device)
