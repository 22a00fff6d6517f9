"""Live transcription over a WebSocket: words appear during speech and settle at pauses; memory is bounded.

The client sends one JSON text, then binary frames of 16-bit little-endian mono PCM, then a JSON text:

    {"type": "start", "model": "NAME", "sample_rate": 48000, "chunk_ms": 320}     chunk_ms may be left out
    <binary>, <binary>, ...
    {"type": "stop"}

The server sends JSON texts; times are seconds from the first sample:

    {"type": "ready", "model": "NAME", "sample_rate": 48000, "chunk_seconds": 0.32, "ahead_seconds": 0.16}
                                                                      null, both: decodes the tail
    {"type": "partial", "start": 3.1, "text": "...", "settled": "...", "heard": 4.8}   the line; replaces the last
    {"type": "final", "start": 3.1, "end": 5.6, "text": "...", "words": [{"word", "start", "end", "confidence"}]}
    {"type": "done", "duration": 61.2}                                after "stop"; then it closes
    {"type": "error", "error": {"message", "type", "param", "code"}}  then it closes
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from fastapi import WebSocket, WebSocketDisconnect

from sbkit.infer.samples import whole
from sbkit.serve.access import REQUEST_ID
from sbkit.serve.clients import Shares
from sbkit.serve.errors import ApiError, busy, failed, invalid, missing_model, shown, unsupported
from sbkit.serve.limits import Limits
from sbkit.serve.live_session import LiveSession
from sbkit.serve.metrics import Metrics
from sbkit.serve.registry import Registry, ServedModel
from sbkit.serve.wire import Wire, rate_of

PROTOCOL = "sbkit.live"
_log = logging.getLogger(__name__)
_TAKEN = frozenset({"type", "model", "sample_rate", "chunk_ms"})
_START_SECONDS = 10.0
_LAST_SECONDS = 5.0  # to send an error to a client who may not read it
_POLICY, _INTERNAL = 1008, 1011  # close codes of a WebSocket


class LiveSessions:
    """All live sessions of the server."""

    def __init__(self, limits: Limits, metrics: Metrics):
        self._limits, self._metrics = limits, metrics
        self._shares = Shares(limits.max_live, limits.client_share)
        self.inside = 0
        """The current number of sessions."""
        self.sessions: set[LiveSession] = set()
        """Those that are open."""
        self._ending = False

    def end(self) -> None:
        """Ask all sessions to finish, as if their clients had sent "stop"; refuse new ones."""
        self._ending = True
        for session in self.sessions:
            session.end()

    def place(self, client: str | None) -> contextlib.AbstractContextManager[None]:
        """Hold a place for one session of a client; raises ``ApiError`` 429 if there is none."""
        if self.inside >= self._limits.max_live:
            raise busy(f"{self.inside} live sessions are already open", 30)
        share = contextlib.ExitStack()
        share.enter_context(self._shares.place(client, "live sessions"))
        self.inside += 1
        return self._leaving(share)

    @contextlib.contextmanager
    def _leaving(self, share: contextlib.ExitStack) -> Iterator[None]:
        with share:
            try:
                yield
            finally:
                self.inside -= 1

    async def session(self, websocket: WebSocket, registry: Registry) -> None:
        """Run a session from the handshake to the end."""
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept(subprotocol=PROTOCOL if PROTOCOL in offered else None)
        session = None
        try:
            wire = Wire(websocket)
            session = LiveSession(websocket, wire, *await _start(wire, registry), self._limits)
            self.sessions.add(session)
            if self._ending:
                session.end()
            await session.run()
        except WebSocketDisconnect:
            pass
        except ApiError as error:
            self._metrics.refused.labels(error.code or error.status).inc()
            await _end(websocket, error, _POLICY)
        except Exception as error:
            _log.exception("session %s failed", websocket.scope[REQUEST_ID])
            await _end(websocket, failed(websocket.scope[REQUEST_ID], error), _INTERNAL)
        finally:
            if session is not None:
                session.close()
                self.sessions.discard(session)
                self._metrics.audio.labels(session.served.name).inc(session.seconds)


async def _end(websocket: WebSocket, error: ApiError, code: int) -> None:
    async def say() -> None:
        await websocket.send_json({"type": "error", **error.body})
        await websocket.close(code, error.code or "")

    with contextlib.suppress(RuntimeError, WebSocketDisconnect, asyncio.TimeoutError, TimeoutError):  # it may be closed
        await asyncio.wait_for(say(), _LAST_SECONDS)


async def _start(wire: Wire, registry: Registry) -> tuple[ServedModel, int, int | None]:
    """Receive the first message: the model that a client asks for, its rate, and the milliseconds of a chunk."""
    first = await wire.first(_START_SECONDS)
    if isinstance(first, bytes) or first.get("type") != "start":
        raise invalid('the first message must be {"type": "start", "model": NAME, "sample_rate": HERTZ}')
    if unknown := sorted(set(first) - _TAKEN):
        raise unsupported(unknown, _TAKEN)
    name = first.get("model")
    if name is None:
        raise missing_model([each.name for each in registry.of(ServedModel)])
    if not isinstance(name, str):
        raise invalid(f"model must be a name, not {shown(name)}", "model")
    served = registry.find(name, ServedModel)
    served.check()
    return served, rate_of(first.get("sample_rate")), _chunk(served, first.get("chunk_ms"))


def _chunk(served: ServedModel, wanted: object) -> int | None:
    """Check the chunk that a client asks for."""
    if wanted is None:
        return None
    if not served.chunks_ms:
        raise invalid(f"the model {served.name} has no graph for streams, so no chunks to choose from: leave out "
                      "chunk_ms", "chunk_ms")
    size, there = whole(wanted), f"the model {served.name} has chunks of {', '.join(map(str, served.chunks_ms))} ms"
    if size is None:
        raise invalid(f"chunk_ms must be a whole number of milliseconds, not {shown(wanted)}; {there}", "chunk_ms")
    if size not in served.chunks_ms:
        raise invalid(f"{there}, not of {shown(size)}", "chunk_ms")
    return size
