"""Live sessions of a bundle with a streaming graph: in chunks, in steps that they share, each as if it were alone."""

import contextlib
import json
import socket as sockets
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import bundles
import numpy as np
import pytest
import serving
import websockets
from test_live import PAUSE, lines, pcm, settled, speak, start, streams
from websockets.sync.client import connect

from sbkit.cli import main
from sbkit.serve import live_messages
from sbkit.serve.limits import Limits

RATE = bundles.RATE
MANY = Limits(decoders=1, max_live=64)


@pytest.fixture(scope="module")
def streaming(tmp_path_factory):
    return bundles.make(tmp_path_factory.mktemp("serve") / "level", streams=True)


@pytest.fixture(scope="module")
def server(streaming):
    with serving.serving(streaming, limits=MANY) as server:
        yield server


def heard(server, signal, frame=1600, **asked):
    """All messages of one session after the first."""
    with connect(server.live) as socket:
        assert start(socket, **asked)["type"] == "ready"
        return speak(socket, signal, frame)


def converse(server, signal, **asked):
    """All messages of a session that waits after each packet until nothing more is told of it."""
    data, messages = pcm(signal), []
    with connect(server.live) as socket:
        start(socket, **asked)
        for i in range(0, len(data), 5120):
            socket.send(data[i:i + 5120])
            with contextlib.suppress(TimeoutError):
                while True:
                    messages.append(json.loads(socket.recv(0.1)))
        return messages + speak(socket, np.zeros(0, np.float32))


def test_a_transducer_is_heard_as_ctc_is(tmp_path):
    signal = np.concatenate([bundles.say("ab cd"), PAUSE, bundles.say("cab dab"), PAUSE])
    with serving.serving(bundles.make_transducer(tmp_path / "level"), limits=MANY) as server:
        assert lines(heard(server, signal)) == ["ab cd", "cab dab"]


def test_hot_words_search_a_transducers_stream(tmp_path):
    a, b = map(bundles.PIECES.index, "ab")
    either = bundles.voiced([3, 0, (a + b) / 2, 0, *bundles.spell("cd"), *[0] * 20])  # a and b, in either order
    made = bundles.make_transducer(tmp_path / "level")
    for said in ("ab", "ba"):
        with serving.serving(made, limits=MANY, search={"hot_words": {said: 8.0}}) as server:
            assert lines(heard(server, np.concatenate([either, either]))) == [f"{said} cd"] * 2


def test_what_is_settled_is_told_apart_from_what_may_change(server):
    partials = [each for each in converse(server, bundles.say("one two three")) if each["type"] == "partial"]
    assert all(each["text"].startswith(each["settled"]) for each in partials)
    assert {"", "one", "one two"} <= {each["settled"] for each in partials}
    assert all("one two three".startswith(each["text"]) for each in partials), "nothing that was shown was replaced"
    ends = [each["heard"] for each in partials]
    assert ends == sorted(ends) and all(round(end / 0.04) == pytest.approx(end / 0.04) for end in ends)


@pytest.mark.parametrize("chunk_ms", [160, 320, 640, 320.0])
def test_a_client_may_choose_the_chunk(server, chunk_ms):
    with connect(server.live) as socket:
        assert start(socket, chunk_ms=chunk_ms)["chunk_seconds"] == chunk_ms / 1000
    messages = converse(server, bundles.say("abc def"), chunk_ms=chunk_ms)
    assert lines(messages) == ["abc def"]
    *shown, last = [round(1000 * each["heard"]) for each in messages if each["type"] == "partial"]
    assert all(end % chunk_ms == 0 for end in shown) and (last % chunk_ms == 0 or last == 960), "or at its end"


@pytest.mark.parametrize("chunk_ms", [100, 0, -320, "320", 320.5, True, [320]])
def test_another_chunk_is_refused_with_those_there_are(server, chunk_ms):
    with connect(server.live) as socket:
        told = start(socket, chunk_ms=chunk_ms)
    assert told["type"] == "error" and told["error"]["param"] == "chunk_ms"
    message = told["error"]["message"]
    assert told["error"]["code"] == "invalid_value" and message.endswith("for 160, 320, 640")


def test_a_model_without_such_a_graph_has_no_chunks_to_choose(tmp_path):
    with serving.serving(bundles.make(tmp_path / "level")) as server, connect(server.live) as socket:
        told = start(socket, chunk_ms=320)
        assert told["type"] == "error" and told["error"]["code"] == "no_streaming_graph"


@pytest.mark.parametrize("frame", [37, 320, 100_000])
def test_it_makes_no_difference_how_the_audio_is_cut_into_frames(server, frame):
    signal = np.concatenate([bundles.say("one two"), PAUSE, bundles.say("three")])
    assert settled(heard(server, signal, frame)) == settled(heard(server, signal, 1600))


def test_sessions_in_shared_steps_hear_what_each_hears_alone(server):
    """They are held until all wait, so that they certainly share steps."""
    texts = [f"{chr(97 + i)}b{chr(99 + i)} speaks {'so ' * (i % 3)}" for i in range(12)]
    alone = [settled(heard(server, bundles.say(text), chunk_ms=(160, 320)[i % 2])) for i, text in enumerate(texts)]
    before = steps(server)
    go = hold(server)
    with ThreadPoolExecutor(len(texts)) as pool:
        together = [pool.submit(heard, server, bundles.say(text), chunk_ms=(160, 320)[i % 2])
                    for i, text in enumerate(texts)]
        serving.until(lambda: len(streams(server)._queue) == len(texts))
        go.set()
        assert [settled(each.result()) for each in together] == alone
    rows, count = (after - old for after, old in zip(steps(server), before, strict=True))
    assert rows - count >= 10, "the first chunks of twelve, six of each size, took two steps"


def steps(server):
    return server.counted("sbkit_step_rows_sum"), server.counted("sbkit_step_rows_count")


def hold(server):
    """Nothing is heard until the event that this gives is set."""
    go, taken = threading.Event(), threading.Event()
    streams(server).worker.submit(lambda: (taken.set(), go.wait(30)))
    assert taken.wait(10)
    return go


def test_speech_without_a_pause_is_told_in_lines_of_bounded_length(tmp_path):
    with serving.serving(bundles.make(tmp_path / "level", streams=True, chunk_seconds=3.0)) as server:
        text = " ".join(f"w{chr(97 + i)}" for i in range(26))
        found = settled(heard(server, bundles.say(text)))
    assert " ".join(each["text"] for each in found) == text
    assert len(found) > 2 and all(each["end"] - each["start"] < 4.0 for each in found)


def test_listening_tells_the_same_lines(tmp_path, monkeypatch, capsys):
    """Of speech with pauses, and of speech without, which is told in lines of bounded length."""
    folder = bundles.make(tmp_path / "level", streams=True, chunk_seconds=3.0)
    text = " ".join(f"w{chr(97 + i)}" for i in range(26))
    signal = np.concatenate([bundles.say("hello there"), PAUSE, bundles.say(text)])
    with serving.serving(folder) as server:
        found = settled(heard(server, signal))
    (tmp_path / "pcm").write_bytes(pcm(signal))
    with open(tmp_path / "pcm") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["listen", str(folder), "-", "--json"]) == 0
    assert settled(map(json.loads, capsys.readouterr().out.splitlines())) == found and len(found) > 3


def test_a_server_that_stops_before_anything_was_heard_says_what_it_hears(streaming):
    with serving.serving(streaming) as server, connect(server.live) as socket:
        start(socket)
        go = hold(server)
        socket.send(pcm(bundles.say("hello there")))
        assert socket.ping().wait(10), "all of it arrived"
        server.state.stop()
        go.set()
        messages = [json.loads(message) for message in socket]
    assert lines(messages) == ["hello there"] and messages[-1]["type"] == "done"


def test_hot_words_and_language_models_search_a_stream_as_they_do_recordings(streaming):
    with serving.serving(streaming, search={"beam": 8, "hot_words": {"there": 8.0}}) as server:
        signal = np.concatenate([bundles.say("hello there"), PAUSE, bundles.say("good people"), PAUSE])
        assert lines(heard(server, signal)) == ["hello there", "good people"]


# ---------------------------------------------------------------- clients that are slow, wrong or gone


def test_a_message_in_fragments_is_one_message(server):
    data = pcm(bundles.say("hello there"))
    with connect(server.live) as socket:
        start(socket)
        socket.send(data[i:i + 777] for i in range(0, len(data), 777))
        assert lines(speak(socket, np.zeros(0, np.float32))) == ["hello there"]


def test_a_client_that_leaves_while_its_chunk_is_computed_disturbs_nobody(server):
    go = hold(server)
    with connect(server.live) as other:
        start(other)
        with connect(server.live) as socket:
            start(socket)
            socket.send(pcm(bundles.say("hello")))
            other.send(pcm(bundles.say("hello")))
            time.sleep(0.2)
        serving.until(lambda: server.counted("sbkit_live_sessions") == 1)
        go.set()
        assert lines(speak(other, np.zeros(0, np.float32))) == ["hello"]


def test_a_model_that_never_answers_is_told_in_time(streaming):
    with serving.serving(streaming, limits=Limits(decoders=1, request_seconds=0.5)) as server:
        go = hold(server)
        with connect(server.live) as socket:
            start(socket)
            socket.send(pcm(bundles.say("hello")))
            assert json.loads(socket.recv(10))["error"]["code"] == "deadline_exceeded"
        go.set()
        assert lines(heard(server, bundles.say("hello"))) == ["hello"]


def test_a_client_that_has_to_wait_is_never_taken_for_a_silent_one(streaming):
    """It sends without a pause, and the model is busy for longer than it may be silent: the model is late, not it."""
    with serving.serving(streaming, limits=Limits(decoders=1, idle_seconds=0.3, request_seconds=1.0)) as server:
        go = hold(server)
        with connect(server.live) as socket:
            start(socket)
            for _ in range(8):
                socket.send(bytes(2 * RATE))
            assert json.loads(socket.recv(10))["error"]["code"] == "deadline_exceeded"
        go.set()


def test_a_client_that_speaks_faster_than_it_is_heard_has_to_wait(server):
    go = hold(server)
    with connect(server.live) as socket:
        start(socket)
        sending = threading.Thread(target=lambda: [socket.send(bytes(64_000)) for _ in range(100)], daemon=True)
        sending.start()
        [session] = server.state.live_sessions.sessions
        serving.until(lambda: session.seconds > 4)
        time.sleep(0.5)
        assert session.seconds < 10, "what is taken in and not heard yet is bounded"
        go.set()
        sending.join(30)
        assert speak(socket, np.zeros(0, np.float32))[-1]["duration"] == 200


@contextlib.contextmanager
def deaf(server):
    """A client with the smallest buffers, which reads nothing after "ready"."""
    raw = sockets.socket()
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 1)
    raw.connect(("127.0.0.1", server.port))
    with connect(server.live, sock=raw, max_queue=1, close_timeout=0.1) as socket:
        start(socket, chunk_ms=160)
        yield socket


def flood(socket):
    """Speak on and on, a line each second."""
    line = np.concatenate([bundles.say("ab"), np.zeros(round(0.8 * RATE), np.float32)])
    data = pcm(np.tile(line, 8))
    with contextlib.suppress(websockets.ConnectionClosed, OSError):
        while True:
            socket.send(data)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_ended_by_name_and_slows_nobody(server, monkeypatch):
    monkeypatch.setattr(live_messages, "MAX_MESSAGES", 4)

    def ended():
        return server.counted('sbkit_refused_total{reason="slow_client"}')

    before, text = ended(), " ".join(["hello"] * 10)
    with deaf(server) as socket:
        threading.Thread(target=flood, args=(socket,), daemon=True).start()
        rounds, end = 0, time.monotonic() + 60
        while ended() == before or not rounds:
            assert lines(heard(server, bundles.say(text))) == [text]
            rounds += 1
            assert time.monotonic() < end, "it was never ended"
        serving.until(lambda: server.counted("sbkit_live_sessions") == 0)
