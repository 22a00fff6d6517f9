"""What a forward writes besides gradients (running means, codebooks): kept, and put back when its step is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, get_default_hook
from torch import nn

from sbkit.train.checkpoint.state import TENSORS

# A tensor with more numbers than this is copied at each step only once it was seen to change: most are tables.
_SMALL = 1 << 16

Kind = tuple[torch.Size, torch.dtype, torch.device]


class Place(NamedTuple):
    """Where a value is found, also after its module has replaced it by another object."""

    owner: nn.Module
    name: str

    def get(self) -> Any:
        return getattr(self.owner, self.name)


class ForwardState:
    """Buffers of modules, and the statistics of those that save state of their own (``InputNormalization``).

        state.keep()                    # before a step's first forward
        ...
        state.put_back(found_inf)       # after its update; nothing waits for the device

    Tensors of one type lie side by side in one piece of memory, so that keeping and putting back are a few
    kernels whatever their number. Numbers on the host and tensors that got another shape can't be chosen on the
    device: only for a step that has such (as SpeechBrain's own ``InputNormalization``, which waits in each forward
    anyway) is it asked whether the step counts.
    """

    def __init__(self, modules: nn.Module):
        self._places = [*_buffers(modules), *_attributes(modules)]
        self._tables: dict[int, tuple[int, int]] = {}  # large, and never seen to change: their marks
        self._before: dict[int, Any] = {}
        self._marks: dict[int, tuple[int, int]] = {}
        self._groups: list[_Group] = []
        self._written: set[int] = set()
        self._looked = False
        self.surprise = False
        """Whether the last step wrote to a tensor that the first one left alone, and none since."""

    @torch.no_grad()
    def keep(self) -> None:
        """Remember everything as it is now."""
        for i, mark in list(self._tables.items()):
            if mark != _mark(self._places[i].get()):
                del self._tables[i]
        self._before = {i: place.get() for i, place in enumerate(self._places) if i not in self._tables}
        tensors = {i: value for i, value in self._before.items() if isinstance(value, torch.Tensor)}
        kinds = {i: _kind(value) for i, value in tensors.items()}
        if kinds != {i: kind for group in self._groups for i, kind in group.kinds.items()}:
            self._groups = _grouped(kinds)
        for group in self._groups:
            torch._foreach_copy_(list(group.before.values()), [tensors[i] for i in group.kinds])
        self._marks = {i: _mark(value) for i, value in tensors.items()}

    @torch.no_grad()
    def put_back(self, where: torch.Tensor | None = None) -> None:
        """Give everything the value that was kept: always, or if ``where`` (scalar, 0 or 1, on the device) is 1."""
        if not self._before:  # nothing was kept since
            return
        now = {i: self._places[i].get() for i in self._before}
        odd = {i for i, before in self._before.items() if _differ(before, now[i])}
        if odd and (where is None or bool(where > 0)):
            kept = {i: view for group in self._groups for i, view in group.before.items()}
            for i in odd:
                setattr(*self._places[i], kept[i].clone() if i in kept else self._before[i])
        tables = self._look(now) if where is not None else []
        for group in self._groups:
            group.put_back({i: now[i] for i in group.kinds if i not in odd}, where)
        self._tables |= {i: _mark(now[i]) for i in tables}
        self._before = {}

    def _look(self, now: dict[int, Any]) -> list[int]:
        """Which tensors did this step write to? BatchNorm's kernels leave no trace, but its counter does.

        Gives the tables, after the first step.
        """
        written = {i for i, mark in self._marks.items() if mark != _mark(now[i])}
        self.surprise = self._looked and not written <= self._written
        self._written |= written
        large = [] if self._looked else [
            (i, view) for group in self._groups for i, view in group.before.items() if view.numel() > _SMALL]
        self._looked = True
        return [i for i, view in large if _kind(now[i]) == _kind(view) and torch.equal(now[i], view)]


class _Group:
    """Room for tensors of one type on one device, twice: as they were kept, and as they are now."""

    def __init__(self, kinds: dict[int, Kind]):
        self.kinds = kinds
        shapes = [shape for shape, _, _ in kinds.values()]
        _, dtype, device = next(iter(kinds.values()))
        self._before = torch.empty(sum(map(torch.Size.numel, shapes)), dtype=dtype, device=device)
        self._now = torch.empty_like(self._before)
        self.before = dict(zip(kinds, _views(self._before, shapes), strict=True))
        self._now_views = dict(zip(kinds, _views(self._now, shapes), strict=True))

    def put_back(self, tensors: dict[int, torch.Tensor], where: torch.Tensor | None) -> None:
        if where is None:
            for i, tensor in tensors.items():
                if not torch.equal(tensor, self.before[i]):  # an untouched one must not look changed to anybody
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


def _mark(value: Any) -> tuple[int, int]:
    """Other after the tensor was written to, or replaced."""
    return id(value), value._version if isinstance(value, torch.Tensor) else 0


def _differ(before: Any, now: Any) -> bool:
    """Whether a value can't be chosen on the device: it has another shape, or is a number that changed."""
    if isinstance(before, torch.Tensor):
        return not isinstance(now, torch.Tensor) or _kind(now) != _kind(before)
    return now is not before and now != before


def _buffers(modules: nn.Module) -> list[Place]:
    found: dict[int, Place] = {}
    for owner in modules.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if _can_be_written(buffer):
                found.setdefault(id(buffer), Place(owner, name))
    return list(found.values())


def _attributes(modules: nn.Module) -> list[Place]:
    """Tensors and numbers of modules that save them by a hook of their own, where no state dict has them."""
    return [Place(owner, name)
            for owner in modules.modules() if get_default_hook(owner, DEFAULT_SAVE_HOOKS) not in TENSORS
            for name, value in vars(owner).items()
            if name != "training" and (isinstance(value, (int, float)) or _can_be_written(value))]


def _can_be_written(value: Any) -> bool:
    """False for a view that shows one number several times, and for what has no numbers of its own."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta" and \
        torch._debug_has_internal_overlap(value) != 1
