"""Which process is which: on this machine, on others, and after its number was given to another one."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path


def machine() -> str:
    """This machine since it was switched on, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def namespace() -> str:
    """Where the numbers of processes count: a container has numbers of its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def born(pid: int) -> str | None:
    """When a process of this namespace began, None where none lives: its number alone may be another's by now."""
    if os.path.isdir("/proc/self"):
        try:
            state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return None if state in "ZX" else rest[18]  # a zombie has ended
    found = subprocess.run(["ps", "-p", str(pid), "-o", "lstart="], capture_output=True, text=True)
    return found.stdout.strip() or None


def group_lives(group: int) -> bool:
    """Whether a process of this group (``os.setpgid``) lives; one that has ended and that nobody waits for doesn't."""
    if os.path.isdir("/proc/self"):
        return any(int(own) == group and (state not in "ZX" or int(rest[14]) > 1)  # its first thread alone has ended
                   for state, _, own, *rest in _stats())
    found = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True)
    return any(int(own) == group and state[0] not in "ZX" for own, state in map(str.split, found.stdout.splitlines()))


def _stats() -> Iterator[list[str]]:
    """The facts of each process, from its state on."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has gone
            yield file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells each process of a job on this machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def job() -> str:
    """What torchrun started this process for, the same for one that it starts in its place; empty without torchrun."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run != "none":
        return run
    return f"{machine()} {namespace()} {os.getppid()} {born(os.getppid())}"
