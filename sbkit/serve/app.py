"""The application: OpenAI's routes for transcription and speech, the live socket, health, metrics and the page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

import sbkit
from sbkit.infer.graph_model import MAX_SECONDS
from sbkit.infer.transcript import Transcript
from sbkit.serve import clients, form, metrics, replies
from sbkit.serve.access import REQUEST_ID, AccessControl, ApiKeys, Hosts
from sbkit.serve.backlog import Work
from sbkit.serve.connection import ConnectionLimit
from sbkit.serve.decoders import Decoders, Wave
from sbkit.serve.disk import Disk, DiskReservation
from sbkit.serve.errors import ApiError, failed, invalid, not_ready, refused_for, stopping
from sbkit.serve.form import Form, OutputsForm
from sbkit.serve.limits import Limits
from sbkit.serve.live import LiveSessions
from sbkit.serve.metrics import Metrics
from sbkit.serve.registry import Registry, ServedVoice, recognise
from sbkit.serve.replies import Streamed
from sbkit.serve.served import Served
from sbkit.serve.speech import limit_size, read_request, resumed, sound
from sbkit.serve.work import ClientDisconnected, RequestContext, RequestSlots

_log = logging.getLogger(__name__)
_CLIENT_LEFT = 499  # never sent, only counted
_DECODED = object()
_MAX_NUMBERS = 1_000_000  # in a JSON response


@dataclass
class State:
    """State shared by the routes. ``registry`` and ``decoders`` are set once they are loaded and warm."""

    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    registry: Registry | None = None
    decoders: Decoders | None = None
    stopping: bool = False
    live_sessions: LiveSessions = field(init=False)
    disk: Disk = field(init=False)
    connection_limit: ConnectionLimit | None = None
    loop: asyncio.AbstractEventLoop | None = None
    """The event loop of the application, once it runs."""

    def __post_init__(self) -> None:
        self.live_sessions, self.disk = LiveSessions(self.limits, self.metrics), Disk(
            self.limits.disk_bytes, self.limits.client_share)

    def stop(self) -> None:
        """Stop accepting requests, and end live sessions with what was said so far; from any thread."""
        self.stopping = True
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.live_sessions.end)

    def loaded(self) -> Registry:
        """The models; raises ``ApiError`` 503 until they are loaded."""
        if self.registry is None or self.decoders is None:
            raise not_ready()
        return self.registry

    def faults(self) -> list[str]:
        return [each.fault for each in self.registry or () if each.fault]


def make(state: State, keys: ApiKeys | None = None, origins: tuple[str, ...] = (), hosts: Hosts | None = None,
         ) -> ASGIApp:
    rooms = RequestSlots(state.limits, state.metrics)
    floor = state.live_sessions

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.loop = asyncio.get_running_loop()
        if state.connection_limit is not None:
            state.loop.set_exception_handler(state.connection_limit.failed)
        yield
        state.loop = None
        rooms.close()

    _count(state, rooms, floor)

    async def index(_: Request) -> Response:
        text, policy = _page()
        return HTMLResponse(text, headers={"content-security-policy": policy, "referrer-policy": "no-referrer",
                                           "cache-control": "no-cache"})

    async def health(_: Request) -> Response:
        """Report whether the process should be kept alive; no model is run for it."""
        faults = state.faults()
        status = "unhealthy" if faults else "loading" if state.registry is None else "ok"
        return JSONResponse({
            "status": status, "version": sbkit.__version__, "faults": faults,
            "models": {each.name: each.facts for each in state.registry or ()},
        }, 503 if faults else 200)

    async def ready(_: Request) -> Response:
        why = "stopping" if state.stopping else "loading" if state.registry is None else "; ".join(state.faults())
        return JSONResponse({"ready": not why, "why": why or None}, 503 if why else 200)

    async def numbers(_: Request) -> Response:
        return PlainTextResponse(state.metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [each.listed for each in state.loaded()]})

    async def model(request: Request) -> Response:
        any_kind = state.loaded().find(request.path_params["name"], Served)  # type: ignore[type-abstract]  # never made
        return JSONResponse(any_kind.listed)

    async def voices(_: Request) -> Response:
        data = [voice for each in state.loaded().of(ServedVoice) for voice in each.voices]
        return JSONResponse({"object": "list", "data": data})

    async def transcriptions(request: Request) -> Response:
        with _uploaded(state, rooms, request) as (upload, visit, held, stay):
            ask = await visit.read(form.read(upload, form.transcription, state.loaded))
            found = visit.stream(lambda told: _transcribe(state, ask, held, visit, told), ask.served.batcher.backlog)
            await anext(found)  # it is audio; from here on errors are sent as events
            if ask.stream:
                return Streamed(replies.STREAM, _events(found, request.scope[REQUEST_ID]), stay.pop_all())
            return await anext(found)

    async def outputs(request: Request) -> Response:
        with _uploaded(state, rooms, request) as (upload, visit, held, _):
            ask = await visit.read(form.read(upload, form.outputs, state.loaded))
            return await anext(visit.stream(lambda _: _outputs(state, ask, held, visit), ask.served.batcher.backlog))

    async def speech(request: Request) -> Response:
        with contextlib.ExitStack() as stay:
            stay.enter_context(rooms.place(clients.address(request.scope)))
            request = form.limited(request, state.limits, limit_size)
            visit = rooms.context(request)
            stay.callback(visit.close)
            ask = await visit.read(read_request(request, state.loaded, visit.step))
            spoken = sound(visit, ask, state.metrics)
            first = await anext(spoken)  # from here on nothing is wrong with the request
            answer = resumed(first, spoken, ask.sse, request.scope[REQUEST_ID], state.metrics)
            return Streamed(replies.STREAM if ask.sse else ask.media_type, answer, stay.pop_all())

    async def live(websocket: WebSocket) -> None:
        with contextlib.ExitStack() as stay:
            try:
                registry = state.loaded()
                stay.enter_context(floor.place(clients.address(websocket.scope)))
            except ApiError as error:
                state.metrics.refused.labels(error.code or error.status).inc()
                await websocket.send_denial_response(error.answer)
                return
            await floor.session(websocket, registry)

    async def nowhere(websocket: WebSocket) -> None:
        error = invalid(f"there is no WebSocket at {websocket.url.path[:80]}; live transcription is at /v1/audio/live",
                        code="unknown_url")
        error.status = 404
        state.metrics.refused.labels(error.code or "").inc()
        await websocket.send_denial_response(error.answer)

    app = Starlette(routes=[
        Route("/", index), Route("/health", health), Route("/ready", ready), Route("/metrics", numbers),
        Route("/v1/models", models), Route("/v1/models/{name}", model), Route("/v1/audio/voices", voices),
        Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
        Route("/v1/audio/outputs", outputs, methods=["POST"]), Route("/v1/audio/speech", speech, methods=["POST"]),
        WebSocketRoute("/v1/audio/live", live), WebSocketRoute("/{path:path}", nowhere),
    ], lifespan=lifespan, exception_handlers=_error_handlers(state))
    return AccessControl(app, keys or ApiKeys(()), origins, state.limits.upload_bytes, state.metrics, hosts,
                         lambda: state.stopping)


@contextlib.contextmanager
def _uploaded(state: State, rooms: RequestSlots, request: Request
              ) -> Iterator[tuple[Request, RequestContext, DiskReservation, contextlib.ExitStack]]:
    """Hold a place and room on the disk for a request that uploads a recording, until the stack's end."""
    with contextlib.ExitStack() as stay:
        client = clients.address(request.scope)
        stay.enter_context(rooms.place(client))
        held = stay.enter_context(contextlib.closing(DiskReservation(state.disk, client)))
        request = form.limited(request, state.limits, held.grow)
        visit = rooms.context(request)
        stay.callback(visit.close)
        yield request, visit, held, stay


# ---------------------------------------------------------------------- a transcription, a model's tensors


def _outputs(state: State, ask: OutputsForm, held: DiskReservation, visit: RequestContext) -> Response:
    """Run a model that gives tensors, and make the answer in a thread."""
    served, rate = ask.served, ask.served.config.sample_rate
    with contextlib.closing(visit.work(served.batcher.backlog)) as audio:
        with contextlib.closing(_decoded(state, ask, held, visit, audio)) as wave:
            if wave.samples > MAX_SECONDS * rate:
                raise invalid(f"this model takes recordings up to {MAX_SECONDS:g} s", "file", "invalid_audio")
            signal = np.concatenate(list(wave.blocks()))
        try:
            found = visit.job.result(visit.job.watch(served.batcher.submit(signal, visit.job.client)))
        except Exception:
            served.check()  # raises for a broken device
            raise
        made = served.engine.output(found)
    state.metrics.audio.labels(served.name).inc(len(signal) / rate)
    if ask.sound:
        with refused_for("response_format", "unsupported_value"):
            return Response(made.wav(rate, len(signal)), media_type="audio/wav")
    if made.size > _MAX_NUMBERS:
        raise invalid(f"the response would have {made.size:,} numbers, the limit is {_MAX_NUMBERS:,}", "file",
                      "invalid_audio")
    return JSONResponse({"model": served.name, **made.facts()})


def _decoded(state: State, ask: Form | OutputsForm, held: DiskReservation, visit: RequestContext, audio: Work) -> Wave:
    """Decode a request's upload, and release it."""
    with contextlib.closing(held), ask.upload:
        assert state.decoders is not None, "the models are loaded"
        return state.decoders.decode(ask.upload, ask.served.config.sample_rate, visit.job, audio)


def _transcribe(state: State, ask: Form, held: DiskReservation, visit: RequestContext,
                told: Callable[[Any], None]) -> Transcript | Response:
    """Transcribe and make the answer in a thread: reports first that the upload is audio, then, for a stream, pieces of
    the text, and its transcript is the last."""
    job = visit.job
    with contextlib.closing(visit.work(ask.served.batcher.backlog)) as audio:
        wave = _decoded(state, ask, held, visit, audio)
        told(_DECODED)
        try:
            with contextlib.closing(wave):
                transcript = recognise(ask.served, wave.blocks(), job, audio, told if ask.stream else None)
                transcript.warning = wave.warning
        except Exception:
            ask.served.check()  # raises for a broken device
            raise
    state.metrics.audio.labels(ask.served.name).inc(transcript.duration)
    return transcript if ask.stream else replies.reply(transcript, ask.response_format, ask.granularities)


async def _events(found: AsyncIterator[str | Transcript], request: str) -> AsyncGenerator[bytes, None]:
    """Yield pieces of the text as they are recognised, then the whole text. Nothing follows an error."""
    try:
        async for each in found:
            yield replies.delta(each) if isinstance(each, str) else replies.done(each)
        yield replies.END_OF_STREAM
    except ClientDisconnected:
        pass
    except ApiError as error:
        yield replies.event(error.body)
    except Exception as error:
        _log.exception("request %s failed", request)
        yield replies.event(failed(request, error).body)


# ---------------------------------------------------------------------- errors and numbers


def _error_handlers(state: State) -> dict[Any, Callable[..., Any]]:  # as Starlette has them
    async def refused(_: Request, error: ApiError) -> Response:
        state.metrics.refused.labels(error.code or error.status).inc()
        return error.answer

    async def unknown(request: Request, error: HTTPException) -> Response:
        """Answer requests for unknown paths or methods."""
        found = invalid(f"{request.method} {request.url.path[:80]}: {error.detail}", code="unknown_url")
        found.status, found.headers = error.status_code, dict(error.headers or {})
        return await refused(request, found)

    async def left(request: Request, _: Exception) -> Response:
        """Answer nobody, or a client whose request was cut off at the server's end."""
        return await refused(request, stopping()) if state.stopping else Response(status_code=_CLIENT_LEFT)

    async def broke(request: Request, error: Exception) -> Response:
        return await refused(request, failed(request.scope[REQUEST_ID], error))

    return {ApiError: refused, ClientDisconnect: left, ClientDisconnected: left, HTTPException: unknown,
            Exception: broke}


def _count(state: State, rooms: RequestSlots, floor: LiveSessions) -> None:
    def by_model(read: Callable[[Any], float]) -> Callable[[], list[tuple[list[str], float]]]:
        return lambda: [([each.name], read(each)) for each in state.registry or ()]

    gauge = state.metrics.gauge
    gauge("requests_inside", "Requests running or waiting.", (), lambda: [((), rooms.inside)])
    gauge("live_sessions", "Live sessions.", (), lambda: [((), floor.inside)])
    gauge("signals_waiting", "Signals waiting for a batch.", ["model"], by_model(lambda each: each.batcher.waiting))
    gauge("model_device", "1, with the requested device and the one that is used.",
          ["model", "file", "asked", "device", "provider"],
          lambda: [((each.name, used.file, used.requested, used.device, used.provider), 1.0)
                   for each in state.registry or () for used in each.placements])
    gauge("device_fault", "1 if the device is broken.", ["model"], by_model(lambda each: float(bool(each.fault))))


_FILE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def _page() -> tuple[str, str]:
    """Read the page, and make the policy that allows only its own script and style."""
    text = _FILE.read_text(encoding="utf-8")
    digests = {kind: base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
               for kind, inside in _INLINE.findall(text)}
    policy = (f"default-src 'none'; script-src 'sha256-{digests['script']}' blob:; worker-src blob:; "
              f"style-src 'sha256-{digests['style']}'; connect-src 'self'; img-src data:; media-src blob:; "
              "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return text, policy
