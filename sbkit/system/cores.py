"""How many of a machine's cores this process may use: a container may leave it fewer than it sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_GROUP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Those that this process may run on, no more than a container's quota (``docker --cpus``, Kubernetes' limits).

    Libraries start a thread for each core they see; beyond its quota a process is stopped, with whatever its other
    threads wait for. Half a core counts as none: threads that share one wait for each other.
    """
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([seen, *_quotas()])))


def threads_to_ask_for() -> int | None:
    """Of a library that goes by all cores of the machine, where this process may use fewer; None: it is right."""
    cores = usable_cores()
    return cores if cores < (os.cpu_count() or 1) else None


def keep_to_usable_cores() -> None:
    """No more threads for torch than there are cores for them, unless ``OMP_NUM_THREADS`` says how many."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())


def _quotas() -> Iterator[float]:
    """In cores, of this process's control group and of all above it, in version 1 and 2 of Linux's control groups."""
    second = _MOUNT / "unified" if (_MOUNT / "unified").is_dir() else _MOUNT  # beside version 1, or alone
    for line in _read(_GROUP).split("\n"):
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = _MOUNT / "cpu" if controllers else second
        folder = mount / path.strip("/")
        if ".." in folder.parts or not folder.is_dir():  # a container's own root is called as the host calls it
            folder = mount
        while True:
            quota = (_read(folder / "cpu.cfs_quota_us") + " " + _read(folder / "cpu.cfs_period_us") if controllers
                     else _read(folder / "cpu.max")).split()
            if len(quota) == 2 and all(map(str.isdecimal, quota)) and int(quota[1]):  # not "max", not -1
                yield int(quota[0]) / int(quota[1])
            if folder == mount:
                break
            folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
