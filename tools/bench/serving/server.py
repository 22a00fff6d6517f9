"""A process that runs `sbkit serve`, and its CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

NAME = "bench"


class Server:
    """A server of one bundle, which is called ``bench``, on a free port.

    bundle : the bundle's folder
    options : more words for the command line
    """

    def __init__(self, bundle: Path, options: Sequence[str] = ()):
        words = [f"{NAME}={bundle}", "--port", "0", *options]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen([sys.executable, "-m", "sbkit", "serve", *words], stderr=self.log)
        self.url = self.running = ""
        while not self.url:
            if self.process.poll() is not None:
                raise SystemExit(self.output())
            for line in self.output().splitlines():
                if line.startswith("ready on "):
                    self.url = line.split()[-1]
                elif line.startswith(f"{NAME}: "):
                    self.running = line.removeprefix(f"{NAME}: ")
            time.sleep(0.1)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def cpu_seconds(self) -> float:
        """Return the CPU time that the server's own process has taken so far; 0 if it is unknown."""
        return _seconds(_fields(f"/proc/{self.process.pid}/stat")[11:13])

    def output(self) -> str:
        """Return what the server has written so far."""
        self.log.seek(0)
        return self.log.read()

    def close(self) -> None:
        """Stop the server."""
        self.process.terminate()
        self.process.wait()
        self.log.close()


def machine_seconds() -> float:
    """Return the CPU time that everything on this machine has taken so far; 0 if it is unknown."""
    times = _fields("/proc/stat")
    return _seconds([*times[1:4], *times[6:9]])  # all but idle and waiting for disks


def _seconds(ticks: Sequence[str]) -> float:
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _fields(path: str) -> list[str]:
    """Read the first line, after the process's name if there is one."""
    try:
        with open(path) as file:
            return file.readline().rpartition(")")[2].split()
    except OSError:
        return []
