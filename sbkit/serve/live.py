"""Live transcription over a WebSocket: words appear during speech and become final at pauses; memory is bounded.

The client sends one JSON text, then binary frames of 16-bit little-endian mono PCM, then a JSON text:

    {"type": "start", "model": "NAME", "sample_rate": 48000, "chunk_ms": 320}     chunk_ms may be left out
    <binary>, <binary>, ...
    {"type": "stop"}

The server sends JSON texts; times are seconds from the first sample:

    {"type": "ready", "model": "NAME", "sample_rate": 48000, "chunk_seconds": 0.32, "ahead_seconds": 0.16}
                                                                      both null: no streaming graph
    {"type": "partial", "start": 3.1, "text": "...", "settled": "...", "heard": 4.8}   replaces the last partial
    {"type": "final", "start": 3.1, "end": 5.6, "text": "...", "words": [{"word", "start", "end", "confidence"}]}
    {"type": "done", "duration": 61.2}                                after "stop"; then it closes
    {"type": "done", "duration": 61.2, "reason": "stopping"}          the server stops: go on elsewhere from duration
    {"type": "error", "error": {"message", "type", "param", "code"}}  then it closes
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.websockets import WebSocket, WebSocketDisconnect

from sbkit.errors import shown
from sbkit.infer.samples import check_rate
from sbkit.serve.access import REQUEST_ID
from sbkit.serve.clients import Shares, address
from sbkit.serve.errors import ApiError, failed, invalid, refused_for, unsupported
from sbkit.serve.limits import Limits
from sbkit.serve.live_messages import MessageReader, idle_error
from sbkit.serve.live_session import LiveSession, SessionStart
from sbkit.serve.metrics import Metrics
from sbkit.serve.registry import Registry
from sbkit.serve.served_kinds import ServedRecogniser

#: The subprotocol that a client may name.
PROTOCOL = "sbkit.live"
_START_FIELDS = frozenset({"type", "model", "sample_rate", "chunk_ms"})
#: Seconds in which the first message has to come.
_START_SECONDS = 10.0
#: Seconds to send an error to a client who may not read it.
_ERROR_SECONDS = 5.0
#: When a client should try again if there is no room for a session.
_RETRY_SECONDS = 30
#: Codes with which a WebSocket is closed after an error.
_POLICY = 1008
_INTERNAL = 1011
_log = logging.getLogger(__name__)


class LiveSessions:
    """All live sessions of the server."""

    def __init__(self, limits: Limits, metrics: Metrics):
        self._limits = limits
        self._metrics = metrics
        self._shares = Shares(limits.max_live, limits.client_share)
        self.sessions: set[LiveSession] = set()
        """Those that are open."""
        self._ending = False

    @property
    def active(self) -> int:
        return self._shares.active

    def end(self) -> None:
        """Ask all sessions to finish, as if their clients had sent "stop"; refuse new ones."""
        self._ending = True
        for session in self.sessions:
            session.end()

    async def session(self, websocket: WebSocket, registry: Registry) -> None:
        """Run a session in a slot of its client; raises ``ApiError`` 429 before it begins if there is none."""
        with self._shares.slot(address(websocket.scope), "live sessions", _RETRY_SECONDS):
            offered = websocket.scope.get("subprotocols", [])
            await websocket.accept(subprotocol=PROTOCOL if PROTOCOL in offered else None)
            session = None
            try:
                reader = MessageReader(websocket)
                start = await _receive_start(reader, registry)
                session = LiveSession(websocket, reader, start, self._limits)
                self.sessions.add(session)
                if self._ending:
                    session.end()
                await session.run()
            except WebSocketDisconnect:
                pass
            except ApiError as error:
                self._metrics.refused.labels(error.code).inc()
                await _send_error(websocket, error, _POLICY)
            except Exception as error:
                _log.exception("session %s failed", websocket.scope[REQUEST_ID])
                await _send_error(websocket, failed(websocket.scope[REQUEST_ID], error), _INTERNAL)
            finally:
                if session is not None:
                    session.close()
                    self.sessions.discard(session)
                    self._metrics.audio.labels(session.served.name).inc(session.seconds)


async def _send_error(websocket: WebSocket, error: ApiError, code: int) -> None:
    async def send() -> None:
        await websocket.send_json({"type": "error", **error.body})
        await websocket.close(code, error.code)

    with contextlib.suppress(RuntimeError, WebSocketDisconnect, asyncio.TimeoutError, TimeoutError):  # it may be closed
        await asyncio.wait_for(send(), _ERROR_SECONDS)


async def _receive_start(reader: MessageReader, registry: Registry) -> SessionStart:
    """Receive the first message; raises ``ApiError`` for one that doesn't start a session."""
    try:
        first = await asyncio.wait_for(reader.receive(), _START_SECONDS)
    except (asyncio.TimeoutError, TimeoutError):
        raise idle_error(_START_SECONDS) from None
    if isinstance(first, bytes) or first.get("type") != "start":
        raise invalid("invalid_message",
                      'the first message must be {"type": "start", "model": NAME, "sample_rate": HERTZ}')
    unknown = sorted(set(first) - _START_FIELDS)
    if unknown:
        raise unsupported(unknown, _START_FIELDS)

    name = first.get("model")
    if not isinstance(name, (str, type(None))):
        raise invalid("invalid_type", f"model must be a name, not {shown(name)}", "model")
    served = registry.working(name, ServedRecogniser)
    chunk_ms = first.get("chunk_ms")
    if served.streams is not None:
        with refused_for("chunk_ms"):
            served.streams.frames_of(chunk_ms)
    elif chunk_ms is not None:
        raise invalid("no_streaming_graph", f"the model {served.name} has no streaming graph, so chunk_ms has no "
                      "effect: leave it out", "chunk_ms")
    with refused_for("sample_rate"):
        rate = check_rate(first.get("sample_rate"))
    return SessionStart(served, rate, chunk_ms)
