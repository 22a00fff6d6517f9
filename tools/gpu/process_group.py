"""Whether a process of a group is still alive, which may be writing a file."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


def lives(group: int) -> bool:
    """Whether a process of this group (``os.setpgid``) is alive; zombies are not."""
    if not os.path.isdir("/proc/self"):
        found = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True)
        return any(int(own) == group and state[0] not in "ZX"
                   for own, state in map(str.split, found.stdout.splitlines()))
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, own, *rest = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(own) == group and (state not in "ZX" or int(rest[14]) > 1):  # only its first thread has ended
                return True
    return False
