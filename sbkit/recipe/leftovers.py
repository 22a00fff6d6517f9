"""Removes fake tensors that a forward leaves in caches and attributes, and reports those that it can't.

A layer may keep a table of positions, a class or a file a memo, a function its cache. If one of these were fake,
training would compute with it. In three steps:

1. Before the forward, ``restored`` copies each dict, list, set and deque that can be reached from the Brain.
2. After it, those that got a fake tensor get their former contents, and a ``functools.cache`` with one is emptied.
3. If a fake tensor still exists, the objects that refer to it are searched for a name, and the check ends with that.

A process that is thrown away would need none of this, but it can't do the work. Such forwards also run in a training,
on its own layers, for the FLOPs of a step and the depth of layers. torch refuses fake GPU tensors in a fork of a
process that has used CUDA, because it initialises CUDA for them. A fresh process imports torch and SpeechBrain again,
which takes seconds. And for the five forwards of the flagship's check, these steps take about as long as five forks,
0.4 s.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
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
        self._created: list[TensorWeakRef] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record each one that is created within it.

        Its constructor is the one place that all pass: the results of operations, and real weights that become fake.
        """
        constructor = FakeTensor.__new__

        def new(cls: type[FakeTensor], *args: Any, **kwargs: Any) -> FakeTensor:  # Any: of torch's own constructor
            fake = constructor(cls, *args, **kwargs)
            self._created.append(TensorWeakRef(fake))
            return fake

        with mock.patch.object(FakeTensor, "__new__", new):
            yield

    def alive(self) -> list[FakeTensor]:
        """Return those that still exist."""
        tensors = (reference() for reference in self._created)
        return [fake for fake in tensors if fake is not None]

    def raise_if_left(self) -> None:
        """Raise if one still exists."""
        if not self.alive():
            return
        gc.collect()  # objects that hold each other
        names = sorted({_holder_of(fake) for fake in self.alive()})
        if names:
            raise SbkitError(
                "fake-tensor", f"a forward on fake tensors, which counts what a step costs, leaves some in "
                f"{', '.join(names[:3])}{' and more' if names[3:] else ''}, where training would use them",
                hint="register such a tensor as a buffer, or compute it in each forward")


@contextlib.contextmanager
def restored(fakes: FakeTensors, *roots: object) -> Iterator[None]:
    """Copy all containers that can be reached from some objects, and put back what fake tensors replaced in them.

    These include attributes, and the globals of the files in which the classes are defined. Functions' caches are
    emptied.
    """
    before = _Snapshot.of(roots)
    try:
        yield
    finally:
        before.remove_gradients()
        if fakes.alive():
            before.put_back()
        if fakes.alive():
            _empty_caches()


@dataclass(frozen=True)
class _Snapshot:
    """The tensors and containers that could be reached, and what the containers held."""

    tensors: list[torch.Tensor]
    containers: dict[int, tuple[Container, Container]]
    """Each container and a copy of it, by the id of the container."""

    @classmethod
    def of(cls, roots: Iterable[object]) -> _Snapshot:
        snapshot = cls([], {})
        for reached in _reached(roots, set()):
            if isinstance(reached, torch.Tensor):
                snapshot.tensors.append(reached)
            else:
                # Without a dict's own ``[]``, which might build items.
                copied = dict(dict.items(reached)) if isinstance(reached, dict) else list(reached)
                snapshot.containers[id(reached)] = reached, copied
        return snapshot

    def remove_gradients(self) -> None:
        """Remove gradients that are fake."""
        for tensor in self.tensors:
            if type(tensor.grad) is FakeTensor:
                tensor.grad = None

    def put_back(self) -> None:
        """Give containers with a new fake tensor their former contents; others stay, such as a cache of real ones."""
        for container, before in self.containers.values():
            if self._got_fake_tensor(container, before):
                container.clear()
                fill: Callable[[Any], None] = (
                    container.extend if isinstance(container, (list, deque)) else container.update)
                fill(before)

    def _got_fake_tensor(self, container: Container, before: Container) -> bool:
        ids_before = {id(value) for value in _values(before)}
        new = [value for value in _values(container) if id(value) not in ids_before]
        return bool(new) and _holds_fake_tensor(new, self.containers)


def _empty_caches() -> None:
    """Empty each ``functools.cache`` with a fake tensor.

    A cache can't be copied or asked for its values, but the garbage collector knows what it refers to.
    """
    plain = (torch.Tensor, tuple, *_CONTAINERS)
    caches = [obj for obj in gc.get_objects() if type(obj) is _CACHE]
    for cache in caches:
        held = [value for value in gc.get_referents(cache) if isinstance(value, plain)]
        if _holds_fake_tensor(held, [id(vars(cache))]):
            cache.cache_clear()


def _holds_fake_tensor(roots: Iterable[object], but: Collection[int]) -> bool:
    """Whether a fake tensor can be reached from some objects, not through those with the ids ``but``."""
    return any(type(reached) is FakeTensor for reached in _reached(roots, {*but}))


def _reached(roots: Iterable[object], seen: set[int]) -> Iterator[torch.Tensor | Container]:
    """Yield the tensors and containers that can be reached; an object's ``__dict__`` is one of them.

    seen : ids of objects that are not looked into; gets those of all that are
    """
    waiting = list(roots)
    classes = set[type]()
    while waiting:
        obj = waiting.pop()
        if id(obj) in seen or type(obj) in weakref.ProxyTypes or isinstance(obj, _OPAQUE):
            continue
        if not gc.is_tracked(obj) and not isinstance(obj, _CONTAINERS):  # most objects: numbers, texts
            continue
        seen.add(id(obj))
        if isinstance(obj, torch.Tensor):
            yield obj
        elif isinstance(obj, FunctionType):
            waiting += [obj.__dict__, *(obj.__closure__ or ())]
        elif isinstance(obj, CellType):
            waiting += gc.get_referents(obj)
        elif isinstance(obj, _CONTAINERS):
            yield obj
            waiting += _values(obj)
        elif isinstance(obj, (tuple, frozenset)):
            waiting += obj
        else:
            waiting += [getattr(obj, "__dict__", None), *gc.get_referents(obj)]
            for kind in type(obj).__mro__:
                builtin = kind.__module__ == "builtins" or kind.__module__.startswith("torch.")
                if builtin or kind in classes:
                    continue
                classes.add(kind)
                namespace = vars(sys.modules.get(kind.__module__, object))
                waiting += [value for value in vars(kind).values() if isinstance(value, _CONTAINERS)]
                waiting += [value for value in namespace.values() if isinstance(value, _CONTAINERS)]
                if isinstance(namespace, dict) and id(namespace) not in seen:  # the globals of the class's file
                    seen.add(id(namespace))
                    yield namespace


def _values(container: Container) -> list[object]:
    return list(container.values() if isinstance(container, dict) else container)


def _holder_of(fake: FakeTensor) -> str:
    """Name the object, class or file that holds a fake tensor, and the attribute."""
    level: list[object] = [fake]
    seen = {id(fake)}
    inside = {id(fake)}
    for _ in range(_DEPTH):  # from the inside out
        referrers = gc.get_referrers(*level)
        level = [holder for holder in referrers if id(holder) not in seen and not isinstance(holder, FrameType)]
        del referrers
        seen |= {id(holder) for holder in level}
        for holder in level:
            attributes = getattr(holder, "__dict__", {})
            name = next((key for key, value in attributes.items() if id(value) in inside), None)
            if name is not None and not isinstance(holder, FunctionType):
                owner = holder if isinstance(holder, (type, ModuleType)) else type(holder)
                return f"{owner.__name__}.{name}"
            inside.add(id(holder))
        level = [holder for holder in level if not isinstance(holder, (type, ModuleType, FunctionType))]
    return "something in torch"
