"""A card that computes nothing: torch's own CUDA code runs on it, on a machine with no GPU and no driver.

A process that was started with ``environment`` has it. There ``counters`` and its kin ask it what was done; the logs
that it leaves are read by ``read_logs``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sbkit.rehearsal.cards import Card
from sbkit.rehearsal.nullcard.library import build

__all__ = ["Collective", "Counters", "RankLog", "active", "build", "counters", "environment", "errors", "kernels",
           "mismatches", "read_logs"]


def environment(card: Card, count: int, log_folder: Path, *, base: Mapping[str, str] = os.environ,
                patience: int = 120) -> dict[str, str]:
    """Return the environment for processes that run on ``count`` null cards.

    log_folder : takes a log of each rank (see ``read_logs``); a fresh one for each group of ranks
    patience : seconds that a rank waits for the others in a collective before it fails
    """
    library = build()
    folder = _links(library)
    log_folder.mkdir(parents=True, exist_ok=True)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    major, minor = card.capability
    facts = {"NAME": f"{card.name} (null)", "MEMORY": card.memory, "MULTIPROCESSORS": card.multiprocessors,
             "MAJOR": major, "MINOR": minor, "SHARED_MEMORY": card.shared_memory, "THREADS": card.threads,
             "COUNT": count, "LOG": log_folder.resolve(), "PATIENCE": patience,
             # Sizes that are read from values mean nothing here, and the process ends before they fill the host.
             "ADDRESS_SPACE": 2 * card.memory + host + (64 << 30)}
    before = {name: base[name] for name in ("LD_PRELOAD", "LD_LIBRARY_PATH") if base.get(name)}
    return {
        "GLOO_SOCKET_IFNAME": "lo", **base, **{f"SBKIT_CARD_{name}": str(value) for name, value in facts.items()},
        "LD_PRELOAD": ":".join([str(library), *filter(None, [before.get("LD_PRELOAD")])]),
        "LD_LIBRARY_PATH": ":".join([str(folder), *filter(None, [before.get("LD_LIBRARY_PATH")])]),
        "TRITON_LIBCUDA_PATH": str(folder), "HF_HUB_OFFLINE": "1",
        # What is tuned here is tuned by chance, and must not be found by a real card.
        "TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def _links(library: Path) -> Path:
    """Make a folder in which linkers and loaders find the driver by its names."""
    folder = library.with_suffix("")
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("libcuda.so", "libcuda.so.1"):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(library)
    return folder


@dataclass(frozen=True)
class Counters:
    """What this process has asked of the card so far; the difference of two says what happened between them."""

    launches: int
    copies: int
    allocations: int
    synchronisations: int
    captures: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


def active() -> bool:
    """Return whether this process runs on a null card."""
    return hasattr(ctypes.CDLL(None), "sbkit_card_count")


def counters() -> Counters:
    """Count what this process has asked of the card so far."""
    count = ctypes.CDLL(None).sbkit_card_count
    count.restype = ctypes.c_uint64
    return Counters(*(count(field.name.encode()) for field in fields(Counters)))


def kernels() -> dict[str, int]:
    """Count the launches of this process by the names of the kernels, and of functions such as ``cublasGemmEx``."""
    found: dict[str, int] = {}

    def add(name: bytes, count: int) -> None:
        found[name.decode()] = found.get(name.decode(), 0) + count

    _visit("sbkit_card_kernels", add, ctypes.c_char_p, ctypes.c_uint64)
    return found


def errors() -> list[str]:
    """Return what a real card would have refused in this process, such as launches with no blocks."""
    found: list[str] = []
    _visit("sbkit_card_errors", lambda text: found.append(text.decode()), ctypes.c_char_p)
    return found


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Within it, imports don't ask the driver for cards, as SpeechBrain's do for the sake of AMD's.

    A process that has asked can't pass on CUDA to those that it forks, on real cards and on these.
    """
    import torch

    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: torch.version.hip is not None
    try:
        yield
    finally:
        torch.cuda.is_available = is_available


def _visit(function: str, visitor: Callable[..., None], *types: Any) -> None:
    getattr(ctypes.CDLL(None), function)(ctypes.CFUNCTYPE(None, *types)(visitor))


@dataclass(frozen=True)
class Collective:
    """A call of NCCL. Its ``order`` counts the calls that a rank made in a communicator, from 1; a send or a receive,
    which not all ranks call, has 0."""

    collective: str
    count: int
    dtype: str
    operation: str
    communicator: str
    size: int
    order: int

    def __str__(self) -> str:
        return f"{self.collective} of {self.count} {self.dtype}" + (f" ({self.operation})" if self.operation else "")


@dataclass
class RankLog:
    """What the card has logged of one rank."""

    collectives: list[Collective]
    errors: list[str]


def read_logs(log_folder: Path) -> dict[int, RankLog]:
    """Read the logs of all ranks."""
    logs = {}
    for path in sorted(log_folder.glob("rank-*.jsonl")):
        log = RankLog([], [])
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "error" in entry:
                log.errors.append(entry["error"])
            else:
                log.collectives.append(Collective(**entry))
        logs[int(path.stem.removeprefix("rank-"))] = log
    return logs


def mismatches(logs: Mapping[int, RankLog]) -> list[str]:
    """Compare the collectives of the ranks: for each communicator the first that they did not all call alike."""
    calls: dict[str, dict[int, list[Collective]]] = {}
    for rank, log in logs.items():
        for call in log.collectives:
            calls.setdefault(call.communicator, {}).setdefault(rank, [])
            if call.order:
                calls[call.communicator][rank].append(call)
    found = []
    for by_rank in calls.values():
        for order in range(max(map(len, by_rank.values()))):
            made = {rank: str(called[order]) if order < len(called) else "nothing" for rank, called in by_rank.items()}
            if len(set(made.values())) > 1:
                found.append(f"collective {order + 1} differs between ranks: " +
                             ", ".join(f"rank {rank} calls {what}" for rank, what in made.items()))
                break
    return found
