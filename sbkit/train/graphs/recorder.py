"""How kernels are captured: what a function launches is recorded as a CUDA graph, and not run."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from sbkit.train.graphs.repeatable import NotRepeatable

T = TypeVar("T")

#: The most nodes of a graph, of some KiB each. A recurrent layer has several for each of its time steps.
MAX_NODES = 20_000


class Recorder:
    """Records graphs in one stream and one pool of memory, which they share because only one runs at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.nodes: dict[str, int] = {}
        """The kernels and copies of the graph that was recorded last, of each kind; 0 if the driver doesn't tell."""
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # torch's handle

    def forget_pool(self) -> None:
        """Record later graphs in memory of their own; that of the ones so far is freed with the last of them."""
        self._pool = None

    @contextlib.contextmanager
    def in_stream(self) -> Iterator[None]:
        """Compute in the stream of all recordings inside this context: after all before it, and before all after it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def record(self, kind: str, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Record what ``work`` launches, and return the graph and what ``work`` returned; called within ``in_stream``.

        kind : "micro-step" or "update", for messages and ``nodes``
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads, such as those that pin batches, go on.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"), \
                    refusing_waits():
                result = work()
        except BaseException:
            self._end_broken_capture()
            raise
        nodes = _count_nodes(graph)
        self.nodes[kind] = nodes
        if nodes > MAX_NODES:
            raise NotRepeatable(f"the {kind} has {nodes:,} nodes, and {MAX_NODES:,} are allowed")
        graph.instantiate()
        return graph, result

    def _end_broken_capture(self) -> None:
        """Record something else: a capture that was broken leaves torch's generator in the middle of it."""
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream), \
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros((), device=self.device)


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the kernels and copies in a graph; 0 if this driver doesn't tell."""
    nodes = ctypes.c_size_t()
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
        driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes))
    return nodes.value


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """Raise inside this context where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
