"""The WebSocket of a live session: how much of one client is read at once, and what may wait."""

import asyncio
import inspect
import re
import socket as sockets
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import serving
import uvicorn
from packaging.requirements import Requirement
from test_live import RATE, speak, start
from uvicorn.server import ServerState
from websockets.protocol import SERVER, Protocol
from websockets.sync.client import connect

from sbkit.serve import http_connection
from sbkit.serve.http_connection import TimedConnection
from sbkit.serve.live_socket import LiveSocket

CONTINUATION, BINARY, PING = 0, 2, 9
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


@pytest.mark.parametrize("kind", [TimedConnection, LiveSocket])
def test_uvicorn_has_what_our_protocols_extend(kind):
    """Its protocols aren't public: a release that renames what ours call there is found here."""
    [base] = kind.__bases__
    called = set(re.findall(r"super\(\)\.(\w+)\(", inspect.getsource(kind)))
    assert called >= {"connection_made", "data_received"}
    assert not [name for name in called if not callable(getattr(base, name, None))]


@pytest.mark.parametrize("name", ["uvicorn", "onnxscript", "transformers"])
def test_what_is_used_beyond_a_public_interface_has_an_upper_bound_that_holds_here(name):
    lines = (Path(__file__).parents[2] / "setup.cfg").read_text().splitlines()
    requirements = [Requirement(line.strip()) for line in lines if re.match(rf"    {name} [<>=]", line)]
    assert requirements
    for requirement in requirements:
        assert any(each.operator == "<" for each in requirement.specifier), requirement
        assert requirement.specifier.contains(version(name)), requirement


UPGRADE = (b"GET /v1/audio/live%s HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
           b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n%s\r\n")
#: Requests that h11 takes, and the library of WebSockets doesn't.
NO_HANDSHAKES = {"control character": UPGRADE % (b"", b"x: \x01\r\n"),
                 "long address": UPGRADE % (b"?" + b"a" * 9000, b""),
                 "long header": UPGRADE % (b"", b"x: %b\r\n" % (b"y" * 9000)),
                 "many headers": UPGRADE % (b"", b"".join(b"x%d: y\r\n" % number for number in range(200)))}


@pytest.mark.parametrize("request_", NO_HANDSHAKES.values(), ids=NO_HANDSHAKES)
def test_an_upgrade_that_begins_no_handshake_is_a_400_and_the_end(server, request_):
    assert serving.exchange(server.port, request_).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_half_a_request_is_a_400_and_the_end_and_no_request_only_the_end(server, monkeypatch):
    monkeypatch.setattr(http_connection, "CHECK_SECONDS", 0.1)
    assert serving.exchange(server.port, b"GET / HT").startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert serving.exchange(server.port, b"") == b""


@pytest.mark.slow
def test_who_reads_no_answer_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(http_connection, "_SLOW_READER_SECONDS", 0.5)
    with sockets.create_connection(("127.0.0.1", server.port), timeout=10) as asking, pytest.raises(ConnectionError):
        asking.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000)
        serving.until(lambda: asking.send(b"G") == 0)


class Unread:
    """A transport whose client doesn't read, so that all that is written waits."""

    def __init__(self, socket):
        self.socket, self.waits = socket, []

    def get_extra_info(self, name):
        return self.socket if name == "socket" else None

    def set_write_buffer_limits(self, high):
        self.high = high

    def write(self, data):
        self.waits.append(data)


@pytest.fixture
def alone():
    """A WebSocket by itself, past its handshake, and its transport."""
    async def app(scope, receive, send):
        raise AssertionError

    async def made(lower):
        config = uvicorn.Config(app)
        config.load()
        socket, transport = LiveSocket(config, ServerState(), {}), Unread(lower)
        socket.connection_made(transport)
        socket.conn, socket.handshake_initiated = Protocol(SERVER), True
        return socket, transport

    with sockets.socket() as lower:
        yield asyncio.run(made(lower))


def framed(opcode, data=b"", last=True):
    """A frame of a client whose mask is nought."""
    return bytes([opcode | 0x80 * last, 0x80 | len(data), 0, 0, 0, 0]) + data


def test_of_pings_that_a_client_does_not_read_the_last_is_answered_once_it_does(alone):
    socket, transport = alone
    socket.data_received(framed(PING, b"a"))
    socket.pause_writing()
    for number in range(1000):
        socket.data_received(framed(PING, str(number).encode()))
    socket.resume_writing()
    socket.resume_writing()
    assert [data[2:] for data in transport.waits] == [b"a", b"999"]
    socket.pause_writing()
    socket.data_received(framed(PING, b"b"))
    socket.close_sent = True
    socket.resume_writing()
    assert len(transport.waits) == 2, "nothing may follow the end"


def test_empty_fragments_of_a_message_are_not_kept(alone):
    socket, _ = alone
    socket.data_received(framed(BINARY, last=False) + framed(CONTINUATION, last=False) * 1000)
    socket.data_received(framed(CONTINUATION, b"ab", last=False))
    assert sum(map(len, socket.frames)) == 2 and len(socket.frames) <= 2
    socket.data_received(framed(CONTINUATION))
    assert socket.queue.get_nowait() == {"type": "websocket.receive", "bytes": b"ab"}
