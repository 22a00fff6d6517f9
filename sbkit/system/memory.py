"""Memory of a process on a CPU: keeping it between steps, measuring it, and limiting it."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from pathlib import Path

from sbkit.system.cores import control_groups

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _ARENA_MAX: 1}
_RELEASE = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 1 << 20, _TOP_PAD: 0, _ARENA_MAX: 1}
#: Number of shapes of products and convolutions that oneDNN caches, at 0.4 to 0.8 MiB each. With its default of 1,024
#: a run in bf16 grew by 0.4 GiB in an epoch. In a process with a memory limit, the cache is enough for a few steps.
_SHAPES, _SHAPES_IF_BOUNDED = "512", "128"
#: What to do about a process that runs out of memory because of its limit.
LIMIT_HINT = "raise the limit of this process (ulimit -d, ulimit -v)"
#: Files of a control group with its limit and its usage, and the entry of memory.stat for reclaimable file caches.
_OF_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_OF_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def keep_freed_memory() -> bool:
    """Keep glibc from returning large blocks to the kernel, which would zero them again for each step.

    Large tensors then come from the heap instead of new mappings, and the heap is never trimmed. All threads share one
    arena, so that the forward thread can use what the backward thread frees. Returns whether this took effect. It does
    not without glibc, nor in a process with a memory limit (``ulimit -d``), which must call ``release_memory``.
    """
    shapes = _SHAPES_IF_BOUNDED if bounded() else _SHAPES  # oneDNN reads it at the first product or convolution
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", shapes)
    if bounded():
        release_memory()
        return False
    return _set(_KEEP)


def reserve_little() -> None:
    """Keep Arrow from reserving a GiB if this process has a memory limit; call it before Arrow is imported."""
    if bounded():
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def trim() -> None:
    """Return free memory to the kernel once, before forks, which would keep it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def release_memory() -> None:
    """Return free memory to the kernel, now and in future.

    A heap that is never trimmed is fragmented. If it has grown to the limit, batches of another shape may not fit, and
    nothing is left for memory outside of the heap, such as threads' stacks and the code that oneDNN compiles.
    """
    if _set(_RELEASE):
        trim()


def _set(parameters: dict[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) for name, value in parameters.items())


def can_bound() -> bool:
    """Return whether this system can limit the memory of a process: Linux can."""
    return platform.system() == "Linux"


def bounded() -> bool:
    """Return whether this process has a memory limit, so that running out of memory is an error and no kill."""
    return can_bound() and any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY
                               for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))


def bound(size: int) -> None:
    """Limit this process to ``size`` bytes of memory, including what it already uses; more is an error.

    The kernel counts reserved memory instead of used memory, so the present difference of the two is added.
    """
    now = _sizes("self/status")
    allowed = now["VmData"] + max(0, size - now["VmRSS"])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    return _sizes("self/status")["VmHWM"]


def total() -> int:
    """Return the memory of the machine, or the limit of the container, in bytes."""
    if not can_bound():  # macOS has neither /proc nor containers
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([_sizes("meminfo")["MemTotal"], *(limit for limit, _ in _containers())])


def available() -> int:
    """Return the memory that another process could use now, in bytes."""
    return max(0, min([_sizes("meminfo")["MemAvailable"], *(limit - used for limit, used in _containers())]))


def _sizes(file: str) -> dict[str, int]:
    """Return what a file of /proc gives in kB, in bytes."""
    lines = map(str.split, (Path("/proc") / file).read_text(encoding="ascii", errors="replace").splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[2:] == ["kB"]}


def _containers() -> list[tuple[int, int]]:
    """Return (limit, used) of each control group of this process that has a limit; cached files don't count."""
    groups = []
    for folder, is_v2 in control_groups("memory"):
        limit, used, cache = _OF_VERSION_2 if is_v2 else _OF_VERSION_1
        try:
            limit_bytes = int((folder / limit).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used_bytes = int((folder / used).read_text()) - int(stat.get(cache, 0))
            groups.append((limit_bytes, used_bytes))
        except (OSError, ValueError):  # no such file here, or the limit is "max"
            continue
    return groups
