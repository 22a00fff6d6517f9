"""What one client may cost the others: sizes, lengths, places, time, keys, origins; and what is given back."""

import base64
import contextlib
import http.client
import io
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import serving
import soundfile
from refusals import refused
from websockets.sync.client import connect

from sbkit.serve import access, http_connection
from sbkit.serve.access import ApiKeys
from sbkit.serve.limits import MEGABYTE, Limits

KEY = "s3cret-schlüssel"
SMALL = Limits(max_upload_mb=0.5, max_audio_seconds=60, max_requests=3, max_active=2, max_live=1, decoders=1,
               idle_seconds=1.0)


@pytest.fixture(scope="module")
def small(bundle):
    with serving.serving(bundle, limits=SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(bundle):
    with serving.serving(bundle, limits=Limits(decoders=1, request_seconds=1.0)) as server:
        yield server


@pytest.fixture(scope="module")
def locked(bundle):
    with serving.serving(bundle, keys=["other", KEY], limits=SMALL) as server:
        yield server


def error(answer):
    return answer.json()["error"]


# ---------------------------------------------------------------- sizes


def test_an_upload_that_says_it_is_too_large_is_refused_before_it_comes(small):
    """By its header alone: not a byte of the body is sent."""
    with serving.uploading(small, 10 * MEGABYTE) as client:
        answer = client.getresponse()
        assert answer.status == 413 and json.load(answer)["error"]["code"] == "upload_too_large"


def test_an_upload_that_does_not_say_is_counted(small):
    """Without a content-length it is read up to the limit and no further."""
    sent = 0

    def endless():
        nonlocal sent
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while sent < 20 * MEGABYTE:
            sent += 65536
            yield bytes(65536)

    try:
        answer = httpx.post(f"{small.base}/audio/transcriptions", content=endless(), timeout=30,
                            headers={"content-type": "multipart/form-data; boundary=x"})
        assert answer.status_code == 413 and error(answer)["code"] == "upload_too_large"
    except httpx.WriteError:
        pass  # the server hung up on us
    assert small.post("still here").json()["text"] == "still here"


def test_the_official_client_sees_413(small):
    with small.openai() as client:
        with pytest.raises(openai.APIStatusError) as refused:
            client.audio.transcriptions.create(file=("a.wav", bytes(MEGABYTE)), model="level")
        assert refused.value.status_code == 413 and refused.value.code == "upload_too_large"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["FLAC", "MP3", "OGG"])
def test_a_bomb_of_silence_is_refused_by_its_length(small, format):
    """Hours in some kilobytes."""
    bomb = serving.silence({"MP3": 400, "OGG": 900}.get(format, 3600), format=format)
    assert len(bomb) < SMALL.upload_bytes
    answer = small.post(bomb)
    assert answer.status_code == 400 and error(answer)["code"] == "audio_too_long"
    assert "the limit of this server is 60 s" in error(answer)["message"]


def header(rate=16_000, channels=1, bits=16, size=32_000):
    """A WAV that claims what it likes."""
    block = channels * bits // 8
    fmt = struct.pack("<HHIIHH", 1, channels, rate, (rate * block) & 0xFFFFFFFF, block & 0xFFFF, bits)
    return b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + struct.pack("<I", 16) + fmt + b"data" + \
        struct.pack("<I", size) + bytes(32_000)


@pytest.mark.parametrize("forged", [
    {"rate": 1}, {"rate": 0}, {"rate": 2**31 - 1}, {"rate": 500_000}, {"channels": 1000}, {"channels": 65535},
    {"channels": 0}, {"channels": 40}, {"rate": 200},
])
def test_forged_headers_are_refused(small, forged):
    answer = small.post(header(**forged))
    assert answer.status_code == 400 and error(answer)["code"] in ("invalid_audio", "audio_too_long")


def test_a_header_that_claims_more_than_there_is_costs_nothing(small):
    answer = small.post(header(size=2**32 - 40))
    assert answer.status_code in (200, 400)
    assert small.post(header()).status_code == 200


def test_compressed_bodies_are_refused(small):
    answer = httpx.post(f"{small.base}/audio/transcriptions", content=b"\x1f\x8b" + bytes(100), headers={
        "content-type": "multipart/form-data; boundary=x", "content-encoding": "gzip"})
    assert answer.status_code == 400 and error(answer)["code"] == "invalid_body"


# ---------------------------------------------------------------- places and time


def test_too_many_requests_get_429_and_when_to_come_back(small):
    with small.busy("a", "b", "c"):
        answer = small.post("d")
        assert answer.status_code == 429 and error(answer)["code"] == "rate_limit_exceeded"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert small.counted("sbkit_requests_inside") == 0
    assert small.post("d").json()["text"] == "d"


def test_the_official_client_comes_back_by_itself(small):
    """It waits as long as retry-after says, and then is answered."""
    with small.busy("a", "b", "c") as go, ThreadPoolExecutor(1) as pool, small.openai(max_retries=3) as client:
        before = small.counted("sbkit_refused_total")
        late = pool.submit(client.audio.transcriptions.create, file=("a.wav", serving.wav("late")), model="level")
        serving.until(lambda: small.counted("sbkit_refused_total") > before)
        go.set()
        assert late.result(20).text == "late"


def test_no_more_recordings_are_decoded_than_are_worked_on(small, monkeypatch):
    """What waits for its turn is an upload, not hours of samples."""
    decoded, decode = [], small.state.decoders.decode
    monkeypatch.setattr(small.state.decoders, "decode", lambda *args: (decoded.append(1), decode(*args))[1])
    with small.busy("a", "b", "c"):
        serving.until(lambda: len(decoded) == SMALL.max_active)
        time.sleep(0.2)
        assert len(decoded) == SMALL.max_active == 2


def test_a_deadline_ends_the_wait_and_the_work(hasty):
    with hasty.held():
        answer = hasty.post("slow")
        assert answer.status_code == 504 and error(answer)["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
        assert hasty.counted("sbkit_requests_inside") == 0
    assert hasty.post("fast").json()["text"] == "fast"


def test_a_deadline_amid_a_stream_is_an_event(hasty):
    with hasty.held():
        answer = hasty.post("slow", stream="true")
    assert answer.status_code == 200 and "deadline_exceeded" in answer.text and "[DONE]" not in answer.text


def test_an_upload_that_trickles_is_ended(hasty):
    with serving.uploading(hasty, 1000) as client:
        client.send(b"--x\r\n")
        answer = client.getresponse()
        assert answer.status == 408 and json.load(answer)["error"]["code"] == "upload_too_slow"
    assert hasty.counted("sbkit_requests_inside") == 0


def test_a_connection_that_never_asks_is_closed_and_one_in_work_is_not(small, monkeypatch):
    """Whether it is silent or sends its headers a letter at a time, before its first request or after one."""
    monkeypatch.setattr(http_connection, "CHECK_SECONDS", 0.1)
    for before in (b"", b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", small.port), timeout=10) as open_:
            open_.sendall(before)
            until = time.monotonic() + 10
            with contextlib.suppress(OSError):
                while time.monotonic() < until:
                    open_.sendall(b"G")
                    time.sleep(0.05)
            assert time.monotonic() < until, "it was not closed"
    with small.busy("slow"):
        time.sleep(0.5)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_takes_its_work_along(small, stream):
    """What waits for the model is not run, and the place is free at once."""
    runs = []

    def counted(real, *batch):
        runs.append(batch[0].shape)
        return real(*batch)

    with small.held() as go, small.acting(counted):
        first = threading.Thread(target=small.post, args=("first",))
        first.start()
        serving.until(lambda: runs)
        before, refused = small.counted("sbkit_cancelled_total"), small.counted("sbkit_refused_total")
        client = http.client.HTTPConnection("127.0.0.1", small.port)
        request = httpx.Request("POST", small.url, data={"model": "level", "stream": stream},
                                files={"file": ("a.wav", serving.wav("leaves " * 3))})
        client.request("POST", "/v1/audio/transcriptions", request.read(), dict(request.headers))
        serving.until(lambda: small.counted("sbkit_signals_waiting") == 1)
        client.sock.close()
        client.close()
        serving.until(lambda: small.counted("sbkit_requests_inside") == 1)
        assert small.counted("sbkit_cancelled_total") == before + 1
        go.set()
        first.join()
    assert small.post("b").json()["text"] == "b"
    assert len(runs) == 1, "what the client left behind was not run"
    assert small.counted("sbkit_refused_total") == refused, "that it left is no failure of the server's"


def test_a_client_that_leaves_while_it_uploads_is_no_failure(small):
    refused = small.counted("sbkit_refused_total")
    with socket.create_connection(("127.0.0.1", small.port)) as upload:
        upload.sendall(b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n"
                       b"content-type: multipart/form-data; boundary=x\r\n\r\n--x")
        serving.until(lambda: small.counted("sbkit_requests_inside") == 1)
    serving.until(lambda: small.counted("sbkit_requests_inside") == 0)
    assert small.counted("sbkit_refused_total") == refused


@pytest.mark.parametrize("sent", [0, 3000])
def test_an_answer_before_the_end_of_its_request_says_that_the_connection_closes(locked, small, sent):
    """A client that keeps connections would send its next request into one that drops it."""
    head = (b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n"
            b"content-type: application/json\r\n\r\n")
    for asked, status in ((locked, 401), (small, 400)):
        with socket.create_connection(("127.0.0.1", asked.port), timeout=10) as early:
            early.sendall(head % 100_000 + b"x" * sent)
            answer = http.client.HTTPResponse(early)
            answer.begin()
            assert answer.status == status and answer.headers["connection"] == "close"
            assert json.load(answer)["error"] and not early.recv(1), "it is whole, and then closed"
            early.sendall(b"x" * 90_000)  # what is on its way is taken
        with socket.create_connection(("127.0.0.1", asked.port), timeout=10) as whole:
            for _ in range(2):
                whole.sendall(head % 2 + b"{}")
                answer = http.client.HTTPResponse(whole)
                answer.begin()
                assert answer.status == status and answer.headers["connection"] is None and answer.read()


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/level", "/metrics", "/v1/unknown", "/v1/models/",
                                  "/v1/audio/voices", "/v1/audio/speech"])
def test_without_a_key_nothing_is_told(locked, path):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY[:3]}"},
                    {"authorization": "Bearer"}):
        answer = httpx.get(locked.url + path, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert error(answer)["code"] == "invalid_api_key"
    good = {"authorization": b"Bearer " + KEY.encode("latin-1")}
    assert httpx.get(locked.url + path, headers=good, follow_redirects=True).status_code in (200, 404, 405)


def test_the_page_and_the_probes_are_open(locked):
    assert [httpx.get(locked.url + path).status_code for path in ("/", "/health", "/ready")] == [200] * 3


def test_without_a_key_health_is_the_status_alone(locked):
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert httpx.get(f"{locked.url}/health", headers=headers).json() == {"status": "ok"}
    all_of_it = httpx.get(f"{locked.url}/health", headers={"authorization": b"Bearer " + KEY.encode("latin-1")}).json()
    assert set(all_of_it) == {"status", "version", "faults", "models"}
    assert all_of_it["models"]["level"]["file"] == "model.onnx"


def test_without_a_key_a_fault_is_not_described(bundle):
    def fail(real, *batch):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with serving.serving(bundle, keys=["secret"]) as server:
        keyed = {"authorization": "Bearer secret"}
        with server.acting(fail):
            assert server.post("a", headers=keyed).status_code == 503
        answers = [httpx.get(server.url + path) for path in ("/health", "/ready")]
        assert [each.status_code for each in answers] == [503, 503]
        assert [each.json() for each in answers] == [{"status": "unhealthy"}, {"ready": False, "why": "unhealthy"}]
        assert "device-side assert" in httpx.get(f"{server.url}/health", headers=keyed).json()["faults"][0]
        assert "device-side assert" in httpx.get(f"{server.url}/ready", headers=keyed).json()["why"]


def test_the_official_client_has_its_own_error_for_a_wrong_key(locked):
    with locked.openai("wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert refused.value.code == "invalid_api_key"
    with locked.openai("other") as client:
        assert [each.id for each in client.models.list()] == ["level"]


def test_a_wrong_key_opens_no_socket(locked):
    for options in ({}, {"additional_headers": {"authorization": "Bearer wrong"}},
                    {"subprotocols": ["sbkit.live", "sbkit.key.d3Jvbmc"]}, {"subprotocols": ["sbkit.key.!!"]}):
        refused = serving.refused_socket(locked.live, **options)
        assert refused.status_code == 401 and json.loads(refused.body)["error"]["code"] == "invalid_api_key"
    with connect(locked.live, additional_headers={"authorization": "Bearer other"}) as socket:
        assert socket.subprotocol is None
    coded = base64.urlsafe_b64encode(KEY.encode()).decode().rstrip("=")
    serving.until(lambda: locked.counted("sbkit_live_sessions") == 0)
    with connect(locked.live, subprotocols=["sbkit.live", f"sbkit.key.{coded}"]) as socket:
        assert socket.subprotocol == "sbkit.live", "the key is not repeated"


def test_keys_are_compared_by_all_their_digests(monkeypatch):
    """In constant time: each key, whichever is right, through compare_digest on digests of one length."""
    seen, real = [], access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: (seen.append((len(a), len(b))), real(a, b))[1])
    keys = ApiKeys(["one", "two", "three"])
    assert keys.allow("one") and keys.allow("three") and not keys.allow("") and not keys.allow("on")
    assert seen == [(32, 32)] * 12


# ---------------------------------------------------------------- pages of others


def test_a_page_elsewhere_may_not_use_this_server(small):
    for origin in ("https://evil.example", "null", "http://[", "", f"http://127.0.0.1:{small.port}.evil.example"):
        answer = httpx.get(f"{small.base}/models", headers={"origin": origin})
        assert answer.status_code == 403 and error(answer)["code"] == "origin_not_allowed"
    assert serving.refused_socket(small.live, origin="https://evil.example").status_code == 403
    assert httpx.get(f"{small.base}/models", headers={"origin": small.url}).status_code == 200


def test_unless_it_was_allowed(bundle):
    with serving.serving(bundle, origins=["https://good.example"]) as server:
        headers = {"origin": "https://good.example", "access-control-request-method": "POST",
                   "access-control-request-headers": "authorization"}
        answer = httpx.options(f"{server.base}/audio/transcriptions", headers=headers)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE"  # all that routes take
        assert httpx.get(f"{server.base}/models", headers=headers).headers["access-control-allow-origin"]
        with connect(server.live, origin="https://good.example"):
            pass


def test_every_limit_has_to_be_above_nothing():
    with refused("bad-value", key="--max-live", value=0):
        Limits(max_live=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_floats_that_are_no_sound_are_refused(small, value):
    file = io.BytesIO()
    soundfile.write(file, np.full(16000, value, np.float32), 16000, format="WAV", subtype="FLOAT")
    answer = small.post(file.getvalue())
    assert answer.status_code == 400 and error(answer)["code"] == "invalid_audio"
