"""Middleware before every route: host names, keys, origins, request ids and counters."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sbkit.serve.errors import ApiError, failed, stopping

if TYPE_CHECKING:  # of packages that a server alone needs
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sbkit.serve.metrics import Metrics

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Hosts:
    """The allowed values of a request's ``Host`` header.

    A web page elsewhere reaches a server inside a network by a name of its own whose address it changes (DNS
    rebinding). So names are restricted unless a key is needed, which such a page doesn't have.

    address : the address listened on; on a loopback address only loopback names are allowed
    allowed : further names; if given, on any other address too only these and its own are allowed
    listened_on : the address as given when the server was started
    keyed : whether requests need a key; without one, on any other address only addresses, this machine's names and
        names without a dot are allowed, which nobody outside of the network can define
    """

    def __init__(self, address: str, allowed: Iterable[str] = (), listened_on: str = "", keyed: bool = False):
        own = [*_LOOPBACK_NAMES, *(f"[{each}]" if ":" in each else each for each in (address, listened_on) if each)]
        open_ = not (ipaddress.ip_address(address).is_loopback or list(allowed))
        if open_:
            own += [socket.gethostname(), f"{socket.gethostname()}.local"]
        self._names = frozenset(map(_name, [*own, *allowed]))
        self._all, self._addresses = open_ and keyed, open_

    def allow(self, host: str | None) -> bool:
        """Whether a host is allowed, at any port; requests without a host don't come from browsers."""
        if self._all or host is None or (name := _name(host)) in self._names:
            return True
        try:
            return self._addresses and bool(name) and ("." not in name.strip("[]") or bool(ipaddress.ip_address(name)))
        except ValueError:
            return False


def _name(host: str) -> str:
    host = host.strip().lower()
    name, colon, port = host.rpartition(":")
    if colon and (not port or port.isdecimal()) and not name.endswith(":") and (":" not in name or name[-1:] == "]"):
        host = name
    return host.rstrip(".")


#: A browser can't set headers of a WebSocket, so it passes the key as a protocol: this prefix and the key in base64url.
KEY_PROTOCOL = "sbkit.key."
#: The key of a request's id in its scope.
REQUEST_ID = "sbkit.request_id"
#: The key, in its scope, of whether a request may see everything: it has a valid API key, or none is needed.
AUTHORISED = "sbkit.authorised"
#: Paths that need no key: the page, which asks for it, and the health checks, which then tell only the status.
_WITHOUT_KEY = frozenset({"/", "/health", "/ready"})
#: Paths that monitoring may always ask for.
PROBES = frozenset({"/health", "/ready", "/metrics"})
_WITH_NAMES = ("/v1/models", "/v1/audio/corrections")  # counted without the name that follows
_COUNTED_PATHS = _WITHOUT_KEY | {"/metrics", *_WITH_NAMES, "/v1/audio/transcriptions", "/v1/audio/live",
                                 "/v1/audio/outputs", "/v1/audio/speech", "/v1/audio/voices"}
_log = logging.getLogger(__name__)


class ApiKeys:
    """The API keys, stored only as digests. A key is compared with all of them, in constant time."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, key: str) -> bool:
        given, found = _digest(key), False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class AccessControl:
    """Wraps the application with all checks.

    keys : the valid keys; without any, no key is needed
    origins : origins of other servers' pages that may use this one, such as ``https://example.org``; ``*`` for all
    hosts : host names that the server answers to; None for all
    stopping : whether new requests are refused
    draining : whether connections are closed after their response, so that clients turn to another server
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, origins: Iterable[str], metrics: Metrics, hosts: Hosts | None,
                 stopping: Callable[[], bool], draining: Callable[[], bool]):
        self._app, self._keys, self._origins = app, keys, frozenset(origins)
        self._metrics, self._hosts, self._stopping, self._draining = metrics, hosts, stopping, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import Response

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        began, path = time.monotonic(), scope["path"]
        origin = headers.get("origin")
        allowed = origin is not None and (origin in self._origins or "*" in self._origins)
        sender = _ResponseSender(send, {"access-control-allow-origin": origin, "vary": "origin"}
                                 if origin is not None and allowed else {}, self._draining)
        scope[REQUEST_ID] = sender.id
        scope[AUTHORISED] = not self._keys or self._keys.allow(_key(headers))
        try:
            if self._hosts is not None and not self._hosts.allow(headers.get("host")):
                raise ApiError(421, f"this server doesn't answer to the name {headers['host'][:80]!r}; start it with "
                               "--allow-host NAME", code="host_not_allowed")
            if origin is not None and not allowed and origin.lower() not in [
                    f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")]:
                raise ApiError(403, f"web pages from {origin[:80]} may not use this server; start it with "
                               "--allow-origin", code="origin_not_allowed")
            if "\ufffd" in path:  # stands for what is not UTF-8
                raise ApiError(400, "the path is not UTF-8")
            if self._stopping() and path not in PROBES:
                raise stopping()
            if scope["type"] == "http" and scope["method"] == "OPTIONS" and origin is not None:
                requested = headers.get("access-control-request-headers", "authorization")
                await Response(None, 204, {"access-control-allow-methods": "GET, POST, DELETE",
                                           "access-control-allow-headers": requested})(scope, receive, sender.send)
                return
            if path not in _WITHOUT_KEY and not scope[AUTHORISED]:
                raise ApiError(401, "the API key is missing or wrong; send it as: Authorization: Bearer KEY",
                               code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            await self._app(scope, receive, sender.send)
        except ApiError as error:
            await self._send_error(scope, receive, sender, error)
        except Exception as error:
            _log.exception("request %s failed", sender.id)
            if sender.complete:
                return
            if sender.started:
                raise
            await self._send_error(scope, receive, sender, failed(sender.id, error))
        finally:
            label = path if path in _COUNTED_PATHS else next(
                (each for each in _WITH_NAMES if path.startswith(f"{each}/")), "other")
            seconds, status = time.monotonic() - began, sender.status or (499 if scope["type"] == "http" else 101)
            if scope["type"] == "http":
                self._metrics.requests.labels(label, status).inc()
                if scope["method"] == "POST":
                    self._metrics.seconds.labels(label).observe(seconds)
            if path not in PROBES:
                _log.info("%s %s %s: %d after %.2f s (%s)", ascii((scope.get("client") or "?")[0])[1:-1][:45],
                          scope.get("method", "WebSocket")[:10], label, status, seconds, sender.id)

    async def _send_error(self, scope: Scope, receive: Receive, sender: _ResponseSender, error: ApiError) -> None:
        self._metrics.refused.labels(error.code or error.status).inc()
        await error.response(scope, receive, sender.send)


def _key(headers: dict[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith(KEY_PROTOCOL):
            coded = protocol.strip()[len(KEY_PROTOCOL) :]
            try:
                return base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode()
            except ValueError:
                return ""
    return ""


class _ResponseSender:
    """Sends a response and records its status; adds the request's id and forbids content sniffing."""

    def __init__(self, send: Send, extra: dict[str, str], draining: Callable[[], bool]):
        self._send, self.id, self.status, self._draining = send, f"req_{uuid.uuid4().hex}", 0, draining
        self.started = self.complete = False
        self._headers = {"x-request-id": self.id, "x-content-type-options": "nosniff", **extra}

    async def send(self, message: Message) -> None:
        if message["type"].endswith("response.start"):
            self.started, self.status = True, message["status"]
            more = [(name.encode(), value.encode("latin-1")) for name, value in self._headers.items()]
            headers = message.get("headers", [])
            if message["type"] == "http.response.start" and self._draining():
                headers = [each for each in headers if each[0].lower() != b"connection"]
                more.append((b"connection", b"close"))
            message = {**message, "headers": [*headers, *more]}
        elif message["type"] == "websocket.accept":
            self.started = True
        await self._send(message)
        if message["type"].endswith("response.body") and not message.get("more_body"):
            self.complete = True
