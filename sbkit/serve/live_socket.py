"""The WebSocket of a live session: it reads little at a time, and is cut if its client doesn't read.

It extends a protocol of uvicorn that isn't public: setup.cfg has the releases for which that was tried.
"""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from sbkit.serve.clients import address_of_peer

#: The longest message.
MAX_FRAME_BYTES = 8 << 20
#: Bytes that are sent and not read, in the system's buffer and in this process.
_UNREAD_BYTES = 1 << 14
#: Seconds to read what was sent before the session's end.
_CLOSE_SECONDS = 10.0
#: Messages that may wait for the application, and bytes of a longer one that may not.
_MAX_WAITING = 16
_LONG_MESSAGE = 1 << 16
#: Bytes that are read at once: at most some 700 of the smallest frames, in a few milliseconds.
_READ_BYTES = 1 << 12
_NO_HANDSHAKE = b"this is not a valid WebSocket request: a header is invalid or too long, or there are too many headers"


class LiveSocket(WebSocketsSansIOProtocol):
    """WebSocket for many small messages, which is cut soon after its end, even if the client doesn't read.

    uvicorn stops reading from a connection at each message until the application takes it. These two system calls
    double the time of a packet of 20 ms. Here some may wait.

    asyncio reads up to 256 KiB at once, and all frames in it are handled before any other client's: with the smallest
    frames, that takes a second. Here it reads a few packets at once.
    """

    #: A session is never idle for the limit of connections; ``MessageReader`` has its own time limit.
    idle_since: None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Limit the bytes that wait for a slow reader, and those that are read from one client at a time."""
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        transport.set_write_buffer_limits(_UNREAD_BYTES)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own, which the server asks for
        self._pong = b""  # a pong that could not be sent yet
        super().connection_made(transport)
        self.address = address_of_peer(self.client, self.config)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived. The first data is the whole request: if it starts no handshake, nothing will."""
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
                                 b"content-length: %d\r\nconnection: close\r\n\r\n%b"
                                 % (len(_NO_HANDSHAKE), _NO_HANDSHAKE))
            self.transport.close()

    def handle_ping(self) -> None:
        """Answer a ping; while the client doesn't read, only the last pong is kept, as the protocol allows."""
        self._pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self._send_pong()

    def resume_writing(self) -> None:
        """Write again, a waiting pong first."""
        super().resume_writing()
        self._send_pong()

    def _send_pong(self) -> None:
        pong = self._pong
        self._pong = b""
        if pong and not self.close_sent:
            self.transport.write(pong)

    def handle_cont(self, event: Frame) -> None:
        """Take a part of a message, but no empty one: it would be kept without counting towards the size limit."""
        if event.data or event.fin:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Queue a message for the application, and stop reading if many or long ones wait."""
        paused = self.read_paused
        self.read_paused = True  # so that uvicorn doesn't stop reading by itself
        size = sum(map(len, self.frames))
        super().send_receive_event_to_app()
        self.read_paused = paused
        if not paused and (size > _LONG_MESSAGE or self.queue.qsize() >= _MAX_WAITING):
            self.read_paused = True
            self.transport.pause_reading()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Cut the connection, if it isn't closed by then."""
        super().on_task_complete(task)
        self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)
