"""The application: OpenAI's routes for transcription and speech, the live socket, health, metrics and the page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import logging
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
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
from sbkit.infer.sound_file import KINDS
from sbkit.infer.transcript import Transcript
from sbkit.serve import clients, form, metrics, replies
from sbkit.serve.access import AUTHORISED, REQUEST_ID, AccessControl, ApiKeys, Hosts
from sbkit.serve.backlog import Work
from sbkit.serve.connection_limit import ConnectionLimit
from sbkit.serve.corrections import MAX_SECONDS as MAX_CORRECTED_SECONDS
from sbkit.serve.corrections import Corrections, worth
from sbkit.serve.decoders import Decoders, Wave
from sbkit.serve.disk import Disk, DiskReservation
from sbkit.serve.errors import ApiError, failed, invalid, not_ready, refused_for, stopping, too_large
from sbkit.serve.form import CorrectionForm, Form, OutputsForm
from sbkit.serve.limits import Limits
from sbkit.serve.live import LiveSessions
from sbkit.serve.metrics import Metrics
from sbkit.serve.recording import recognise
from sbkit.serve.registry import Registry
from sbkit.serve.replies import Streamed
from sbkit.serve.request_context import ClientDisconnected, RequestContext
from sbkit.serve.request_slots import RequestSlots
from sbkit.serve.served import Served
from sbkit.serve.served_kinds import ServedGraph, ServedRecogniser, ServedVoice
from sbkit.serve.speech import limit_size, read_request, stream_body, synthesise

_log = logging.getLogger(__name__)
_CLIENT_LEFT = 499  # a status that is never sent, only counted
_DECODED = object()  # reported once an upload turned out to be audio
_FORM_BYTES = 1 << 16  # of a form's boundaries and short fields, in addition to the file
_MAX_NUMBERS = 1_000_000  # in a JSON response
_TRANSCRIPTIONS, _CORRECTIONS = "/v1/audio/transcriptions", "/v1/audio/corrections"


class State:
    """State shared by the routes. ``registry`` and ``decoders`` are set once they are loaded and warm."""

    def __init__(self, limits: Limits, corrections: Corrections | None = None):
        self.limits, self.metrics, self.corrections = limits, Metrics(), corrections
        self.live_sessions = LiveSessions(limits, self.metrics)
        self.disk = Disk(limits.disk_bytes, limits.client_share)
        self.registry: Registry | None = None
        self.decoders: Decoders | None = None
        self.connection_limit: ConnectionLimit | None = None
        self.draining = False
        """Whether the server will soon stop: it still accepts requests, but isn't ready for more."""
        self.stopping = False
        """Whether it refuses requests."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the application, once it runs."""

    def drain(self) -> None:
        """Report that the server isn't ready, so that requests go elsewhere; those that still come are answered."""
        self.draining = True

    def stop(self) -> None:
        """Stop accepting requests, and finish live sessions with the speech received so far; from any thread."""
        self.draining = self.stopping = True
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self.live_sessions.end)

    def loaded(self) -> Registry:
        """The models; raises ``ApiError`` 503 until they are loaded."""
        if self.registry is None or self.decoders is None:
            raise not_ready()
        return self.registry

    def faults(self) -> list[str]:
        """Why models can't run any more; empty if all can."""
        faults = [served.fault for served in self.registry or ()]
        return [fault for fault in faults if fault]


def make_app(state: State, keys: ApiKeys, origins: Iterable[str], hosts: Hosts | None) -> ASGIApp:
    slots = RequestSlots(state.limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.loop = asyncio.get_running_loop()
        if state.connection_limit is not None:
            state.loop.set_exception_handler(state.connection_limit.failed)
        yield
        state.loop = None
        slots.close()

    _register_gauges(state, slots)

    async def index(_: Request) -> Response:
        page, policy = _page()
        return HTMLResponse(page, headers={"content-security-policy": policy, "referrer-policy": "no-referrer",
                                           "cache-control": "no-cache"})

    async def health(request: Request) -> Response:
        """Report whether the process should be kept alive, without running a model."""
        faults = state.faults()
        status = "ok"
        if faults:
            status = "unhealthy"
        elif state.registry is None:
            status = "loading"
        facts: dict[str, Any] = {"status": status}
        if request.scope[AUTHORISED]:
            facts |= {"version": sbkit.__version__, "faults": faults,
                      "models": {served.name: served.facts for served in state.registry or ()}}
        return JSONResponse(facts, 503 if faults else 200)

    async def ready(request: Request) -> Response:
        """Report whether the server accepts requests, and will for some time."""
        why = None
        if state.draining:
            why = "stopping"
        elif state.registry is None:
            why = "loading"
        elif faults := state.faults():
            why = "; ".join(faults) if request.scope[AUTHORISED] else "unhealthy"
        return JSONResponse({"ready": why is None, "why": why}, 200 if why is None else 503)

    async def prometheus(_: Request) -> Response:
        return PlainTextResponse(state.metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def models(_: Request) -> Response:
        data = [served.listed for served in state.loaded()]
        if state.corrections is not None:
            for facts in data:
                if _TRANSCRIPTIONS in facts["endpoints"]:
                    facts["endpoints"] = [*facts["endpoints"], _CORRECTIONS]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        served = state.loaded().find(request.path_params["name"], Served)  # type: ignore[type-abstract]  # never made
        return JSONResponse(served.listed)

    async def voices(_: Request) -> Response:
        data = [voice for served in state.loaded().of(ServedVoice) for voice in served.voices]
        return JSONResponse({"object": "list", "data": data})

    async def transcriptions(request: Request) -> Response:
        with _uploaded(state, slots, request, ServedRecogniser) as (upload, context, reservation, stack):
            parsed = await context.read(form.read(upload, form.transcription, state.loaded))
            results = context.stream(lambda report: _transcribe(state, parsed, reservation, context, report),
                                     parsed.served.batcher.backlog)
            await anext(results)  # the upload is audio; from here on errors are sent as events
            if parsed.stream:
                return Streamed(replies.STREAM, _events(results, request.scope[REQUEST_ID]), stack.pop_all())
            return await anext(results)

    async def outputs(request: Request) -> Response:
        with _uploaded(state, slots, request, ServedGraph) as (upload, context, reservation, _):
            parsed = await context.read(form.read(upload, form.outputs, state.loaded))
            return await anext(context.stream(lambda _: _outputs(state, parsed, reservation, context),
                                              parsed.served.batcher.backlog))

    def corrections() -> Corrections:
        """The folder of corrections; raises ``ApiError`` 404 if this server has none."""
        if state.corrections is None:
            raise ApiError(404, "unknown_url",
                           "this server keeps no corrections; sbkit serve --corrections FOLDER does")
        return state.corrections

    async def add_correction(request: Request) -> Response:
        folder = corrections()
        with _uploaded(state, slots, request, ServedRecogniser) as (upload, context, reservation, _):
            parsed = await context.read(form.read(upload, form.correction, state.loaded))
            return await anext(context.stream(lambda _: _correct(state, folder, parsed, reservation, context),
                                              parsed.served.batcher.backlog))

    async def delete_correction(request: Request) -> Response:
        await asyncio.to_thread(corrections().delete, request.path_params["id"])
        return JSONResponse({"id": request.path_params["id"], "deleted": True})

    async def speech(request: Request) -> Response:
        with contextlib.ExitStack() as stack:
            stack.enter_context(slots.slot(clients.address(request.scope)))
            request = form.limited(request, state.limits, limit_size)
            context = RequestContext(request, slots, state.metrics)
            stack.callback(context.close)
            parsed = await context.read(read_request(request, state.loaded, context.run_in_thread))
            parts = synthesise(context, parsed, state.metrics)
            first = await anext(parts)  # raises here if something is wrong with the request
            body = stream_body(first, parts, parsed.sse, request.scope[REQUEST_ID], state.metrics)
            return Streamed(replies.STREAM if parsed.sse else KINDS[parsed.kind].media_type, body, stack.pop_all())

    async def live(websocket: WebSocket) -> None:
        await state.live_sessions.session(websocket, state.loaded())

    async def unknown_socket(websocket: WebSocket) -> None:
        raise ApiError(404, "unknown_url", f"there is no WebSocket at {websocket.url.path[:80]}; live transcription is "
                       "at /v1/audio/live")

    app = Starlette(routes=[
        Route("/", index), Route("/health", health), Route("/ready", ready), Route("/metrics", prometheus),
        Route("/v1/models", models), Route("/v1/models/{name}", model), Route("/v1/audio/voices", voices),
        Route(_TRANSCRIPTIONS, transcriptions, methods=["POST"]), Route(_CORRECTIONS, add_correction, methods=["POST"]),
        Route(f"{_CORRECTIONS}/{{id}}", delete_correction, methods=["DELETE"]),
        Route("/v1/audio/outputs", outputs, methods=["POST"]), Route("/v1/audio/speech", speech, methods=["POST"]),
        WebSocketRoute("/v1/audio/live", live), WebSocketRoute("/{path:path}", unknown_socket),
    ], lifespan=lifespan, exception_handlers=_error_handlers(state))
    return AccessControl(app, keys, origins, state.metrics, hosts, lambda: state.stopping, lambda: state.draining)


@contextlib.contextmanager
def _uploaded(state: State, slots: RequestSlots, request: Request, kind: type[Served]
              ) -> Iterator[tuple[Request, RequestContext, DiskReservation, contextlib.ExitStack]]:
    """Hold a slot, disk space and a model's time for a request that uploads a recording, until the stack is closed.

    kind : the models that it may be for
    """
    with contextlib.ExitStack() as stack:
        client = clients.address(request.scope)
        stack.enter_context(slots.slot(client))
        reservation = stack.enter_context(contextlib.closing(DiskReservation(state.disk, client)))

        def reserve(size: int) -> None:
            if size > state.limits.upload_bytes + _FORM_BYTES:
                raise too_large(state.limits.upload_bytes)
            reservation.grow(size)

        request = form.limited(request, state.limits, reserve)
        context = RequestContext(request, slots, state.metrics)
        stack.callback(context.close)
        if state.registry is not None:
            context.expect([served.batcher.backlog for served in state.registry.of(kind)],
                           int(request.headers.get("content-length", "0")[:20]))
        yield request, context, reservation, stack


# ---------------------------------------------------------------------- a transcription, a model's tensors


def _outputs(state: State, parsed: OutputsForm, reservation: DiskReservation, context: RequestContext) -> Response:
    """Run a model that outputs tensors in a thread, and make the response."""
    served = parsed.served
    rate = served.config.sample_rate
    with _decoded(state, parsed, reservation, context) as (wave, work):
        if wave.samples > MAX_SECONDS * rate:
            raise invalid("audio_too_long", f"the recording has {wave.samples / rate:.1f} s, and this model takes at "
                          f"most {MAX_SECONDS:g} s: split it", "file")
        signal = np.concatenate(list(wave.blocks()))
        wave.close()  # others may have its room on the disk while this one waits for the model
        future = context.job.watch(served.batcher.submit(signal, context.job.client, work))
        output = served.engine.output(context.job.result(future))
    state.metrics.audio.labels(served.name).inc(len(signal) / rate)
    if parsed.sound:
        with refused_for("response_format", "unsupported_value"):
            return Response(output.wav(rate, len(signal)), media_type="audio/wav")
    if output.size > _MAX_NUMBERS:
        raise invalid("audio_too_long", f"the response would have {output.size:,} numbers, and the limit is "
                      f"{_MAX_NUMBERS:,}: send a shorter recording", "file")
    return JSONResponse({"model": served.name, **output.facts()})


def _correct(state: State, corrections: Corrections, parsed: CorrectionForm, reservation: DiskReservation,
             context: RequestContext) -> Response:
    """Keep a recording and its words, in a thread."""
    rate = parsed.served.config.sample_rate
    with _decoded(state, parsed, reservation, context) as (wave, _):
        if wave.samples > MAX_CORRECTED_SECONDS * rate:
            raise invalid("audio_too_long", f"the recording has {wave.samples / rate:.1f} s, and a correction may have "
                          f"at most {MAX_CORRECTED_SECONDS:g} s: cut it at a pause", "file")
        if wave.warning is not None:  # its words may be those of the whole, as in a corpus
            raise invalid("invalid_audio", f"{wave.warning}: send the whole recording", "file")
        signal = np.concatenate(list(wave.blocks()))
        return JSONResponse(corrections.save(signal, rate, parsed.text, heard=parsed.heard, model=parsed.served.name))


@contextlib.contextmanager
def _decoded(state: State, parsed: Form | OutputsForm | CorrectionForm, reservation: DiskReservation,
             context: RequestContext) -> Iterator[tuple[Wave, Work]]:
    """Decode a request's upload, and release it; hold the samples and their share of the model's work for the block."""
    served = parsed.served
    with contextlib.closing(context.work(served.batcher.backlog)) as work:
        with contextlib.closing(reservation), parsed.upload:
            assert state.decoders is not None, "the models are loaded"
            size = parsed.upload.seek(0, os.SEEK_END)
            wave = state.decoders.decode(parsed.upload, served.config.sample_rate, context.job, work)
        served.batcher.backlog.record_upload(wave.samples / served.config.sample_rate, size)
        with contextlib.closing(wave), served.device_errors():
            yield wave, work


def _transcribe(state: State, parsed: Form, reservation: DiskReservation, context: RequestContext,
                report: Callable[[Any], None]) -> Transcript | Response:
    """Transcribe in a thread and make the response: report first that the upload is audio, then, for a stream, each
    piece of the text. A stream gets the transcript itself."""
    with _decoded(state, parsed, reservation, context) as (wave, work):
        report(_DECODED)
        transcript = recognise(parsed.served, wave.blocks(), context.job, work, report if parsed.stream else None)
        transcript.warning = wave.warning
    state.metrics.audio.labels(parsed.served.name).inc(transcript.duration)
    if parsed.stream:
        return transcript
    worth_correcting = None
    if state.corrections is not None:
        worth_correcting = worth(transcript.words, state.corrections.words)
    return replies.reply(transcript, parsed.response_format, parsed.granularities, worth_correcting)


async def _events(results: AsyncIterator[str | Transcript], request: str) -> AsyncGenerator[bytes, None]:
    """Yield pieces of the text as they are recognised, then the whole text. An error is the last event."""
    try:
        async for result in results:
            yield replies.delta(result) if isinstance(result, str) else replies.done(result)
        yield replies.END_OF_STREAM
    except ClientDisconnected:
        pass
    except ApiError as error:
        yield replies.event(error.body)
    except Exception as error:
        _log.exception("request %s failed", request)
        yield replies.event(failed(request, error).body)


# ---------------------------------------------------------------------- errors and metrics


def _error_handlers(state: State) -> dict[Any, Callable[..., Any]]:  # as Starlette has them
    async def refused(_: Request, error: ApiError) -> Response:
        state.metrics.refused.labels(error.code).inc()
        return error.response

    async def unknown(request: Request, error: HTTPException) -> Response:
        """Answer requests for unknown paths or methods."""
        return await refused(request, ApiError(
            error.status_code, "unknown_url", f"{request.method} {request.url.path[:80]}: {error.detail}",
            headers=dict(error.headers or {})))

    async def disconnected(request: Request, _: Exception) -> Response:
        """Respond to a disconnected client, or to one whose request was cut off because the server stops."""
        if state.stopping:
            return await refused(request, stopping())
        return Response(status_code=_CLIENT_LEFT)

    async def crashed(request: Request, error: Exception) -> Response:
        return await refused(request, failed(request.scope[REQUEST_ID], error))

    return {ApiError: refused, ClientDisconnect: disconnected, ClientDisconnected: disconnected, HTTPException: unknown,
            Exception: crashed}


def _register_gauges(state: State, slots: RequestSlots) -> None:
    def by_model(read: Callable[[Any], float]) -> Callable[[], list[tuple[list[str], float]]]:
        return lambda: [([served.name], read(served)) for served in state.registry or ()]

    def devices() -> list[tuple[tuple[str, ...], float]]:
        return [((served.name, used.file, used.requested, used.device, used.provider), 1.0)
                for served in state.registry or () for used in served.placements]

    gauge = state.metrics.gauge
    gauge("requests_inside", "Requests running or waiting.", (), lambda: [((), slots.active)])
    gauge("live_sessions", "Live sessions.", (), lambda: [((), state.live_sessions.active)])
    gauge("signals_waiting", "Signals waiting for a batch.", ["model"], by_model(lambda served: served.batcher.waiting))
    gauge("model_device", "1, with the requested device and the one that is used.",
          ["model", "file", "asked", "device", "provider"], devices)
    gauge("bundle_refused", "1 if the bundle now in the folder can't be served in place of this one.", ["model"],
          by_model(lambda served: float(served.refused is not None)))
    gauge("device_fault", "1 if the device is broken.", ["model"], by_model(lambda served: float(bool(served.fault))))


_PAGE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def _page() -> tuple[str, str]:
    """Read the page, and make a policy that allows only its inline script and style."""
    page = _PAGE.read_text(encoding="utf-8")
    digests = {kind: base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
               for kind, content in _INLINE.findall(page)}
    policy = (f"default-src 'none'; script-src 'sha256-{digests['script']}' blob:; worker-src blob:; "
              f"style-src 'sha256-{digests['style']}'; connect-src 'self'; img-src data:; media-src blob:; "
              "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return page, policy
