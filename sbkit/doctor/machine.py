"""Checks of cores, memory, shared memory, open files, and the encoding of file names."""

from __future__ import annotations

import locale
import os
import resource
import sys
from collections.abc import Iterator

from sbkit.doctor.finding import NOTE, MachineFinding, Scope
from sbkit.system.cores import usable_cores
from sbkit.train.memory import host

SHARED_MEMORY = "/dev/shm"
#: Bytes that a few batches of a few data workers need.
_SHARED = 2 << 30
_LITTLE_MEMORY = 4 << 30
_FILES = 4096


def cores(scope: Scope) -> Iterator[MachineFinding]:
    """Check the usable cores, and how many threads libraries would start by default."""
    usable, seen = usable_cores(), os.cpu_count() or 1
    found = f"{usable} usable"
    found += f" of {seen}: affinity or a container's quota limits them" if usable < seen else ""
    threads = os.environ.get("OMP_NUM_THREADS")
    found += f"; OMP_NUM_THREADS={threads}" if threads else ""
    if usable < 2:
        yield MachineFinding("cores", found, NOTE, "data workers and training share it: give the container two or more")
    elif threads and threads.isdecimal() and int(threads) > usable:
        yield MachineFinding("cores", found, NOTE, f"threads would wait for each other: OMP_NUM_THREADS={usable}")
    else:
        yield MachineFinding("cores", found)


def main_memory(scope: Scope) -> Iterator[MachineFinding]:
    """Check free and total memory within the container's limit, and this process's own limit."""
    total, free = host.total(), host.available()
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    found += "; limited for this process (ulimit -v or -d)" if host.bounded() else ""
    little = free < _LITTLE_MEMORY
    yield MachineFinding("memory", found, NOTE if little else "ok",
                         "sbkit tune --memory finds batches that fit" if little else "")


def shared_memory(scope: Scope) -> Iterator[MachineFinding]:
    """Check the shared memory, through which data workers pass batches."""
    if not os.path.isdir(SHARED_MEMORY):
        yield MachineFinding("shared memory", f"no {SHARED_MEMORY} on this system")
        return
    state = os.statvfs(SHARED_MEMORY)
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    little = free < _SHARED
    yield MachineFinding("shared memory", f"{SHARED_MEMORY}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB free",
                         NOTE if little else "ok",
                         "fewer batches are read ahead: docker run --shm-size=8g, or fewer workers" if little else "")


def open_files(scope: Scope) -> Iterator[MachineFinding]:
    """Check the limit of open files; each batch on its way from a worker uses some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"{_limit(soft)} (at most {_limit(hard)})"
    little = soft != resource.RLIM_INFINITY and soft < _FILES
    yield MachineFinding("open files", limits, NOTE if little else "ok",
                         f"ulimit -n {min(65536, hard) if hard != resource.RLIM_INFINITY else 65536}, before a run "
                         "with many data workers" if little else "")


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def language(scope: Scope) -> Iterator[MachineFinding]:
    """Check that file names and texts use UTF-8."""
    names, text = sys.getfilesystemencoding(), locale.getpreferredencoding(False)
    wrong = {names.lower(), text.lower()} - {"utf-8", "utf8"}
    yield MachineFinding("locale", f"file names {names}, text {text}", NOTE if wrong else "ok",
                         "export LANG=C.UTF-8 PYTHONUTF8=1: names and transcripts are UTF-8" if wrong else "")
