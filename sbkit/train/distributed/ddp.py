"""DDP around all modules, which searches for unused parameters in the first step only.

The search makes each backward wait for the device, and keeps DDP from grouping gradients that are ready together in one
bucket. So parameters that the first step used on no rank are excluded from DDP, which is then wrapped again without the
search. If a later backward misses a parameter, or uses an excluded one, this is noticed at its end. A missed parameter
gets a gradient of zeros, because other ranks wait for its bucket; the gradient of an excluded one is dropped, because
other ranks don't know of it. All ranks learn of it with the next step, and search in each step from then on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sbkit.system.console import write_now
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import LossModule, ModuleWrapper, average_gradients


class DDPWrapper(ModuleWrapper):
    """Averages gradients by DDP around the ``LossModule``.

    search : search for parameters that a backward does not use
    search_once : stop searching after the first step
    """

    can_wait = True

    def __init__(self, loss_module: LossModule, search: bool = True, search_once: bool = False):
        super().__init__(loss_module)
        self.world = ranks.world_size()
        self._at_first = search, search and search_once
        self._handles: list[Any] = []
        self.ddp: _QuietDDP | None = None
        ranks.close_before_shutdown(self)
        self.reset()
        ranks.take_from_main(loss_module.buffers())

    def _start(self, searches: bool, searches_once: bool) -> None:
        self.searches, self._searches_once = searches, searches_once
        self._unreached: dict[str, torch.nn.Parameter] | None = None  # in the first step
        self.changed: set[str] = set()
        self._wrap()

    def _wrap(self) -> None:
        """Wrap the modules in a new DDP that leaves out unused parameters."""
        again = self.ddp is not None
        self.close()
        left_out = self._unreached or {}
        ids = set(map(id, left_out.values()))  # a shared parameter has several names
        self.loss_module._ddp_params_and_buffers_to_ignore = [
            name for name, p in self.loss_module.named_parameters(remove_duplicate=False) if id(p) in ids]
        self._handles = [p.register_post_accumulate_grad_hook(functools.partial(self._late, name))
                         for name, p in left_out.items()]
        # `Buffers` synchronises buffers: DDP would send all of them at each step, constant tables included.
        # Without device_ids DDP does not move the batch: only the recipe knows what it is.
        self.ddp = _QuietDDP(
            self.loss_module, find_unused_parameters=self.searches, broadcast_buffers=False,
            gradient_as_bucket_view=True, init_sync=not again,  # a second one would hide differences between ranks
        )

    @property
    def module(self) -> _QuietDDP:
        assert self.ddp is not None, "it was closed"
        return self.ddp

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        return self.module.no_sync()

    def finish(self) -> None:
        average_gradients([p for p in self.loss_module.parameters() if p.requires_grad])

    def reset(self) -> None:
        self._start(*self._at_first)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.ddp is not None:
            self.ddp.reducer._remove_autograd_hooks()
            self.ddp = None
            gc.collect()  # frees its buckets, which are as large as the model

    # ------------------------------------------------------------ unused parameters

    def note_unreached(self) -> None:
        if self._searches_once and self._unreached is None:
            trained = {name: p for name, p in self._named() if p.requires_grad}
            self._unreached = {name: p for name, p in trained.items() if p.grad is None}
            self._searches_once = len(self._unreached) < len(trained)  # a step without any gradient shows nothing

    def exclude_unreached(self) -> None:
        if self._searches_once and self._unreached is not None:
            self._searches_once = self.searches = False
            self._wrap()

    def search(self) -> None:
        """Search for unused parameters in each backward from now on; all ranks call it between two steps."""
        self._start(searches=True, searches_once=False)

    def complete(self, loss: torch.Tensor) -> None:
        if self.searches or not self.module.require_backward_grad_sync or self._is_complete():
            return
        reached = _leaves(loss)
        missed = {name: p for name, p in self._named()
                  if p.requires_grad and p not in reached and name not in (self._unreached or {})}
        self.changed.update(missed)
        if missed:
            torch.autograd.backward(list(missed.values()), [torch.zeros_like(p) for p in missed.values()])

    def _is_complete(self) -> bool:
        if self.changed:
            return False
        try:
            self.module.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def _late(self, name: str, parameter: torch.Tensor) -> None:
        self.changed.add(name)
        parameter.grad = None

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.loss_module.named_parameters()


def _leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """Return the leaves of the graph of ``loss``, even after its backward."""
    found, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        ahead.extend(following for following, _ in node.next_functions)
    return found


class _QuietDDP(DistributedDataParallel):
    """DDP without its advice to switch off the search for unused parameters.

    It gives this advice once on every rank if a step used all parameters, but a recipe that sometimes drops layers
    would then hang. It is printed from C++ between a forward and its backward, so stderr is filtered for that moment,
    in which no code of the recipe runs.
    """

    _advised = False

    def _post_forward(self, output: object) -> object:
        if self._advised or not (self.find_unused_parameters and self.require_backward_grad_sync):
            return super()._post_forward(output)  # type: ignore[no-untyped-call]  # torch's has no types
        self._advised = True
        with _without_advice():
            return super()._post_forward(output)  # type: ignore[no-untyped-call]  # as above


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Hold back stderr inside this context, and write it on exit without the advice."""
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if "find_unused_parameters=True was specified" not in line:
                    write_now(line)
            os.close(stderr)
