"""Live audio: words while somebody speaks, settled at pauses, the same as of a recording, in bounded memory."""

import itertools
import json
import socket as sockets
import struct
from concurrent.futures import ThreadPoolExecutor

import bundles
import numpy as np
import pytest
import serving
import soxr
import websockets
from websockets.sync.client import connect

from sbkit.serve.limits import Limits

RATE, FRAME = bundles.RATE, bundles.FRAME
PAUSE = np.zeros(RATE, dtype=np.float32)


@pytest.fixture(scope="module", params=["tail", "chunks"])
def folder(request, bundle, tmp_path_factory):
    """A bundle whose live sessions are heard by decoding the tail, and one with a streaming graph."""
    if request.param == "tail":
        return bundle
    return bundles.make(tmp_path_factory.mktemp("live") / "level", streams=True)


@pytest.fixture(scope="module")
def server(folder):
    with serving.serving(folder, names=("level", "whisper-1")) as server:
        yield server


def pcm(signal):
    return np.round(np.clip(signal, -1, 1) * 32767).astype("<i2").tobytes()


def start(socket, **changes):
    socket.send(json.dumps({"type": "start", "model": "level", "sample_rate": RATE} | changes))
    return json.loads(socket.recv(10))


def speak(socket, signal, frame=1600):
    """Send all of it; every message that comes back."""
    data = pcm(signal)
    for i in range(0, len(data), 2 * frame):
        socket.send(data[i : i + 2 * frame])
    socket.send('{"type": "stop"}')
    messages = []
    while not messages or messages[-1]["type"] not in ("done", "error"):
        messages.append(json.loads(socket.recv(20)))
    return messages


def settled(messages):
    return [each for each in messages if each["type"] == "final"]


def lines(messages):
    return [each["text"] for each in settled(messages)]


def streams(server):
    return next(iter(server.state.registry)).streams


def test_words_come_while_somebody_speaks_and_are_settled_at_pauses(server):
    signal = np.concatenate([bundles.say("hello there"), PAUSE, bundles.say("good people"), PAUSE])
    with connect(server.live) as socket:
        chunk, ahead = (None, None) if streams(server) is None else (0.32, 0.0)
        assert start(socket) == {"type": "ready", "model": "level", "sample_rate": RATE, "chunk_seconds": chunk,
                                 "ahead_seconds": ahead}
        messages = speak(socket, signal)
    finals = settled(messages)
    assert [each["text"] for each in finals] == ["hello there", "good people"]
    assert messages[-1] == {"type": "done", "duration": pytest.approx(len(signal) / RATE, abs=0.01)}
    partials = [each["text"] for each in messages if each["type"] == "partial"]
    # Sent as fast as this, a stream's chunks may be decoded together; that they are shown in time has a test below.
    assert chunk or any(text and "hello there".startswith(text) for text in partials), "what is not settled is shown"
    words = [word for each in finals for word in each["words"]]
    assert [word["word"] for word in words] == ["hello", "there", "good", "people"]
    begins = (len(bundles.say("hello there")) + len(PAUSE)) / RATE
    assert words[2]["start"] == pytest.approx(begins, abs=0.2)
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(words))
    assert all(0.9 < word["confidence"] <= 1 for word in words)


@pytest.mark.parametrize("frame", [160, 100_000])
def test_lines_end_at_pauses_however_fast_it_comes(server, frame):
    signal = np.concatenate([part for text in ("one two", "three", "four") for part in (bundles.say(text), PAUSE)])
    with connect(server.live) as socket:
        start(socket)
        assert lines(speak(socket, signal, frame)) == ["one two", "three", "four"]


def test_partials_are_shown_before_the_end(server):
    """Not all at once when it is over: while the client is silent about the rest."""
    with connect(server.live) as socket:
        start(socket)
        socket.send(pcm(bundles.say("hello there people")))
        message = json.loads(socket.recv(10))
        assert message["type"] == "partial" and message["text"] and "hello there people".startswith(message["text"])


def test_the_clients_own_rate_is_resampled(server):
    signal = soxr.resample(np.concatenate([bundles.say("abc def", hold=4), PAUSE]), RATE, 48_000)
    with connect(server.live) as socket:
        start(socket, sample_rate=48_000)
        assert "".join(lines(speak(socket, signal, 4800))).replace(" ", "")[:3] == "abc"


@pytest.mark.slow
@pytest.mark.parametrize("first, param, code", [
    ('{"type": "start", "model": "nobody", "sample_rate": 16000}', "model", "model_not_found"),
    ('{"type": "start", "model": ["level"], "sample_rate": 16000}', "model", "invalid_type"),
    ('{"type": "start", "sample_rate": 16000}', "model", "missing_required_parameter"),
    ('{"type": "start", "model": null, "sample_rate": 16000}', "model", "missing_required_parameter"),
    ('{"type": "start", "model": "level", "sample_rate": 16000, "chunk": 320}', "chunk", "unsupported_parameter"),
    ('{"type": "start", "model": "level", "sample_rate": 16000, "zzz": 1}', "zzz", "unsupported_parameter"),
    ('{"type": "start", "model": "level", "sample_rate": 16000.5}', "sample_rate", "invalid_value"),
    ('{"type": "start", "model": "level", "sample_rate": 16000000}', "sample_rate", "invalid_value"),
    ('{"type": "start", "model": "level", "sample_rate": true}', "sample_rate", "invalid_value"),
    ('{"type": "begin"}', None, "invalid_message"), ("[1]", None, "invalid_json"),
    ('{"type": "start", "model": "\\ud800"}', None, "not_utf8"), ('{"\\ud800": 1}', None, "not_utf8"),
    ('{"type": "start", "type": "start"}', None, "duplicate_parameter"), ("junk", None, "invalid_json"),
    ("[" * 10_000, None, "invalid_json"), ("[" * 100_000, None, "invalid_message"), (b"\0\0", None, "invalid_message"),
])
def test_a_wrong_start_is_told_and_ends_it(server, first, param, code):
    with connect(server.live) as socket:
        socket.send(first)
        message = json.loads(socket.recv(10))
        assert message["type"] == "error"
        assert (message["error"]["code"], message["error"]["param"]) == (code, param)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            socket.recv(10)
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, code)


@pytest.mark.parametrize("then, code", [
    (b"\0", "invalid_frame"), ('{"type": "start"}', "invalid_message"), ("{}", "invalid_message"),
    (serving.wav("abc"), "invalid_audio"), (b"OggS\0", "invalid_audio"), (bytes(400_000), "invalid_frame"),
    ("{", "invalid_json"), (b"", "empty_frame"),
])
def test_wrong_audio_is_told_and_ends_that_session_alone(server, then, code):
    with connect(server.live) as other, connect(server.live) as socket:
        start(other)
        start(socket)
        socket.send(then)
        message = json.loads(socket.recv(10))
        assert message["type"] == "error" and message["error"]["code"] == code
        assert lines(speak(other, bundles.say("hello"))) == ["hello"]


def test_there_is_no_socket_elsewhere(server):
    for path in ("/v1/live", "/v1/audio/transcriptions", "/"):
        answer = serving.refused_socket(server.url.replace("http", "ws") + path)
        assert answer.status_code == 404 and json.loads(answer.body)["error"]["code"] == "unknown_url"
        assert "live transcription is at /v1/audio/live" in json.loads(answer.body)["error"]["message"]


def test_a_server_that_stops_says_what_it_heard_so_far(folder):
    """The client gets its words and a proper end, though it never said stop; nobody else is let in."""
    with serving.serving(folder) as server:
        with connect(server.live) as socket:
            start(socket)
            socket.send(pcm(bundles.say("hello")))
            assert json.loads(socket.recv(10))["type"] == "partial"
            server.state.stop()
            messages = [json.loads(message) for message in socket]
        assert lines(messages) == ["hello"] and messages[-1]["type"] == "done"
        assert serving.refused_socket(server.live).status_code == 503


def test_a_session_that_says_nothing_is_ended_and_its_place_is_free(folder):
    with serving.serving(folder, limits=Limits(max_live=1, decoders=1, idle_seconds=0.5)) as server:
        with connect(server.live) as socket:
            start(socket)
            refused = serving.refused_socket(server.live)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert json.loads(socket.recv(10))["error"]["code"] == "idle"
        serving.until(lambda: server.counted("sbkit_live_sessions") == 0)
        with connect(server.live) as socket:
            start(socket)


def test_a_device_that_breaks_ends_the_session_with_the_reason(folder):
    def broken(*_):
        raise RuntimeError("CUDA error: gone")

    with serving.serving(folder) as server:
        with connect(server.live) as socket:
            start(socket)
            (streams(server) or server.engine).backend = broken
            socket.send(pcm(bundles.say("hello")))
            message = json.loads(socket.recv(10))
            assert message["type"] == "error" and message["error"]["code"] == "device_fault"
        assert server.state.faults()


@pytest.mark.parametrize("begun", [b"", b"\x82\xfe\x05\x00" + bytes(4), b"\x82\xfe\x05\x00" + bytes(4 + 999)])
def test_a_client_that_vanishes_perhaps_in_mid_frame_leaves_nothing_behind(server, begun):
    """The head of a frame says 1280 bytes; then the connection breaks."""
    with connect(server.live) as other, connect(server.live) as socket:
        start(other)
        start(socket)
        socket.send(pcm(bundles.say("hello")))
        socket.socket.sendall(begun)
        socket.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        socket.socket.close()
        serving.until(lambda: server.counted("sbkit_live_sessions") == 1)
        assert lines(speak(other, bundles.say("hello"))) == ["hello"]
    serving.until(lambda: server.counted("sbkit_live_sessions") == 0)


def test_many_speak_at_once_and_each_is_heard(server):
    def one(i):
        text = f"{chr(97 + i)}b{chr(99 + i)} speaks"
        with connect(server.live) as socket:
            start(socket)
            return text, " ".join(lines(speak(socket, bundles.say(text))))

    with ThreadPoolExecutor(10) as pool:
        for said, heard in pool.map(one, range(10)):
            assert heard == said
