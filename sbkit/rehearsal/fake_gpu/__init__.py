"""A fake GPU, which runs no kernels: torch's CUDA code runs on it without a GPU or a driver.

A process that was started with ``environment`` has it. There ``counters``, ``errors`` and ``lacks`` show its use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from unittest import mock

from sbkit.rehearsal.cards import Card
from sbkit.rehearsal.fake_gpu.library import build

__all__ = ["Counters", "active", "build", "counters", "environment", "errors", "lacks", "without_driver"]


def environment(card: Card, count: int, *, base: Mapping[str, str] = os.environ, patience: int = 120) -> dict[str, str]:
    """Return the environment for processes that run on ``count`` fake GPUs.

    patience : seconds that a rank waits for the others in a collective before it fails
    """
    library = build()
    folder = library.with_suffix("")  # in which linkers and loaders find the driver by its file names
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("libcuda.so", "libcuda.so.1"):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(library)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    major, minor = card.capability
    properties = {"NAME": f"{card.name} (fake)", "MEMORY": card.memory, "MULTIPROCESSORS": card.multiprocessors,
             "MAJOR": major, "MINOR": minor, "SHARED_MEMORY": card.shared_memory, "THREADS": card.threads,
             "COUNT": count, "PATIENCE": patience,
             # Sizes read from values mean nothing here; this limit ends the process before they fill the host.
             "ADDRESS_SPACE": 2 * card.memory + host + (64 << 30)}
    # The fake GPU does not support expandable segments.
    allocator = {name: base[name].replace("expandable_segments:True", "expandable_segments:False")
                 for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in base}
    before = {name: base[name] for name in ("LD_PRELOAD", "LD_LIBRARY_PATH") if base.get(name)}
    return {
        "GLOO_SOCKET_IFNAME": "lo", **base, **allocator,
        **{f"SBKIT_CARD_{name}": str(value) for name, value in properties.items()},
        "LD_PRELOAD": ":".join([str(library), *filter(None, [before.get("LD_PRELOAD")])]),
        "LD_LIBRARY_PATH": ":".join([str(folder), *filter(None, [before.get("LD_LIBRARY_PATH")])]),
        "TRITON_LIBCUDA_PATH": str(folder), "HF_HUB_OFFLINE": "1",
        # Autotuning results are random here, and a real GPU must not find them.
        "TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


@dataclass(frozen=True)
class Counters:
    """Counts of calls to the card so far; the difference of two is what happened between them."""

    launches: int
    copies: int
    allocations: int
    synchronisations: int
    captures: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


def active() -> bool:
    """Return whether this process runs on a fake GPU."""
    return hasattr(ctypes.CDLL(None), "sbkit_card_count")


def counters() -> Counters:
    """Return the counts of this process's calls to the card so far."""
    count = ctypes.CDLL(None).sbkit_card_count
    count.restype = ctypes.c_uint64
    return Counters(*(count(field.name.encode()) for field in fields(Counters)))


def errors() -> list[str]:
    """Return what a real card would have refused in this process, such as launches with no blocks."""
    return _listed("sbkit_card_errors")


def lacks() -> list[str]:
    """Return the functions that this process has called and that only a real card has."""
    return _listed("sbkit_card_lacks")


def _listed(function: str) -> list[str]:
    texts: list[str] = []
    append = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: texts.append(text.decode()))
    getattr(ctypes.CDLL(None), function)(append)
    return texts


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Keep imports inside this context from initialising the driver, as SpeechBrain's do to detect AMD GPUs.

    After that, forked processes could not use CUDA, on real cards or fake GPUs.
    """
    import torch

    with mock.patch.object(torch.cuda, "is_available", lambda: torch.version.hip is not None):
        yield
