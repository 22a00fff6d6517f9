"""CUDA graphs on a CPU: what a capture records are calls, and a replay repeats them into the same memory.

As on a card, a replay runs no Python, reads and writes where the capture did, and draws random numbers anew; a capture
itself changes nothing. So what a step would repeat wrongly, it repeats wrongly here too, with values that can be seen.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sbkit.nn import ctc
from sbkit.nn.fast import dropout
from sbkit.train import graphs, muon, rng
from sbkit.train.graphs import repeatable

aten = torch.ops.aten
all_reduce = torch.distributed.all_reduce
capturing = []  # the graph that records what is called
NEVER = -1e9  # a logarithm


class Waits(RuntimeError):
    """What a card would have to wait for."""


def _written(func, args, kwargs):
    """The tensors that a call writes into."""
    given = [*zip(func._schema.arguments, args, strict=False),
             *((each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs)]
    return [leaf for each, value in given if each.alias_info is not None and each.alias_info.is_write
            for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Recorded:
    """What a collective returns while it is captured."""

    def wait(self):
        pass


def all_reduce_or_record(tensor, *args, **kwargs):
    """Sum over ranks, in a capture only when it is replayed: a capture sends nothing."""
    if not capturing:
        return all_reduce(tensor, *args, **kwargs)
    capturing[-1].calls.append((all_reduce, (tensor,), {}, None))
    return Recorded()


class CUDAGraph(TorchDispatchMode):
    """Calls, and the tensors that they gave."""

    def __init__(self, keep_graph=False):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            raise Waits(f"{func} waits for the device")
        if func is aten._ctc_loss.default:
            raise Waits("the host knows these lengths")
        for each in _written(func, args, kwargs):
            storage = each.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        before = tree_map_only(Tensor, Tensor.detach, (args, kwargs))  # ``transpose_`` and its like change shapes
        result = func(*args, **kwargs)
        if torch.Tag.inplace_view not in func.tags:
            self.calls.append((func, *before, tree_map_only(Tensor, Tensor.detach, result)))
        return result

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                new = func(*args, **kwargs)
                if func is all_reduce:
                    continue
                several = len(func._schema.returns) > 1
                for spec, old, value in zip(func._schema.returns, *(each if several else [each]
                                                                    for each in (result, new)), strict=False):
                    if spec.alias_info is None:  # neither a view nor what was written in place
                        for to, each in zip(tree_leaves(old), tree_leaves(value), strict=True):
                            if isinstance(to, Tensor):
                                to.copy_(each)

    def instantiate(self):
        pass

    def raw_cuda_graph(self):
        return 0


@contextlib.contextmanager
def _graph(graph, pool=None, stream=None, capture_error_mode=""):
    random = torch.get_rng_state()
    capturing.append(graph)
    try:
        with pytest.MonkeyPatch.context() as patched, graph:
            patched.setattr(torch.cuda, "is_initialized", lambda: True)
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield
    finally:  # a capture computes nothing
        capturing.remove(graph)
        for storage, was in graph.before.values():
            storage.copy_(was)
        torch.set_rng_state(random)


class _Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


def losses_on_the_device(log_probs, targets, input_lengths, target_lengths, blank):
    """CTC losses of lengths that the host doesn't know; torch's, on a CPU, have memory of a size by the longest."""
    states = torch.full((len(targets), 2 * targets.shape[1] + 1), blank)
    states[:, 1::2] = targets
    skips = functional.pad((states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2]), (2, 0))
    emitted = log_probs.gather(2, states[:, None].expand(-1, log_probs.shape[1], -1))
    alpha = torch.where(torch.arange(states.shape[1]) < 2, emitted[:, 0], NEVER)
    for frame in range(1, log_probs.shape[1]):
        before = functional.pad(alpha, (2, 0), value=NEVER)
        moved = torch.stack([alpha, before[:, 1:-1], torch.where(skips, before[:, :-2], NEVER)]).logsumexp(0)
        alpha = torch.where((frame < input_lengths)[:, None], moved + emitted[:, frame], alpha)
    last = torch.stack([2 * target_lengths, (2 * target_lengths - 1).clamp_min(0)], 1)
    losses = -alpha.gather(1, last).logsumexp(1)
    return torch.where(losses > -NEVER / 2, 0.0, losses)


def on_cpu(monkeypatch):
    """Let Brains capture on this machine's CPU, unless their key ``graphs`` is False."""
    stream = _Stream()
    for name, stand_in in {
        "CUDAGraph": CUDAGraph, "graph": _graph, "graph_pool_handle": lambda: 0, "Stream": _Stream,
        "current_stream": lambda device=None: stream, "stream": lambda stream: contextlib.nullcontext(),
        "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda mode: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # The generator of this device is also that of the host.
    monkeypatch.setattr(repeatable, "rng", SimpleNamespace(**{**vars(rng), "capture": lambda device: {
        name: each for name, each in rng.capture(device).items() if (name, device) != ("torch", "cpu")}}))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce_or_record)
    monkeypatch.setattr(graphs, "wanted", lambda device, setting: setting is not False)
    monkeypatch.setattr(muon, "in_host_memory", lambda tensor: False)
    monkeypatch.setenv("SBKIT_KERNELS", "0")
    monkeypatch.setattr(dropout, "levels", lambda p, like=None: 0)  # torch's dropout, as on a card
    monkeypatch.setattr(ctc, "use_kernels", lambda log_probs, targets: True)
    monkeypatch.setattr(ctc, "by_kernels", losses_on_the_device)
