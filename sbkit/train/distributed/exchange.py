"""Gradients are summed over ranks by flat all-reduces while backward computes.

In the first backward nothing is known. At its end the ranks agree on the parameters that have a gradient on any rank,
and on an order: that in which these became ready on the rank that was last. Those parameters are put into buckets, one
flat tensor each. From then on a bucket is sent as soon as all its gradients are there, one after the other, so that all
ranks send the same. Each ``grad`` then is a view into its bucket, as with DDP's ``gradient_as_bucket_view``.

An exchange has two states. The first, ``_Agreement``, lasts for many steps, and says what a gradient without a bucket
means. The second, ``_Progress``, says whether an exchange has begun. This is what moves them on:

==========================================  ============================================================================
event                                       what happens
==========================================  ============================================================================
autograd has added to a parameter's         ``_ready``. Not armed: the gradient stays on this rank. Armed: the first one
``grad``                                    of a backward turns IDLE into IN_BACKWARD, and has autograd call ``finish``
                                            at the end. If all gradients of the next buckets are there, these are sent.
                                            Into a bucket that is sent, nothing may be added: an error
autograd is at the end of that backward     ``finish``: ranks agree, unless that is FIXED; what was not sent yet is
                                            sent, and waited for; then IDLE
a caller has gradients from backwards that  ``finish``, likewise, from IDLE
were not armed, or from a CUDA graph
an armed backward raised an error           ``reset`` finishes first: autograd has not called ``finish``, and other
                                            ranks may wait for what was not sent. Then as below
other parameters train from now on          ``reset``: new hooks, no buckets, NOT_YET or EACH_TIME
a capture as a CUDA graph failed            ``forget_backward``: back to IDLE, as nothing was sent
==========================================  ============================================================================
"""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn import Parameter

from sbkit.errors import SbkitError
from sbkit.train.distributed import ranks
from sbkit.train.distributed.sums import PendingSum

#: The least size of a bucket, as in DDP, and that of the first one, which is sent while most of the model is to come.
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 << 20, 1 << 20
# Each view begins at a multiple of so many elements, so that kernels can read it 16 bytes at a time.
_ALIGNMENT = 16


class _Agreement(enum.Enum):
    """What ranks have agreed on."""

    NOT_YET = enum.auto()
    """There are no buckets. Hooks note what is reached, and nothing is sent before the end of the backward."""
    FIXED = enum.auto()
    """The buckets stay. A gradient that has none is dropped, since other ranks don't expect it (``changed``); one that
    is missing in its bucket is sent as zeros (``missed``)."""
    EACH_TIME = enum.auto()
    """As NOT_YET in every backward; the last buckets are used again if the same parameters were reached."""


class _Progress(enum.Enum):
    """How far the exchange of a step is."""

    IDLE = enum.auto()
    """It has not begun: backwards that aren't armed accumulate."""
    IN_BACKWARD = enum.auto()
    """An armed backward has given its first gradient, and autograd will call ``finish``."""


@dataclass(eq=False)
class _Bucket:
    """Gradients of one type on one device that are exchanged together."""

    flat: torch.Tensor
    parameters: list[Parameter]
    views: list[torch.Tensor]  # of the parameters' gradients into ``flat``
    members: frozenset[int]  # the parameters' positions
    waiting: set[int]  # those without a gradient from this backward yet
    work: PendingSum | None = field(default=None, repr=False)  # once it is sent

    @classmethod
    def of(cls, parameters: list[Parameter], members: Sequence[int]) -> _Bucket:
        """Make a bucket with zeros; ``members``: the positions of these parameters."""
        ends = list(accumulate(math.ceil(p.numel() / _ALIGNMENT) * _ALIGNMENT for p in parameters))
        starts = [0, *ends[:-1]]
        flat = torch.zeros(ends[-1], dtype=parameters[0].dtype, device=parameters[0].device)
        # With the parameters' strides, as fused optimizers want them.
        views = [flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), start)
                 for p, start in zip(parameters, starts, strict=True)]
        return cls(flat, parameters, views, frozenset(members), set(members))

    @torch.no_grad()
    def take_gradients(self) -> bool:
        """Bring the parameters' gradients into their views, zeros for missing ones; return whether any is missing."""
        missing = []
        moved = []
        gradients = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is view:  # zeroed in place, and accumulated into
                continue
            if gradient is None:
                missing.append(view)
            else:
                moved.append(view)
                gradients.append(gradient)
            parameter.grad = view
        if moved:
            torch._foreach_copy_(moved, gradients)
        if missing:
            torch._foreach_zero_(missing)
        return bool(missing)

    def expect_backward(self) -> None:
        """Wait for all gradients again."""
        self.work = None
        self.waiting = set(self.members)


class GradientExchange:
    """Sums gradients over ranks at the end of each backward, or takes their mean.

    named_parameters : each parameter once, with its name
    agree_each_time : agree after every backward on the parameters that it reached on any rank, for scripts whose
        backwards reach different ones (a GAN), and models that change; the others keep their ``grad``
    mean : divide by the number of ranks. A second backward on top of exchanged gradients is right with the mean only

    All ranks must run the same armed backwards, and call ``reset`` and ``finish`` together.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]], agree_each_time: bool = False,
                 mean: bool = False):
        self.world = ranks.world_size()
        self.mean = mean
        self.agree_each_time = agree_each_time
        self.armed = True
        """Whether the next backward exchanges; otherwise it accumulates on this rank."""
        self._named = list(named_parameters)
        self._progress = _Progress.IDLE
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        ranks.cpu_group()
        self.reset()

    @property
    def _agreement(self) -> _Agreement:
        if self.agree_each_time:
            return _Agreement.EACH_TIME
        return _Agreement.FIXED if self._buckets else _Agreement.NOT_YET

    def reset(self, agree_each_time: bool | None = None) -> None:
        """Agree anew in the next backward: other parameters train from now on, or a backward was left by an error."""
        if self._progress is _Progress.IN_BACKWARD:  # other ranks may be waiting for what it has not sent
            self.finish()
        self.close()
        if agree_each_time is not None:
            self.agree_each_time = agree_each_time
        self.changed: set[str] = set()
        """Names of parameters that this rank reached, but no rank when all agreed; their gradients were dropped."""
        self.missed = False
        """Whether this rank did not reach an agreed parameter in the last exchange, and gave zeros for its gradient."""
        # Positions, in the order in which this rank reached them since the last exchange; unused once all are FIXED.
        self._reached: dict[int, None] = {}
        self._names = [name for name, p in self._named if p.requires_grad]
        self._parameters = [p for _, p in self._named if p.requires_grad]
        self._bucket_of: list[_Bucket | None] = [None] * len(self._names)  # all None, unless FIXED
        if self.world > 1:
            self._handles = [p.register_post_accumulate_grad_hook(functools.partial(self._ready, i))
                             for i, p in enumerate(self._parameters)]

    def close(self) -> None:
        """Remove the hooks and the buckets."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._buckets: list[_Bucket] = []  # in the order in which they are sent
        self._sent = 0  # how many of them are sent
        self._progress = _Progress.IDLE

    def views(self) -> dict[Parameter, torch.Tensor]:
        """Return the views into buckets in which gradients are exchanged, of all parameters that ranks agreed on."""
        return {parameter: view for bucket in self._buckets
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True)}

    # ------------------------------------------------------------ while backward computes

    def _ready(self, i: int, parameter: torch.Tensor) -> None:
        """Send what is complete with the gradient of this parameter; autograd calls it once in a backward."""
        bucket = self._bucket_of[i]
        if bucket is None:
            if self._agreement is _Agreement.FIXED:
                self.changed.add(self._names[i])
                parameter.grad = None
            else:
                self._reached.setdefault(i)
        if not self.armed:
            return

        if self._progress is _Progress.IDLE:
            self._progress = _Progress.IN_BACKWARD
            _call_at_end_of_backward(self.finish)
        if bucket is None:
            return
        if bucket.work is not None:
            raise _reentrant(self._names[i])
        bucket.waiting.discard(i)
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Bring the gradients of the next bucket into it, and start its sum over ranks."""
        bucket = self._buckets[self._sent]
        self._sent += 1
        if bucket.take_gradients():
            self.missed = True
        bucket.work = ranks.start_sum(bucket.flat)

    # ------------------------------------------------------------ at its end

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange all gradients that were not sent yet.

        A backward that exchanges calls it at its end. Call it outside of a backward for gradients that were accumulated
        while not armed, or that a CUDA graph has added to the views that ``grad`` holds since the first exchange (zero
        those in place, as a graph writes to fixed addresses). NCCL lets the stream wait, and not the host.
        """
        if self.world == 1:
            return
        if self._progress is _Progress.IN_BACKWARD and not self.mean and _is_inside_backward():
            raise _reentrant("the model")
        self.missed = False
        if self._agreement is not _Agreement.FIXED:
            self._agree()
        while self._sent < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if self.mean:
                bucket.flat.div_(self.world)
        self.forget_backward()

    def forget_backward(self) -> None:
        """Begin anew: the last backward has been exchanged, or was left by an error while it was captured."""
        for bucket in self._buckets:
            bucket.expect_backward()
        self._sent = 0
        self._progress = _Progress.IDLE
        self._reached = {}

    def _agree(self) -> None:
        """Agree on the parameters that any rank reached since the last exchange, and make buckets of them."""
        arrival = torch.zeros(len(self._parameters), dtype=torch.int32)  # 0: not reached; 1: reached first
        reached = [i for i in self._reached if self._parameters[i].grad is not None]
        arrival[reached] = torch.arange(1, len(reached) + 1, dtype=torch.int32)
        # On the CPU, so that nothing waits for the device.
        dist.all_reduce(arrival, op=dist.ReduceOp.MAX, group=ranks.cpu_group())
        order = [i for i in arrival.argsort(stable=True).tolist() if arrival[i]]
        if set(order) != {i for bucket in self._buckets for i in bucket.members}:
            self._make_buckets(order)

    def _make_buckets(self, order: list[int]) -> None:
        """Make the buckets of parameters, which are sent in this order of their positions."""
        self._buckets = []
        for members in self._divided(order):
            bucket = _Bucket.of([self._parameters[i] for i in members], members)
            self._buckets.append(bucket)
            if not self.agree_each_time:
                for i in members:
                    self._bucket_of[i] = bucket

    def _divided(self, order: list[int]) -> list[list[int]]:
        """Divide positions into buckets of one type and device each, those first that are complete first."""
        complete: list[list[int]] = []
        begun: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        bytes_of: Counter[tuple[torch.dtype, torch.device]] = Counter()
        for i in order:
            key = self._parameters[i].dtype, self._parameters[i].device
            begun.setdefault(key, []).append(i)
            bytes_of[key] += self._parameters[i].nbytes
            if bytes_of[key] >= (BUCKET_BYTES if complete else FIRST_BUCKET_BYTES):
                complete.append(begun.pop(key))
                del bytes_of[key]
        return [*complete, *begun.values()]


# ------------------------------------------------------------ what autograd says only in private


def _call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Have autograd call a function at the end of the backward that is running, as DDP and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _is_inside_backward() -> bool:
    """Return whether autograd is computing a node: at the end of a backward it is, if that ran within another one."""
    return torch._C._current_autograd_node() is not None


def _reentrant(what: str) -> SbkitError:
    return SbkitError("reentrant-checkpoint",
                      "activation checkpointing with use_reentrant=True can't be used with several ranks: its backward "
                      f"reached {what} after its gradients were sent",
                      hint="pass use_reentrant=False to torch.utils.checkpoint")
