"""Free ports: not those that the kernel may give to another process meanwhile."""

import socket
from pathlib import Path

import pytest

from sbkit.system.processes import free_port

ASSIGNED = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not ASSIGNED.exists(), reason="the system doesn't say which ports it assigns")
def test_a_free_port_is_not_assigned_to_another_process():
    first, last = map(int, ASSIGNED.read_text().split())
    for _ in range(20):
        port = free_port()
        assert not first <= port <= last
        with socket.socket() as ours:
            ours.bind(("127.0.0.1", port))
