"""Memory of a process on a CPU: kept between steps, counted, and bounded, so that running out is an error."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # `can_bound` asks

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _ARENA_MAX: 1}
_GIVE_BACK = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 1 << 20, _TOP_PAD: 0, _ARENA_MAX: 1}
#: oneDNN keeps what it prepared for so many shapes of products and convolutions, 0.4 to 0.8 MiB for each: of its own
#: 1,024 a run in bf16 grew by another 0.4 GiB in an epoch. A process with a bound keeps those of a few steps.
_SHAPES, _SHAPES_IF_BOUNDED = "384", "128"
_CGROUPS = Path("/sys/fs/cgroup")


def keep_freed_memory() -> bool:
    """Stop glibc from giving large blocks back to the kernel, which then zeroes them again for each step.

    Large tensors come from the heap instead of from fresh mappings, and the heap is never trimmed. One
    arena serves all threads, so that what the backward thread frees, the forward thread can take. Returns
    whether it took effect: it doesn't outside glibc, nor in a process with a bound (``ulimit -d``), whose
    memory had better go back (see ``give_back``).
    """
    shapes = _SHAPES_IF_BOUNDED if bounded() else _SHAPES  # read when the first product or convolution is prepared
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", shapes)
    if bounded():
        give_back()
        return False
    return _set(_KEEP)


def reserve_little() -> None:
    """Where this process has a bound, Arrow reserves no GiB of it at once; called before anything imports it."""
    if bounded():
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def trim() -> None:
    """What is free now goes back to the kernel, once: before processes fork, which would hold on to it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def give_back() -> None:
    """What is free goes back to the kernel, and so does what is freed from now on.

    A heap that is kept has holes. One that has grown to its limit has them in the wrong places for batches of
    another shape, and leaves no room for what isn't of it: stacks of threads, the code that oneDNN compiles.
    """
    if _set(_GIVE_BACK):
        trim()


def _set(parameters: dict[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) for name, value in parameters.items())


def can_bound() -> bool:
    """Whether the kernel keeps a process to a bound: Linux does."""
    return resource is not None and platform.system() == "Linux"


def bounded() -> bool:
    """Whether this process has a bound of its own, so that it can run out of memory without being ended."""
    return can_bound() and any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY
                               for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))


def bound(size: int) -> None:
    """Keep this process to ``size`` bytes of memory, what it holds already counted: more is refused by an error.

    The kernel counts what is reserved rather than what is used, so today's difference of the two comes on top.
    """
    now = _now()
    allowed = now["VmData"] + max(0, size - now["VmRSS"])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def peak() -> int:
    """The most bytes that this process has held."""
    return _now()["VmHWM"]


def _now() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)
            if name in ("VmData", "VmRSS", "VmHWM")}


def total() -> int:
    """Bytes that processes here may hold in all: the machine's, or less where a container has a limit."""
    return min([_machine("MemTotal"), *(limit for limit, _ in _containers())])


def available() -> int:
    """Bytes that one more process could have now."""
    return max(0, min([_machine("MemAvailable"), *(limit - used for limit, used in _containers())]))


def _machine(name: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/meminfo has no {name}")


def _containers() -> list[tuple[int, int]]:
    """(limit, used) of each control group around this process that has a limit; files in the cache aren't used."""
    found = []
    for folder, limit, used, cache in _groups():
        try:
            most = int((folder / limit).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append((most, int((folder / used).read_text()) - int(stat.get(cache, 0))))
        except (OSError, ValueError):  # no such file here, or the limit is "max"
            continue
    return found


@functools.cache
def _groups() -> list[tuple[Path, str, str, str]]:
    """Folders of this process's control groups, and what their files are called: in version 2 and in version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = _CGROUPS / "memory", (
                "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = base / os.path.normpath(path).lstrip("/")
        found += [(folder, *names) for folder in (inner, *inner.parents) if folder.is_relative_to(base)]
    return found
