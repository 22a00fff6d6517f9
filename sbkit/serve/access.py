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

from sbkit.serve.errors import ApiError, failed, invalid, stopping

if TYPE_CHECKING:  # of packages that a server alone needs
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sbkit.serve.metrics import Metrics

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Hosts:
    """The allowed values of a request's ``Host`` header.

    A web page elsewhere can reach a server inside a network: it changes the address of its own name to the server's
    (DNS rebinding). So names are restricted unless a key is needed, which such a page doesn't have.

    address : the address that the server listens on; if it is a loopback address, only loopback names are allowed
    allowed : further names; if there are any, only these and the server's own are allowed, on any address
    listened_on : that address as it was typed when the server was started
    keyed : whether requests need a key. Without one and without ``allowed``, a server that doesn't listen on a loopback
        address allows addresses, this machine's names, and names without a dot, which nobody outside of the network can
        define
    """

    def __init__(self, address: str, allowed: Iterable[str] = (), listened_on: str = "", keyed: bool = False):
        allowed_names = list(allowed)
        names = [*_LOOPBACK_NAMES, *allowed_names]
        for listening in (address, listened_on):
            if listening:
                names.append(f"[{listening}]" if ":" in listening else listening)
        restricted = ipaddress.ip_address(address).is_loopback or bool(allowed_names)
        if not restricted:
            names += [socket.gethostname(), f"{socket.gethostname()}.local"]
        self._names = frozenset(map(_without_port, names))
        self._any_name = not restricted and keyed
        self._any_address = not restricted

    def allow(self, host: str | None) -> bool:
        """Whether a host is allowed, at any port; requests without a host don't come from browsers."""
        if self._any_name or host is None:
            return True
        name = _without_port(host)
        if name in self._names:
            return True
        if not self._any_address or not name:
            return False
        return "." not in name.strip("[]") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    """Return a host's name in lower case, without its port and the dot at its end."""
    host = host.strip().lower()
    name, colon, port = host.rpartition(":")
    is_port = bool(colon) and (not port or port.isdecimal())
    inside_ipv6 = name.endswith(":") or (":" in name and not name.endswith("]"))  # of an address without brackets
    if is_port and not inside_ipv6:
        host = name
    return host.rstrip(".")


#: A browser can't set headers of a WebSocket, so it passes the key as a protocol: this prefix and the key in base64url.
KEY_PROTOCOL = "sbkit.key."
#: Where a request's scope has its id.
REQUEST_ID = "sbkit.request_id"
#: Where its scope has whether it may see everything: it has a valid API key, or none is needed.
AUTHORISED = "sbkit.authorised"
#: Paths that need no key: the page, which asks for it, and the health checks, which without a key show only the status.
_WITHOUT_KEY = frozenset({"/", "/health", "/ready"})
#: Paths that are answered even while the server stops.
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
        key_digest = _digest(key)
        allowed = False
        for digest in self._digests:  # all of them, also after a match
            allowed |= hmac.compare_digest(key_digest, digest)
        return allowed


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
        self._app = app
        self._keys = keys
        self._origins = frozenset(origins)
        self._metrics = metrics
        self._hosts = hosts
        self._stopping = stopping
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        started = time.monotonic()
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        shared = {}
        if origin is not None and self._allows_origin(origin):
            shared = {"access-control-allow-origin": origin, "vary": "origin"}
        sender = _ResponseSender(send, shared, self._draining)
        scope[REQUEST_ID] = sender.id
        scope[AUTHORISED] = not self._keys or self._keys.allow(_key(headers))

        try:
            self._check_source(headers)
            self._check_path(scope["path"])
            if scope["type"] == "http" and scope["method"] == "OPTIONS" and origin is not None:
                await _preflight(headers)(scope, receive, sender.send)
            else:
                if scope["path"] not in _WITHOUT_KEY and not scope[AUTHORISED]:
                    raise ApiError(401, "invalid_api_key",
                                   "the API key is missing or wrong; send it as: Authorization: Bearer KEY",
                                   headers={"www-authenticate": "Bearer"})
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
            self._record(scope, sender, time.monotonic() - started)

    def _allows_origin(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins

    def _check_source(self, headers: dict[str, str]) -> None:
        """Raise ``ApiError`` unless a request may come to this host name, from a page of this origin."""
        host = headers.get("host")
        if self._hosts is not None and not self._hosts.allow(host):
            raise ApiError(421, "host_not_allowed", f"this server doesn't answer to the name "
                           f"{headers['host'][:80]!r}; start it with --allow-host NAME")
        origin = headers.get("origin")
        if origin is None or self._allows_origin(origin):
            return
        own_origins = [f"{scheme}://{(host or '').lower()}" for scheme in ("http", "https")]
        if origin.lower() not in own_origins:
            raise ApiError(403, "origin_not_allowed",
                           f"web pages from {origin[:80]} may not use this server; start it with --allow-origin")

    def _check_path(self, path: str) -> None:
        if "\ufffd" in path:  # stands for what is not UTF-8
            raise invalid("not_utf8", "the path is not UTF-8")
        if self._stopping() and path not in PROBES:
            raise stopping()

    def _record(self, scope: Scope, sender: _ResponseSender, seconds: float) -> None:
        """Count and log a request that has ended."""
        path = scope["path"]
        label = _label(path)
        # Without a response, the client left, or a WebSocket was accepted.
        status = sender.status or (499 if scope["type"] == "http" else 101)
        if scope["type"] == "http":
            self._metrics.requests.labels(label, status).inc()
            if scope["method"] == "POST":
                self._metrics.seconds.labels(label).observe(seconds)
        if path not in PROBES:
            client = ascii((scope.get("client") or "?")[0])[1:-1][:45]
            method = scope.get("method", "WebSocket")[:10]
            _log.info("%s %s %s: %d after %.2f s (%s)", client, method, label, status, seconds, sender.id)

    async def _send_error(self, scope: Scope, receive: Receive, sender: _ResponseSender, error: ApiError) -> None:
        self._metrics.refused.labels(error.code).inc()
        await error.response(scope, receive, sender.send)


def _preflight(headers: dict[str, str]) -> Response:
    """Answer a browser that asks, before a request of a page elsewhere, whether it may send it."""
    from starlette.responses import Response

    requested = headers.get("access-control-request-headers", "authorization")
    return Response(None, 204, {"access-control-allow-methods": "GET, POST, DELETE",
                                "access-control-allow-headers": requested})


def _label(path: str) -> str:
    """Return a path as metrics and logs name it: without a model's or a correction's name, which clients choose."""
    if path in _COUNTED_PATHS:
        return path
    for prefix in _WITH_NAMES:
        if path.startswith(f"{prefix}/"):
            return prefix
    return "other"


def _key(headers: dict[str, str]) -> str:
    """Return the API key that a request has; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith(KEY_PROTOCOL):
            encoded = protocol.strip()[len(KEY_PROTOCOL) :]
            padding = "=" * (-len(encoded) % 4)
            try:
                return base64.urlsafe_b64decode(encoded + padding).decode()
            except ValueError:
                return ""
    return ""


class _ResponseSender:
    """Sends a response and records its status; adds the request's id and forbids content sniffing."""

    def __init__(self, send: Send, headers: dict[str, str], draining: Callable[[], bool]):
        self.id = f"req_{uuid.uuid4().hex}"
        self.status = 0
        """Status of the response; 0 before it starts."""
        self.started = self.complete = False
        self._send = send
        self._draining = draining
        self._headers = {"x-request-id": self.id, "x-content-type-options": "nosniff", **headers}

    async def send(self, message: Message) -> None:
        if message["type"].endswith("response.start"):
            self.started = True
            self.status = message["status"]
            added = [(name.encode(), value.encode("latin-1")) for name, value in self._headers.items()]
            headers = message.get("headers", [])
            if message["type"] == "http.response.start" and self._draining():
                headers = [(name, value) for name, value in headers if name.lower() != b"connection"]
                added.append((b"connection", b"close"))
            message = {**message, "headers": [*headers, *added]}
        elif message["type"] == "websocket.accept":
            self.started = True
        await self._send(message)
        if message["type"].endswith("response.body") and not message.get("more_body"):
            self.complete = True
