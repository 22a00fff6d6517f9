"""The WebSocket of a live session: how much of one client is read at once, and what may wait."""

import numpy as np
from test_live import RATE, speak, start
from websockets.sync.client import connect

from sbkit.serve.connection import LiveSocket

SMALLEST = b"\x82\x82\0\0\0\0\0\0"  # a frame of one sample


def spied(monkeypatch, name, note):
    """Call ``note`` with the socket and the arguments before a method of all live sockets."""
    real = getattr(LiveSocket, name)

    def spy(self, *args):
        note(self, *args)
        return real(self, *args)

    monkeypatch.setattr(LiveSocket, name, spy)


def test_little_of_a_flood_is_read_before_others_have_their_turn(server, monkeypatch):
    sizes = []
    spied(monkeypatch, "data_received", lambda _, data: sizes.append(len(data)))
    with connect(server.live) as socket:
        start(socket)
        socket.socket.sendall(SMALLEST * 5000)
        assert speak(socket, np.zeros(0, np.float32))[-1]["duration"] == round(5000 / RATE, 3)
    assert sum(sizes) > len(SMALLEST) * 5000 and max(sizes) <= 4096
