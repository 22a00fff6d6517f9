"""The WebSocket of a live session: how much of one client is read at once, and what may wait."""

import numpy as np
import serving
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


def test_uvicorn_calls_what_is_overridden(server, monkeypatch):
    """Its older releases, and its other implementations, have a WebSocket that never does."""
    queued, done = [], []
    spied(monkeypatch, "send_receive_event_to_app", lambda socket: queued.append(socket.queue.qsize()))
    spied(monkeypatch, "on_task_complete", lambda _, task: done.append(task))
    with connect(server.live) as socket:
        start(socket)
        socket.socket.sendall(SMALLEST * 3)
        speak(socket, np.zeros(0, np.float32))
    assert len(queued) == 1 + 3 + 1 and max(queued) > 0, "start, audio and stop; some wait for others"
    serving.until(lambda: len(done) == 1)
