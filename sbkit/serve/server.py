"""The server: loads bundles or refuses to start, runs until it is stopped, then finishes requests in flight."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from types import FrameType
from typing import Any

from sbkit.decode.file_errors import unreadable
from sbkit.errors import SbkitError
from sbkit.serve import access
from sbkit.serve.access import ApiKeys, Hosts
from sbkit.serve.limits import DRAIN_SECONDS, GRACE_SECONDS, MEGABYTE, Limits
from sbkit.serve.served import BundleOptions

KEY_VARIABLE = "SBKIT_API_KEY"
_REQUIRED = ("starlette", "uvicorn", "prometheus_client", "python_multipart", "websockets")
_POLL_SECONDS = 0.2
_WATCH_SECONDS = 1.0  # between checks whether bundles were replaced
#: What uvicorn logs, some with a traceback, for bad requests of clients.
_CLIENT_ERRORS = ("without completing handshake", "Invalid HTTP request", "Invalid UTF-8", "Unsupported upgrade",
                   "No supported WebSocket library")
_CLEANUP_SECONDS = 3.0  # to clean up requests that were cut off


@dataclass(frozen=True)
class ServeRequest(BundleOptions):
    """What to serve, and how.

    bundles : ``BUNDLE`` or ``NAME=BUNDLE``
    corrections : folder in which to keep recordings whose words people correct; None: keep none
    api_key_file : file of keys, one per line; SBKIT_API_KEY in the environment adds one
    allow_origins : origins of web pages elsewhere that may use this server
    allow_hosts : further host names of the server
    trust_proxies : addresses of proxies whose X-Forwarded-For is believed
    drain_seconds : time after SIGTERM in which requests are still accepted, while ``/ready`` answers 503
    grace_seconds : time after that to finish requests in flight
    """

    bundles: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    corrections: Path | None = None
    api_key_file: Path | None = None
    allow_origins: Sequence[str] = ()
    allow_hosts: Sequence[str] = ()
    trust_proxies: Sequence[str] = ()
    drain_seconds: float = DRAIN_SECONDS
    grace_seconds: float = GRACE_SECONDS
    limits: Limits = field(default_factory=Limits)


def serve(request: ServeRequest) -> int:
    """Run until SIGTERM or Ctrl-C and return the exit code."""
    missing = [name for name in _REQUIRED if util.find_spec(name) is None]
    if missing:
        raise SbkitError("missing-package", f"serving needs {', '.join(missing)}", hint="pip install 'sbkit[serve]'")
    from sbkit.serve.registry import parse_bundles

    bundles = parse_bundles(request.bundles)
    if request.corrections is not None:
        check_corrections_folder(request.corrections, bundles.values())
    keys = read_keys(request.api_key_file)
    with bind(request.host, request.port) as listening:
        if not keys and not ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
            print(f"anyone who can reach {request.host} can use this server, by its address or name (by other names "
                  f"with --allow-host); to require a key, set {KEY_VARIABLE} or --api-key-file", file=sys.stderr)
        return _Server(request, bundles, keys, listening).run()


def check_corrections_folder(folder: Path, bundles: Iterable[Path]) -> None:
    """Refuse to keep corrections in a bundle, where the next export or ``improve`` would replace them."""
    where = folder.resolve()
    for bundle in bundles:
        if bundle.resolve() in (where, *where.parents):
            raise SbkitError("bad-option", f"--corrections {folder} is inside the bundle {bundle}, which an export "
                             "replaces", hint="name a folder beside it", file=folder, key="--corrections")


def read_keys(path: Path | None) -> list[str]:
    """The keys of the environment and of a file with one per line; none: everybody is served."""
    keys = [os.environ[KEY_VARIABLE].strip()] if KEY_VARIABLE in os.environ else []
    if "" in keys:
        raise SbkitError("bad-api-key", f"{KEY_VARIABLE} is set but blank, which would let anyone use this server",
                         hint="set it to the key, or unset it to serve without one")
    sources = dict.fromkeys(keys, KEY_VARIABLE)
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(path, error) from error
        if not any(lines):
            raise SbkitError("bad-api-key", f"{path} contains no key", hint="write one per line", file=path)
        sources |= {line: f"{path}, line {number}" for number, line in enumerate(lines, 1) if line}
    for key, where in sources.items():
        if not (key.isascii() and key.isprintable()):  # the key itself isn't shown
            raise SbkitError("bad-api-key", f"{where}: the API key has characters other than printable ASCII, which "
                             "clients send in different ways",
                             hint="make it of ASCII letters, digits and punctuation, such as `openssl rand -hex 32`")
    return list(sources)


def bind(host: str, port: int) -> socket.socket:
    """Bind the address before the slow loading, to fail early if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol, or asyncio leaves Nagle's algorithm on: 40 ms for every answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        hint = "choose another port with --port"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            hint = "another server may run there; choose another port with --port"
        elif isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            hint = "use an address of this machine with --host"
        raise SbkitError("cannot-listen", f"can't listen on {host}:{port}: {reason}", hint=hint, value=port) from None
    return listening


class _Server:
    """Runs the server in one thread, loads models in another, and waits for signals in this one."""

    def __init__(self, request: ServeRequest, bundles: dict[str, Path], keys: list[str], listening: socket.socket):
        import uvicorn

        from sbkit.serve.app import State, make_app
        from sbkit.serve.connection_limit import ConnectionLimit, connection_budget
        from sbkit.serve.corrections import Corrections
        from sbkit.serve.protocols import protocol_options

        self._request = request
        self._bundles = bundles
        self._listening = listening
        corrections = None
        if request.corrections is not None:
            corrections = Corrections(request.corrections, int(request.limits.max_corrections_mb * MEGABYTE))
        self.state = State(request.limits, corrections)
        maximum, backlog = connection_budget(request.limits)
        if maximum < request.limits.max_connections:
            print(f"at most {maximum} connections can be open, because of the limit of open files (ulimit -n)",
                  file=sys.stderr)
        self.state.connection_limit = ConnectionLimit(maximum, request.limits.client_share, self.state.metrics)
        hosts = Hosts(listening.getsockname()[0], request.allow_hosts, request.host, bool(keys))
        app = make_app(self.state, ApiKeys(keys), request.allow_origins, hosts)
        grace: Any = request.grace_seconds  # typed as int, but fractions work
        self._server = uvicorn.Server(uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="on",
            **protocol_options(self.state.connection_limit), backlog=backlog,
            proxy_headers=bool(request.trust_proxies),
            forwarded_allow_ips=",".join(request.trust_proxies), timeout_graceful_shutdown=grace))
        self._error: BaseException | None = None
        self._ending = threading.Event()
        self._drain_until = 0.0
        self._watchdog: threading.Timer | None = None

    def run(self) -> int:
        from sbkit.serve import registry

        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s",
                            force=True)
        for module in (access, registry):  # a line for each request, and for each replaced model
            logging.getLogger(module.__name__).setLevel(logging.INFO)
        logging.getLogger("uvicorn.error").addFilter(self._is_worth_logging)
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns about each malformed form
        serving = threading.Thread(target=self._server.run, args=([self._listening],), name="sbkit-http")
        loading = threading.Thread(target=self._load, name="sbkit-load", daemon=True)
        previous_handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            serving.start()
            loading.start()
            while serving.is_alive():
                serving.join(_POLL_SECONDS)
                if self.state.draining and not self.state.stopping:
                    self._drain()
                if self.state.stopping and not self._server.should_exit:
                    self._finish()
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            self._ending.set()
            if self.state.stopping and self._watchdog is None:  # a second signal came first: nothing is waited for
                self._start_watchdog(0.0)
            # Python aborts a process that ends while a thread loads a model. The watchdog limits this wait.
            loading.join()
            for resource in (self.state.decoders, self.state.registry, self.state.corrections):
                if resource is not None:
                    resource.close()
            blocking = [thread for thread in threading.enumerate() if thread.is_alive() and not thread.daemon
                        and thread is not threading.current_thread()]
            if self._watchdog is not None and not blocking:
                self._watchdog.cancel()
        if self._error is not None:
            raise self._error
        return 0 if self.state.stopping else 1

    def _is_worth_logging(self, record: logging.LogRecord) -> bool:
        """Whether a message of uvicorn is about this server, and not about clients, or requests that it cut off."""
        if self._server.force_exit:  # after a second signal
            return False
        message = record.getMessage()
        return not any(error in message for error in _CLIENT_ERRORS)

    def _drain(self) -> None:
        """Wait for the time in which requests are still accepted, then stop; a second signal ends it."""
        print(f"stopping in {self._request.drain_seconds:g} s: until then requests are accepted, /ready answers 503",
              file=sys.stderr, flush=True)
        while not self.state.stopping and time.monotonic() < self._drain_until:
            time.sleep(_POLL_SECONDS / 4)
        if not self.state.stopping:
            self.state.stop()

    def _finish(self) -> None:
        """Let live sessions and requests in flight finish, and end the server then."""
        self._ending.set()
        deadline = time.monotonic() + self._request.grace_seconds
        self._start_watchdog(self._request.grace_seconds)
        # uvicorn waits for requests when it ends, but cuts off WebSockets: live sessions get their time here.
        while self.state.live_sessions.active and time.monotonic() < deadline and not self._server.should_exit:
            time.sleep(_POLL_SECONDS / 4)
        seconds_left: Any = max(deadline - time.monotonic(), _POLL_SECONDS)  # typed as int, but fractions work
        self._server.config.timeout_graceful_shutdown = seconds_left
        self._server.should_exit = True

    def _start_watchdog(self, seconds: float) -> None:
        self._watchdog = threading.Timer(seconds + _CLEANUP_SECONDS, self._give_up, (seconds,))
        self._watchdog.daemon = True
        self._watchdog.start()

    def _load(self) -> None:
        try:
            self.load_models()
        except BaseException as error:
            if not self.state.stopping:  # a stop closes the socket and the decoders during loading
                self._error = error
            self._server.should_exit = True
            return
        while not self._ending.wait(_WATCH_SECONDS) and self.state.registry is not None:
            self.state.registry.refresh()

    def load_models(self) -> None:
        from sbkit.serve import registry
        from sbkit.serve.decoders import Decoders

        state = self.state
        state.decoders = Decoders(self._request.limits, restarted=state.metrics.decoders.inc, disk=state.disk)
        models = registry.load(self._bundles, self._request, state.metrics)
        state.decoders.check()
        state.registry = models
        for served in models:
            for placement in served.placements:
                print(f"{served.name}: {placement}", file=sys.stderr)
        host, port = self._listening.getsockname()[:2]
        print(f"ready on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Handle a signal: the first lets requests in flight finish, the second doesn't.

        SIGTERM is sent when another server replaces this one, and clients need some seconds to go there. After Ctrl-C
        somebody waits for the end.
        """
        if self.state.draining:
            self._server.force_exit = self._server.should_exit = True
        elif number == signal.SIGTERM and self._request.drain_seconds > 0 and self.state.registry is not None:
            self._drain_until = time.monotonic() + self._request.drain_seconds
            self.state.drain()
            return
        self.state.stop()

    def _give_up(self, seconds: float) -> None:
        print(f"some requests were not finished within {seconds:g} s and are dropped", file=sys.stderr, flush=True)
        if self.state.decoders is not None:
            self.state.decoders.close()
        os._exit(1)
