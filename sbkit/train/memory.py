"""On a CPU, memory that a step frees stays with the process: the next step needs just as much."""

from __future__ import annotations

import ctypes
import platform

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_KEEP = 2**31 - 1
_GROW_BY = 64 << 20


def keep_freed_memory() -> bool:
    """Stop glibc from giving large blocks back to the kernel, which then zeroes them again for each step.

    Large tensors come from the heap instead of from fresh mappings, and the heap is never trimmed. One
    arena serves all threads, so that what the backward thread frees, the forward thread can take. Returns
    whether it took effect (it doesn't outside glibc).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([
        mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _KEEP), mallopt(_TOP_PAD, _GROW_BY), mallopt(_ARENA_MAX, 1),
    ])
