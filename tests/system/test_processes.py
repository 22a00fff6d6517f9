"""Free ports, not those that the kernel may give to another process meanwhile; children that end with their parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sbkit.system.processes import born, child, free_port

ASSIGNED = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not ASSIGNED.exists(), reason="the system doesn't say which ports it assigns")
def test_a_free_port_is_not_assigned_to_another_process():
    first, last = map(int, ASSIGNED.read_text().split())
    for _ in range(20):
        port = free_port()
        assert not first <= port <= last
        with socket.socket() as ours:
            ours.bind(("127.0.0.1", port))


@pytest.mark.parametrize("way", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a child of its parent's death"))])
def test_a_child_ends_with_its_parent_however_that_ends(tmp_path, way):
    """The child gets a signal that it can handle: a training saves its checkpoint."""
    note = tmp_path / "note"
    lives = (f"import os, signal, sys, time; note = {str(note)!r}; "
             "signal.signal(signal.SIGTERM, lambda *_: (open(note, 'a').write(' saved'), sys.exit())); "
             "open(note + '-', 'w').write(str(os.getpid())); os.rename(note + '-', note); time.sleep(60)")
    parent = subprocess.Popen([sys.executable, "-c", "import sys; from sbkit.system.processes import child\n"
                               f"with child([sys.executable, '-c', {lives!r}]) as process: process.wait()"])
    until = time.monotonic() + 30
    while not note.exists():
        assert parent.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    parent.send_signal(way)
    assert parent.wait() == (143 if way == signal.SIGTERM else -way)
    while born(int(note.read_text().split()[0])) is not None:
        assert time.monotonic() < until, "it runs on"
        time.sleep(0.01)
    assert note.read_text().endswith(" saved")


def test_a_child_that_is_left_gets_the_signal_its_environment_and_its_file(tmp_path):
    with open(tmp_path / "log", "w") as log, child(
            [sys.executable, "-c", "import os, sys, time; print(os.environ['A'], sys.argv[1], flush=True); "
             "time.sleep(60)", "one two"], {**os.environ, "A": "a"}, log, end_by=signal.SIGKILL) as process:
        while not (tmp_path / "log").read_text():
            time.sleep(0.01)
    assert process.returncode == -signal.SIGKILL and (tmp_path / "log").read_text() == "a one two\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
