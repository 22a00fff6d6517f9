"""Processes: children that end with their parent, and identities, on this machine, on others, and after reuse."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from sbkit.errors import SbkitError

_PORTS = range(20_000, 30_000)
#: Has Linux send it a signal when its parent ends, however that happens, then becomes the command. It is a program,
#: because between fork and exec of a process with threads Python can't be run safely.
_END_WITH_PARENT = ("import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[2])); "
                    "os.getppid() == int(sys.argv[1]) or sys.exit(143); os.execv(sys.argv[3], sys.argv[3:])")


@contextlib.contextmanager
def child(command: Sequence[str], environment: dict[str, str] | None = None, out: IO[str] | None = None,
          end_by: signal.Signals = signal.SIGTERM) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ends with this context and with this process, even if that is killed by SIGKILL (on Linux).

    command : begins with the path of a program
    out : for its output and messages, by default this process's
    end_by : the signal that ends it; after SIGTERM, a training saves a checkpoint
    """
    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if sys.platform == "linux":
        parent, number = str(os.getpid()), str(int(end_by))
        command = [sys.executable, "-ISc", _END_WITH_PARENT, parent, number, *command]
    before = signal.signal(signal.SIGTERM, leave)  # so that the context is left
    process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(end_by)
        process.wait()
        signal.signal(signal.SIGTERM, before)


def ended_by(number: int) -> str:
    """Return the name of the signal that ended a process, or its number: most real-time signals have no name."""
    names = {named.value: named.name for named in signal.Signals}
    return names.get(number, f"signal {number}")


def machine() -> str:
    """Return an id of this machine since it was booted, the same in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def namespace() -> str:
    """Return an id of the namespace of process numbers: a container has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def born(pid: int) -> str | None:
    """Return the start time of a process of this namespace, None if it is dead; its number may have been reused."""
    if os.path.isdir("/proc/self"):
        try:
            state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return None if state in "ZX" else rest[18]  # a zombie is dead
    ps = subprocess.run(["ps", "-p", str(pid), "-o", "lstart="], capture_output=True, text=True)
    return ps.stdout.strip() or None


def session_seconds(session: int) -> tuple[float, float]:
    """Return the CPU seconds of all processes of a session (``os.setsid``), including ended children, and the seconds
    for which their running threads have waited for a core."""
    ticks = waited = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # in user and kernel mode, of itself and of ended children
                waited += sum(int(thread.read_text().split()[1]) for thread in file.parent.glob("task/*/schedstat"))
    return ticks / os.sysconf("SC_CLK_TCK"), waited / 1e9


def free_port() -> int:
    """Return a free port below those that the kernel assigns, so that no other process gets it before it is used."""
    for port in random.Random().sample(_PORTS, len(_PORTS)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise SbkitError("no-free-port", f"no port from {_PORTS[0]} to {_PORTS[-1]} is free",
                     hint="end programs that listen there; ss -ltnp lists them")


def torchrun_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun sets for each process of a job on this machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
