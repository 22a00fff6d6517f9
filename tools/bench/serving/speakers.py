"""A process of many clients of the live socket, each of which sends speech in real time.

    python tools/serving/speakers.py < PLAN.json > FOUND.json

It is a separate process with one thread, frames that are made beforehand and no WebSocket library, so that clients use
little of the CPU whose server is measured.
"""

from __future__ import annotations

import heapq
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_MASKED, _WHOLE = 0x80, 0x80
_NO_MASK = bytes(4)  # clients have to mask; with zeros, bytes stay what they are
_TICK = 0.002  # packets that are due within this time are sent at once, as they may well come from a network
_AFTER_SECONDS = 20.0  # without the end after "stop", a session is lost
_READ = 1 << 16


@dataclass(frozen=True)
class Plan:
    """What the clients of a process do.

    audio : file of 16-bit samples at ``rate``, which sessions begin at different places and go through in circles
    sessions : clients, those with the numbers ``first``, ``first + step``, ... of ``count`` in all processes
    seconds : what each of them says
    packet : samples in a frame
    chunk_ms : the chunk to ask for; None: the server's default
    begins : seconds over which their beginnings are spread
    """

    host: str
    port: int
    model: str
    audio: str
    rate: int
    sessions: int
    seconds: float
    packet: int
    chunk_ms: int | None = None
    begins: float = 4.0
    first: int = 0
    step: int = 1
    count: int = 1


@dataclass
class Found:
    """What the clients of a process saw."""

    latencies: list[float]
    """Of each partial: its arrival, less the end of its audio."""
    gaps: list[float]
    """Seconds between two partials of a session."""
    lost: list[str]
    """Why each lost session was lost."""
    late: list[float]
    """How much later than planned packets were sent."""
    finals: int
    cpu_seconds: float


class Speaker:
    """One client."""

    def __init__(self, plan: Plan, number: int, audio: bytes, found: Found):
        self.plan, self.number, self._audio, self._found = plan, number, audio, found
        self.socket = socket.create_connection((plan.host, plan.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came, self._out = bytearray(), bytearray()
        self._place = 2 * (number * (len(audio) // 2) // max(1, plan.count))
        self._shown = 0.0
        self.sent = 0
        self.packets = round(plan.seconds * plan.rate / plan.packet)
        self.began = self.stopped = 0.0
        self.over = False
        self._greet()

    def _greet(self) -> None:
        """Do the handshake and say what will come, before the clock runs."""
        plan = self.plan
        self.socket.sendall((f"GET /v1/audio/live HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\nUpgrade: websocket\r\n"
                             "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                             "Sec-WebSocket-Key: c2JraXQgYmVuY2htYXJrLg==\r\n\r\n").encode())
        while b"\r\n\r\n" not in self._came:
            self._came += self._receive()
        head, _, rest = bytes(self._came).partition(b"\r\n\r\n")
        self._came = bytearray(rest)
        if b" 101 " not in head.split(b"\r\n", 1)[0]:
            raise SystemExit(f"the server refuses a session: {head.splitlines()[0].decode()} {rest.decode()}")
        start = {"type": "start", "model": plan.model, "sample_rate": plan.rate}
        self.socket.sendall(_frame(_TEXT, json.dumps(
            start if plan.chunk_ms is None else start | {"chunk_ms": plan.chunk_ms}).encode()))
        messages: list[Any] = []
        while not messages:
            self._came += self._receive()
            messages = [json.loads(data) for opcode, data in self._frames() if opcode == _TEXT]
        if messages[0]["type"] != "ready":
            raise SystemExit(f"the server refuses a session: {messages[0]}")
        self._ahead = messages[0].get("ahead_seconds") or 0.0
        self.socket.setblocking(False)

    def _receive(self) -> bytes:
        data = self.socket.recv(_READ)
        if not data:
            raise SystemExit("the server closed a connection during the handshake")
        return data

    @property
    def due(self) -> float:
        """When the next packet was spoken."""
        return self.began + (self.sent + 1) * self.plan.packet / self.plan.rate

    def speak(self, now: float) -> None:
        """Send the packets that are due, or "stop" after the last one."""
        if self.sent < self.packets:
            self._found.late.append(now - self.due)
            size = 2 * self.plan.packet
            data = self._audio[self._place:self._place + size]
            self._place = (self._place + len(data)) % len(self._audio)
            self._send(_frame(_BINARY, data.ljust(size, b"\0")))
            self.sent += 1
        if self.sent == self.packets:
            self._send(_frame(_TEXT, b'{"type": "stop"}'))
            self.stopped = now

    def _send(self, data: bytes) -> None:
        if not self._out:
            try:
                data = data[self.socket.send(data):]
            except BlockingIOError:
                pass
            except OSError as error:
                self.lose(f"the connection broke: {error.strerror}")
                return
        self._out += data

    @property
    def blocked(self) -> bool:
        """Whether the server doesn't read fast enough."""
        return bool(self._out)

    def flush(self) -> None:
        """Send what could not be sent before."""
        data, self._out = bytes(self._out), bytearray()
        self._send(data)

    def listen(self) -> None:
        """Take what the server says."""
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(f"the connection broke: {error.strerror}")
            return
        if not data:
            self.lose("closed without an end")
            return
        now = time.perf_counter()
        self._came += data
        for opcode, payload in self._frames():
            if opcode == _TEXT:
                self._handle(json.loads(payload), now)
            elif opcode == _PING:
                self._send(_frame(_PONG, payload))
            elif opcode == _CLOSE:
                self.lose("closed without an end")

    def _handle(self, message: dict[str, Any], now: float) -> None:
        if message["type"] == "partial":
            end = message["heard"] + (0.0 if self.stopped else self._ahead)  # the end of its audio
            self._found.latencies.append(now - self.began - end)
            if self._shown:
                self._found.gaps.append(now - self._shown)
            self._shown = now
        elif message["type"] == "final":
            self._found.finals += 1
        elif message["type"] == "error":
            self.lose(str(message["error"]["code"] or message["error"]["message"]))
        elif message["type"] == "done":
            sent = self.packets * self.plan.packet / self.plan.rate
            if abs(message["duration"] - sent) > 0.01:
                self.lose(f"the server processed {message['duration']} s of {sent:g} s")
            self._end()

    def lose(self, why: str) -> None:
        """Note that the session was lost, once."""
        if not self.over:
            self._found.lost.append(why)
            self._end()

    def _end(self) -> None:
        self.over = True
        self.socket.close()

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        """Take complete frames from the received bytes."""
        while len(self._came) >= 2:
            size, at = self._came[1], 2
            if size > 125:
                at = 4 if size == 126 else 10
                if len(self._came) < at:
                    return
                size = int.from_bytes(self._came[2:at], "big")
            if len(self._came) < at + size:
                return
            opcode, payload = self._came[0] & 0x0F, bytes(self._came[at:at + size])
            del self._came[:at + size]
            yield opcode, payload


def _frame(opcode: int, payload: bytes) -> bytes:
    size = len(payload)
    head = struct.pack("!BB", _WHOLE | opcode, _MASKED | size) if size < 126 else \
        struct.pack("!BBH", _WHOLE | opcode, _MASKED | 126, size)
    return head + _NO_MASK + payload


def run(plan: Plan) -> Found:
    """Hold all sessions of a plan, to their ends."""
    found = Found([], [], [], [], 0, 0.0)
    audio = Path(plan.audio).read_bytes()
    speakers = [Speaker(plan, plan.first + i * plan.step, audio, found) for i in range(plan.sessions)]
    with selectors.DefaultSelector() as selector:
        for speaker in speakers:
            selector.register(speaker.socket, selectors.EVENT_READ, speaker)
        _talk(plan, speakers, selector)
    found.cpu_seconds = sum(os.times()[:2])
    return found


def _talk(plan: Plan, speakers: list[Speaker], selector: selectors.BaseSelector) -> None:
    clock = time.perf_counter
    begin = clock() + 0.1
    for speaker in speakers:
        speaker.began = begin + plan.begins * speaker.number / max(1, plan.count)
    turns = [(speaker.due, speaker.number, speaker) for speaker in speakers]
    heapq.heapify(turns)
    inside = set(speakers)
    while inside:
        now = clock()
        while turns and turns[0][0] <= now:
            _, number, speaker = heapq.heappop(turns)
            if not speaker.over:
                speaker.speak(now)
                if speaker.sent < speaker.packets:
                    heapq.heappush(turns, (speaker.due, number, speaker))
        wait = max(_TICK, turns[0][0] - now) if turns else 0.1
        for key, _ in selector.select(wait):
            key.data.listen()
        for speaker in [each for each in inside if each.over or each.blocked or each.stopped]:
            if speaker.blocked:
                speaker.flush()
            if speaker.stopped and clock() - speaker.stopped > _AFTER_SECONDS:
                speaker.lose("no end in time")
            if speaker.over:
                inside.discard(speaker)


def main() -> int:
    print(json.dumps(asdict(run(Plan(**json.load(sys.stdin))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
