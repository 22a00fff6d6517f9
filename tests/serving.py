"""A server on a free port of this machine, in a thread of the test's process, around bundles that spell."""

from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import bundles
import httpx
import numpy as np
import openai
import pytest
import soundfile
import uvicorn
import websockets
from websockets.sync.client import connect

from sbkit.serve import registry
from sbkit.serve.access import ApiKeys
from sbkit.serve.app import State, make_app
from sbkit.serve.connection_limit import ConnectionLimit
from sbkit.serve.corrections import Corrections
from sbkit.serve.decoders import Decoders
from sbkit.serve.limits import MEGABYTE, Limits
from sbkit.serve.protocols import protocol_options
from sbkit.serve.served import BundleOptions
from sbkit.serve.server import bind


class Serving:
    """What tests ask; ``engine`` is the model's, to be slowed down or broken."""

    def __init__(self, state, port):
        self.state, self.port = state, port
        self.url = f"http://127.0.0.1:{port}"
        self.base = f"{self.url}/v1"
        self.live = f"ws://127.0.0.1:{port}/v1/audio/live"

    @property
    def engine(self):
        return next(iter(self.state.registry)).engine

    def counted(self, name):
        """The sum over all labels of a metric."""
        lines = self.state.metrics.text().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def post(self, data, name="a.wav", headers=None, **fields):
        """The answer to a recording, or to text that is spelled in one."""
        file = wav(data) if isinstance(data, str) else data
        return httpx.post(f"{self.base}/audio/transcriptions", data={"model": "level"} | fields, headers=headers,
                          files={"file": (name, file)}, timeout=60)

    def openai(self, api_key="none", max_retries=0):
        """OpenAI's own client of this server."""
        return openai.OpenAI(base_url=self.base, api_key=api_key, max_retries=max_retries)

    def speech(self, **fields):
        """The answer to a text for the voice ``tts``."""
        return httpx.post(f"{self.base}/audio/speech", json={"model": "tts"} | fields, timeout=60)

    @contextlib.contextmanager
    def busy(self, *texts, **how):
        """Requests that wait for the model during this block, which gets the event that lets it go on; each is then
        answered with its text."""
        with ThreadPoolExecutor(len(texts)) as pool, self.held() as go:
            inside = [pool.submit(self.post, text, **how) for text in texts]
            until(lambda: self.counted("sbkit_requests_inside") >= len(texts))
            yield go
            go.set()
            assert [each.result().json()["text"] for each in inside] == [*texts]

    @contextlib.contextmanager
    def acting(self, act):
        """The model's graph is ``act`` in this block, which gets the real one and a batch."""
        real = self.engine.backend

        def backend(*batch):
            return act(real, *batch)

        backend.running, backend.free = real.running, lambda: None
        self.engine.backend = backend
        try:
            yield
        finally:
            self.engine.backend = real

    @contextlib.contextmanager
    def held(self, after=0):
        """The model answers nobody, after so many batches, until the block ends, or the event that it gives is set."""
        go, runs = threading.Event(), itertools.count()

        def act(real, *batch):
            if next(runs) >= after:
                go.wait(30)
            return real(*batch)

        with self.acting(act):
            try:
                yield go
            finally:
                go.set()


@contextlib.contextmanager
def serving(folder, names=("level",), limits=None, keys=(), origins=(), loaded=True, hosts=None, proxies=(),
            device="cpu", corrections=None, **options):
    """A server around the bundle that lies in ``folder``, or around those of a dictionary by name."""
    limits = limits or Limits(decoders=1)
    state = State(limits, corrections and Corrections(corrections, int(limits.max_corrections_mb * MEGABYTE)))
    state.connection_limit = ConnectionLimit(state.limits.max_connections, state.limits.client_share,
                                             state.metrics)
    if loaded:
        state.decoders = Decoders(state.limits, restarted=state.metrics.decoders.inc, disk=state.disk)
        state.decoders.check()
        folders = folder if isinstance(folder, dict) else dict.fromkeys(names, folder)
        state.registry = registry.load(folders, BundleOptions(device=device, threads=1, **options), state.metrics)
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(
        make_app(state, ApiKeys(keys), origins, hosts), log_level="error", lifespan="on",
        **protocol_options(state.connection_limit), timeout_graceful_shutdown=5, proxy_headers=bool(proxies),
        forwarded_allow_ips=",".join(proxies)))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        until(lambda: server.started)
        yield Serving(state, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        if loaded:
            state.decoders.close()
            state.registry.close()
        if corrections:
            state.corrections.close()


def started(*command, env=None):
    """The process of a server, where it listens, and the lines that it wrote so far; its output goes on."""
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, **(env or {})})
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("ready on "):
            return process, line.split()[-1], lines
    raise AssertionError(f"it ended with {process.wait()}: {lines}")


@contextlib.contextmanager
def uploading(server, length, path="/v1/audio/transcriptions"):
    """A connection that has sent the headers of an upload of so many bytes."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    client.putrequest("POST", path)
    client.putheader("content-type", "multipart/form-data; boundary=x")
    client.putheader("content-length", str(length))
    client.endheaders()
    with contextlib.closing(client):
        yield client


def refused_socket(url, **options):
    """The response to a request for a WebSocket that is refused."""
    with pytest.raises(websockets.InvalidStatus) as refused:
        connect(url, **options)
    return refused.value.response


def exchange(port, data, source="127.0.0.1"):
    """Send bytes from an address; all that comes until the server closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 60, (source, 0)) as asking:
        with contextlib.suppress(ConnectionError):  # it may answer before all of it was sent
            asking.sendall(data)
            while more := asking.recv(1 << 16):
                answer += more
    return answer


def until(true, seconds=20):
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def wav(text, rate=bundles.RATE, **options):
    """A recording that spells a text."""
    file = io.BytesIO()
    soundfile.write(file, bundles.say(text), rate, format=options.pop("format", "WAV"),
                    subtype=options.pop("subtype", "PCM_16"))
    return file.getvalue()


def silence(seconds, rate=8000, format="FLAC"):
    """A recording of nothing, which packs well."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, 1, format=format) as sound:
        for _ in range(int(seconds)):  # not at once: libsndfile's Vorbis crashes on that
            sound.write(np.zeros(rate, dtype=np.int16))
    return file.getvalue()
