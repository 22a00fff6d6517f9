"""Which process is which: on this machine, on others, and after its number was given to another one."""

from __future__ import annotations

import os
import platform
import subprocess
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


def job() -> str:
    """What torchrun started this process for, the same for one that it starts in its place; empty without torchrun."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run != "none":
        return run
    return f"{machine()} {namespace()} {os.getppid()} {born(os.getppid())}"
