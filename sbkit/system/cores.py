"""The cores that this process may use, and how work can be divided among them.

A container may allow fewer cores than it shows, by its control groups.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use, within a container's quota (``docker --cpus``, Kubernetes).

    Libraries start a thread for each core they see; a process that exceeds its quota is paused. Half a core counts as
    none, because threads that share one wait for each other.
    """
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([seen, *quotas()])))


def thread_limit() -> int | None:
    """Return the number of threads for a library that counts all cores of the machine; None if that is right.

    ``OMP_NUM_THREADS`` decides, as for torch.
    """
    threads, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")  # a list is one for each level of nesting
    if threads.isdecimal() and int(threads):
        return int(threads)
    cores = usable_cores()
    return cores if cores < (os.cpu_count() or 1) else None


def limit_torch_threads() -> None:
    """Limit torch's threads to the usable cores, unless ``OMP_NUM_THREADS`` sets them."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use all cores inside this context, divided among the ranks of this machine, unless ``OMP_NUM_THREADS``
    sets its threads: large batches are computed faster by more threads, whatever is fastest for steps."""
    import torch

    before = torch.get_num_threads()
    if not os.environ.get("OMP_NUM_THREADS"):
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(before, usable_cores() // ranks_here))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Layout:
    """How work is divided among cores: by processes, the ranks of a run, of some threads each."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return threads if self.ranks == 1 else f"{self.ranks} ranks of {threads}"


def layouts_on(cores: int, ranks_asked: int | None = None, threads_asked: int | None = None) -> list[Layout]:
    """Return the layouts to try on this number of cores, those of one process first.

    ranks_asked, threads_asked : what the recipe or the command line decides
    """
    doubling = [2 ** i for i in range(cores.bit_length())]
    numbers = sorted({number for number in (*doubling, cores) if number <= cores})
    layouts = []
    for world in numbers if ranks_asked is None else [ranks_asked]:
        most = max(1, cores // world)
        if threads_asked is not None:
            threads = [threads_asked] if world == ranks_asked or threads_asked <= most or world == 1 else []
        elif world == 1 or ranks_asked is not None:
            threads = [number for number in numbers if number <= most]
        else:  # several ranks that leave cores idle are never the fastest
            threads = [most]
        layouts += [Layout(world, number) for number in threads]
    return layouts


def quotas() -> Iterator[float]:
    """Yield the quotas in cores of this process's control group and all its parents."""
    for folder, is_v2 in control_groups("cpu"):
        if is_v2:
            words = _read(folder / "cpu.max").split()
        else:
            words = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
        if len(words) == 2 and all(map(str.isdecimal, words)):  # not "max", not -1
            quota, period = map(int, words)
            if period:
                yield quota / period


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of this process's control group for ``cpu`` or ``memory``, and those of all its parents, and
    whether they are of version 2."""
    v2_mount = MOUNT / "unified" if (MOUNT / "unified").is_dir() else MOUNT  # beside version 1, or alone
    for line in _read(GROUP).split("\n"):
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = MOUNT / controller if controllers else v2_mount
        folder = mount / path.strip("/")
        if ".." in folder.parts or not folder.is_dir():  # a container's root has the host's name for it
            folder = mount
        for group in (folder, *folder.parents):
            yield group, not controllers
            if group == mount:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
