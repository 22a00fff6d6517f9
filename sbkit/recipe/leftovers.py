"""Removes fake tensors that a forward leaves in caches and attributes, and reports those that it can't.

A layer may keep a table of positions, a class or a file a memo, a function its cache. If one of these were fake,
training would compute with it. In three steps:

1. Before the forward, ``restored`` copies each dict, list, set and deque that can be reached from the Brain.
2. After it, those that got a fake tensor get their former contents, and a ``functools.cache`` with one is emptied.
3. If a fake tensor still exists, the objects that refer to it are searched for a name, and the check ends with that.

A process that is thrown away would need none of this, but there is no good one. The forward also runs in a training,
for its FLOPs and the depth of layers, and torch refuses fake GPU tensors in a fork of a process that has used CUDA,
because it initialises CUDA for them. A fresh process imports torch and SpeechBrain again, which takes seconds. And for
the five forwards of the flagship's check, these steps take about as long as five forks, 0.4 s.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import TensorWeakRef

from sbkit.errors import SbkitError

_CONTAINERS = (dict, list, set, deque)
Container = dict[Any, object] | list[object] | set[object] | deque[object]
_CACHE = type(functools.cache(len))
_OPAQUE = (type, ModuleType, FrameType, GeneratorType, _CACHE)  # not looked into; a cache is emptied instead
_DEPTH = 8  # levels of objects that are followed from a fake tensor to what holds it


class FakeTensors:
    """The fake tensors that a forward creates, recorded, because to search all objects for them takes longer."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._refs: list[TensorWeakRef] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record each one that is created within it."""
        real = FakeTensor.__new__

        def new(cls: type[FakeTensor], *args: Any, **kwargs: Any) -> FakeTensor:  # Any: of torch's own constructor
            fake = real(cls, *args, **kwargs)
            self._refs.append(TensorWeakRef(fake))
            return fake

        with mock.patch.object(FakeTensor, "__new__", new):
            yield

    def alive(self) -> list[FakeTensor]:
        """Return those that still exist."""
        return [fake for ref in self._refs if (fake := ref()) is not None]

    def raise_if_left(self) -> None:
        """Raise if one still exists."""
        if not self.alive():
            return
        gc.collect()  # objects that hold each other
        names = sorted({_name(leak) for leak in self.alive()})
        if names:
            raise SbkitError(
                f"a forward on fake tensors, which counts what a step costs, leaves some in "
                f"{', '.join(names[:3])}{' and more' if names[3:] else ''}, where training would use them",
                hint="register such a tensor as a buffer, or compute it in each forward")


@contextlib.contextmanager
def restored(fakes: FakeTensors, *roots: object) -> Iterator[None]:
    """Copy all containers that can be reached from some objects, and put back what fake tensors replaced in them.

    These include attributes, and the globals of the files in which the classes are defined. Functions' caches are
    emptied.
    """
    copies: dict[int, tuple[Container, Container]] = {}
    tensors: list[torch.Tensor] = []
    for each in _reached(roots, set()):
        if isinstance(each, torch.Tensor):
            tensors.append(each)
        else:
            # Without the container's own ``[]``, which might build items.
            copies[id(each)] = each, dict(dict.items(each)) if isinstance(each, dict) else list(each)
    try:
        yield
    finally:
        for tensor in tensors:
            if type(tensor.grad) is FakeTensor:
                tensor.grad = None
        if fakes.alive():
            for container, before in copies.values():  # only those with a new fake tensor: a cache of real ones stays
                known = {id(value) for value in _values(before)}
                new = [value for value in _values(container) if id(value) not in known]
                if new and any(type(each) is FakeTensor for each in _reached(new, {*copies})):
                    container.clear()
                    fill: Callable[[Any], None] = (
                        container.extend if isinstance(container, (list, deque)) else container.update)
                    fill(before)
                    new.clear()  # it would keep them alive
        if fakes.alive():
            # A functools.cache can't be copied or asked for its values, but the garbage collector knows what it refers
            # to.
            plain = (torch.Tensor, tuple, *_CONTAINERS)
            for cache in [each for each in gc.get_objects() if type(each) is _CACHE]:
                held = [each for each in gc.get_referents(cache) if isinstance(each, plain)]
                if any(type(each) is FakeTensor for each in _reached(held, {id(vars(cache))})):
                    cache.cache_clear()


def _reached(roots: Iterable[object], seen: set[int]) -> Iterator[torch.Tensor | Container]:
    """Yield the tensors and containers that can be reached; an object's ``__dict__`` is one of them."""
    stack, classes = list(roots), set[type]()
    while stack:
        each = stack.pop()
        if id(each) in seen or type(each) in weakref.ProxyTypes or isinstance(each, _OPAQUE):
            continue
        if not gc.is_tracked(each) and not isinstance(each, _CONTAINERS):  # most objects: numbers, texts
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, FunctionType):
            stack += [each.__dict__, *(each.__closure__ or ())]
        elif isinstance(each, CellType):
            stack += gc.get_referents(each)
        elif isinstance(each, _CONTAINERS):
            yield each
            stack += _values(each)
        elif isinstance(each, (tuple, frozenset)):
            stack += each
        else:
            stack += [getattr(each, "__dict__", None), *gc.get_referents(each)]
            for kind in type(each).__mro__:  # attributes of its class, and globals of the file that defines it
                if kind not in classes and not (kind.__module__ == "builtins" or kind.__module__.startswith("torch.")):
                    classes.add(kind)
                    space = vars(sys.modules.get(kind.__module__, object))
                    stack += [value for held in (vars(kind), space) for value in held.values()
                              if isinstance(value, _CONTAINERS)]
                    if isinstance(space, dict) and id(space) not in seen:
                        seen.add(id(space))
                        yield space


def _values(container: Container) -> list[object]:
    return list(container.values() if isinstance(container, dict) else container)


def _name(leak: FakeTensor) -> str:
    """Name the object, class or file that holds a fake tensor, and the attribute."""
    level: list[object] = [leak]
    seen, inside = {id(leak)}, {id(leak)}
    for _ in range(_DEPTH):  # from the inside out
        level = [each for each in gc.get_referrers(*level) if id(each) not in seen and not isinstance(each, FrameType)]
        seen |= {id(each) for each in level}
        for holder in level:
            held = getattr(holder, "__dict__", {})
            attribute = next((key for key, value in held.items() if id(value) in inside), None)
            if attribute is not None and not isinstance(holder, FunctionType):
                named = holder if isinstance(holder, (type, ModuleType)) else type(holder)
                return f"{named.__name__}.{attribute}"
            inside.add(id(holder))
        level = [each for each in level if not isinstance(each, (type, ModuleType, FunctionType))]
    return "something in torch"
