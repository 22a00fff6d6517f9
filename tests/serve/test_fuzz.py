"""Damaged audio and hostile requests: each gets a 4xx with a reason, the server lives, the next good one is right."""

import contextlib
import json
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import bundles
import httpx
import pytest
import serving
import tried
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from sbkit.serve.access import Hosts
from sbkit.serve.limits import Limits

GOOD = "good people"
FORMATS = (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III"), ("OGG", "VORBIS"), ("OGG", "OPUS"),
           ("AIFF", "PCM_16"), ("WAV", "FLOAT"), ("W64", "PCM_24"), ("AU", "ULAW"), ("CAF", "ALAC_16"))


@pytest.fixture(scope="module")
def samples():
    return [serving.wav(GOOD, format=format, subtype=subtype, rate=16_000) for format, subtype in FORMATS]


def damaged(rng, samples):
    """One of many ways to ruin a recording."""
    data = bytearray(rng.choice(samples))
    kind = rng.randrange(7)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(rng.randint(1, 40)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:  # in the header, where sizes, rates and channels are
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(min(64, len(data)))] = rng.choice((0, 1, 127, 128, 255))
    elif kind == 3:
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.randint(1, 2000))
    elif kind == 4:
        other = rng.choice(samples)
        data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]
    elif kind == 5:
        data = bytearray(rng.randbytes(rng.randint(0, 3000)))
    else:
        at = rng.randrange(max(1, len(data) - 8))
        data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7))
    return bytes(data)


WORDS = ("", "json", "../../etc/passwd", "\0", "level", "ÿ" * 300, "1e999", "-1", "true", "[]", "{}", "%s%n",
         "a" * 5000, "word", "verbose_json", "nan", "\r\nx: y", "fr", "\U0001f600")
FIELDS = ("model", "language", "prompt", "response_format", "temperature", "stream", "timestamp_granularities[]",
          "file", "chunking_strategy", "include[]", "x")
FORM = (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nlevel\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n')


HOSTS = ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "[::2]:80", "127.0.0.1:80:80", "0.0.0.0")


def hostile(rng, samples):
    """A request that no client of ours would send; its audio may be fine."""
    body = strange_form(rng, samples)
    if rng.random() < 0.2:  # a page elsewhere whose name points here, or who says that somebody else asks
        body.setdefault("headers", {}).update(rng.choice(
            ({"host": rng.choice(HOSTS)}, {"origin": "http://evil.example"}, {"x-forwarded-for": "203.0.113.1"})))
    return body


def strange_form(rng, samples):
    kind = rng.randrange(4)
    if kind == 0:  # fields of all sorts
        data = {rng.choice(FIELDS): rng.choice(WORDS) for _ in range(rng.randint(0, 5))}
        name = rng.choice(("file", "file", "model", "x"))
        files = {name: (rng.choice(WORDS).replace("\0", "0"), rng.choice(samples))}
        return {"data": {"model": "level"} | data, "files": files}
    headers = {"content-type": rng.choice((
        "multipart/form-data; boundary=b", "multipart/form-data", "multipart/form-data; boundary=" + "b" * 500,
        "multipart/form-data; boundary=b; charset=utf-99", "application/json", "multipart/form-data; boundary=\"", ""))}
    body = bytearray(FORM + rng.choice(samples) + b"\r\n--b--\r\n")
    if kind == 1:
        for _ in range(rng.randint(1, 10)):
            body[rng.randrange(160)] = rng.randrange(256)
    elif kind == 2:
        del body[rng.randrange(len(body)) :]
    else:
        body[30:30] = rng.choice((b"\r\n" * 500, b"a: b\r\n" * 200, rng.randbytes(500), b'; name="file"' * 100))
    return {"content": bytes(body), "headers": headers}


POST = (b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n")
CHUNKS = (b"zz\r\n", b"ffffffffff\r\n", b"-1\r\n", b"5\r\nab")


def rude(rng, port, samples, silent):
    """What no HTTP client would send, or not all of it: it gets an answer that refuses it, or none."""
    body = FORM + rng.choice(samples)
    length = b"content-length: %d\r\n\r\n"
    words = rng.choice((
        POST + length % (2 * len(body)) + body,  # cut off
        POST + length % (1 << 40), POST + length % -1, POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\na",
        POST + b"transfer-encoding: chunked\r\n\r\n" + rng.choice(CHUNKS),
        POST[: rng.randrange(1, len(POST))], POST + b"x: " + b"y" * 100_000, b"\0" * 100,
        rng.randbytes(200) + b"\r\n\r\n",
        b"GET /v1/audio/live HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        POST + b"expect: 100-continue\r\n" + length % 10,
    ))
    silent.append(socket.create_connection(("127.0.0.1", port), timeout=30))  # which asks for nothing, ever
    if len(silent) > 100:
        silent.pop(0).close()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as asking:
        said = b""
        with contextlib.suppress(OSError):  # it may be closed already
            asking.sendall(words)
            asking.shutdown(socket.SHUT_WR)
            while data := asking.recv(1 << 16):
                said += data
    said = said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").removeprefix(b"HTTP/1.1 100 \r\n\r\n")
    assert not said or re.match(rb"HTTP/1.1 (4\d\d|503) ", said), (words[:200], said[:200])
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("inputs", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_whatever_comes_is_refused_with_a_reason_and_the_next_good_request_is_right(bundle, samples, inputs):
    """What is damaged may be audio still; it goes on until so many were refused."""
    limits = Limits(max_upload_mb=1, max_audio_seconds=120, decoders=2, decode_seconds=5, request_seconds=60,
                    max_connections=24, max_disk_mb=12, upload_grace_seconds=5)
    with contextlib.ExitStack() as all_:
        server = all_.enter_context(serving.serving(bundle, limits=limits, hosts=Hosts("127.0.0.1")))
        client = all_.enter_context(httpx.Client(timeout=60))
        url, silent = f"{server.base}/audio/transcriptions", []
        all_.callback(lambda: [each.close() for each in silent])

        def ask(**body):
            try:
                return client.post(url, **body)
            except httpx.TransportError:  # a connection that it kept for later had to give way
                return client.post(url, **body)

        def send(number):
            rng = random.Random(number)
            if number % 5 == 1:
                return rude(rng, server.port, samples, silent)
            if number % 5:
                body = {"data": {"model": "level"}, "files": {"file": ("a.wav", damaged(rng, samples))}}
            else:
                body = hostile(rng, samples)
            answer = ask(**body)
            if answer.status_code == 200:
                return False
            said = answer.json()["error"]
            if answer.status_code == 503:
                assert said["code"] in ("no_room", "too_many_connections") and answer.headers["retry-after"]
                return True
            assert 400 <= answer.status_code < 500, (number, answer.status_code, said)
            assert said["message"] and said["type"] == "invalid_request_error" and "Traceback" not in said["message"]
            return True

        refused = sent = 0
        with ThreadPoolExecutor(4) as pool:
            while refused < inputs:
                refused += sum(pool.map(send, range(sent, sent + 100)))
                sent += 100
                good = ask(data={"model": "level"}, files={"file": ("a.wav", samples[0])})
                assert good.json()["text"] == GOOD
        assert sent < 3 * inputs
        assert client.get(f"{server.url}/health").json()["status"] == "ok"
        serving.until(lambda: server.counted("sbkit_requests_inside") == 0)
        assert server.state.disk.reserved == 0
        tried.record("damaged recordings and hostile requests that a server refuses", inputs, long=2000)
        print(f"{refused} of {sent} refused, {server.counted('sbkit_decoder_restarts_total'):.0f} decoders replaced")


def strange(rng, start):
    """A message that no client of ours would send."""
    form = {"type": rng.choice(WORDS), "model": rng.choice(WORDS),
            "sample_rate": rng.choice((0, -1, 1e9, "x", None, [], 8000))}
    return rng.choice((rng.randbytes(rng.randint(0, 3000)), rng.choice(WORDS), start, '{"type": "stop"}',
                       json.dumps(form), bytes(rng.randrange(400_000))))


def received(socket):
    """All that comes until the end."""
    messages = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            messages.append(json.loads(socket.recv(20)))
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("sessions", [12, pytest.param(150, marks=pytest.mark.long)])
def test_whatever_comes_through_a_socket_ends_it_with_a_reason_and_the_next_session_is_right(bundle, sessions):
    rng = random.Random(7)
    start = json.dumps({"type": "start", "model": "level", "sample_rate": bundles.RATE})
    with serving.serving(bundle, limits=Limits(decoders=1, idle_seconds=2)) as server:
        told = 0
        for _ in range(sessions):
            with connect(server.live) as socket:
                if rng.random() < 0.7:
                    socket.send(start)
                with contextlib.suppress(ConnectionClosed):
                    for _ in range(rng.randint(1, 4)):
                        socket.send(strange(rng, start))
                    socket.send('{"type": "stop"}')
                    socket.send("over")
                messages = received(socket)
            if messages:  # who goes on sending to a closed socket may lose what was said last
                told += 1
                assert messages[-1]["type"] in ("ready", "partial", "final", "error", "done"), messages
                assert messages[-1].get("error", {"type": "invalid_request_error"})["type"] == "invalid_request_error"
        assert told > sessions / 2
        tried.record("live sessions that break the protocol", sessions, long=150)
        serving.until(lambda: server.counted("sbkit_live_sessions") == 0)
        with connect(server.live) as socket:
            socket.send(start)
            socket.send((bundles.say(GOOD) * 32767).astype("<i2").tobytes())
            socket.send('{"type": "stop"}')
            messages = received(socket)
        assert " ".join(each["text"] for each in messages if each["type"] == "final") == GOOD
