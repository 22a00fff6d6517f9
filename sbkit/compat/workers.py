"""Worker processes of torch's own loaders: they survive signals to the process group, as the run does, and end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from sbkit.data.reader import init_worker, starting_workers


def survive_signals(loader: object) -> None:
    """Have a loader's workers survive signals to the process group; its own ``worker_init_fn`` is still called."""
    torch_loader = _with_workers(loader)
    if torch_loader is None:
        return
    of_recipe = torch_loader.worker_init_fn
    if getattr(of_recipe, "func", None) is not _start_worker:  # not prepared already
        torch_loader.worker_init_fn = partial(_start_worker, of_recipe)


def _start_worker(of_recipe: Callable[[int], None] | None, worker: int) -> None:
    init_worker(worker)
    if of_recipe is not None:
        of_recipe(worker)


def iterator_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Return the iterator of a loader; signals don't end its workers while they start."""
    torch_loader = _with_workers(loader)
    if torch_loader is None:
        return iter(loader)
    with starting_workers():
        iterator = iter(loader)
    with contextlib.suppress(TypeError):  # a recipe's own iterator may be of a kind that can't be kept
        _loader_of[iterator] = torch_loader
    return iterator


def _with_workers(loader: object) -> DataLoader[Any] | None:
    """Return torch's loader if this is one, or a LoopedLoader of one, that reads in worker processes."""
    inner = getattr(loader, "loader", loader)
    return inner if isinstance(inner, DataLoader) and inner.num_workers else None


_loader_of: weakref.WeakKeyDictionary[Any, DataLoader[Any]] = weakref.WeakKeyDictionary()  # by its iterator
os.register_at_fork(after_in_child=_loader_of.clear)  # the workers are the parent's


@atexit.register
def _end_workers() -> None:
    """End the workers, which ignore SIGTERM, before multiprocessing would wait for them."""
    for iterator, loader in list(_loader_of.items()):
        inner = getattr(iterator, "iterator", iterator)
        for holder in (inner, loader._iterator):  # the one that a loader keeps may be another
            if holder is not None and hasattr(holder, "_shutdown_workers"):
                holder._shutdown_workers()
