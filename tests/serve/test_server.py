"""``sbkit serve`` as it is started: what it imports, what it refuses in one line, how it ends; no pickle is opened."""

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import bundles
import httpx
import pytest
import serving
from refusals import refused
from websockets.sync.client import connect

from sbkit.cli import main
from sbkit.serve import registry, server

HEAVY = ("torch", "torchaudio", "speechbrain", "hyperpyyaml", "ruamel", "yaml", "pyarrow", "datasets", "sentencepiece")


def started(bundle, drain_seconds=0, **how):
    """The process of a server of a bundle, and where it listens."""
    return serving.started(sys.executable, "-m", "sbkit", "serve", bundle, "--port", 0, "--threads", 1,
                           "--drain-seconds", drain_seconds, **how)[:2]


def error_of(capsys, *words):
    """The one line in which the command says what is wrong."""
    assert main(["serve", *map(str, words)]) == 2
    told = capsys.readouterr()
    [line] = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert told.out == "" and "Traceback" not in told.err
    return line


class Poison:
    def __reduce__(self):
        return os.system, (f"touch {Poison.trace}",)


@pytest.mark.slow
def test_a_poisoned_bundle_next_to_a_good_model_does_nothing(tmp_path):
    """Neither the YAML that calls nor any pickle is opened: loading, answering, ending."""
    bundle = bundles.make(tmp_path / "poisoned")
    Poison.trace = tmp_path / "fired"
    (bundle / "hyperparams.yaml").write_text(f"x: !apply:os.system ['touch {Poison.trace}']\n")
    for name in ("model.ckpt", "model.pt", "tokenizer.pkl", "wav2vec2.bin", "model.pt2"):
        (bundle / name).write_bytes(pickle.dumps(Poison()))
    os.system(f"{sys.executable} -c 'import pickle; pickle.load(open(\"{bundle}/model.ckpt\", \"rb\"))'")
    assert Poison.trace.exists(), "the poison works"
    Poison.trace.unlink()
    process, url = started(bundle)
    try:
        answer = httpx.post(f"{url}/v1/audio/transcriptions", data={"model": "poisoned"},
                            files={"file": ("a.wav", serving.wav("good"))})
        assert answer.json()["text"] == "good"
        uploaded = httpx.post(f"{url}/v1/audio/transcriptions", data={"model": "poisoned"},
                              files={"file": ("a.wav", pickle.dumps(Poison()))})
        assert uploaded.status_code == 400
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0 and not Poison.trace.exists()


@pytest.mark.slow
def test_serving_imports_neither_torch_nor_speechbrain_nor_hyperpyyaml(bundle):
    code = textwrap.dedent(f"""
        import sys, threading, time
        sys.path.insert(0, {os.path.dirname(__file__)!r}); sys.path.insert(0, {os.path.dirname(bundles.__file__)!r})
        import sbkit.serve.app, sbkit.serve.server, serving, httpx
        with serving.serving({str(bundle)!r}) as server:
            answer = httpx.post(server.base + "/audio/transcriptions", data={{"model": "level"}},
                                files={{"file": ("a.wav", serving.wav("hi"))}})
            print(answer.json()["text"], [name for name in {HEAVY!r} if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "hi []\n", done.stderr


@pytest.mark.slow
def test_sigterm_finishes_what_is_in_flight_and_takes_nothing_new(bundle, tmp_path):
    """The client who was let in gets all of the answer; then the process ends with 0."""
    process, url = started(bundle)
    answers = []
    data = serving.wav("word " * 400, format="FLAC")

    def ask():
        with httpx.stream("POST", f"{url}/v1/audio/transcriptions", data={"model": "level", "stream": "true"},
                          files={"file": ("a.flac", data)}, timeout=60) as answer:
            for line in answer.iter_lines():
                answers.append(line)

    client = threading.Thread(target=ask)
    client.start()
    serving.until(lambda: answers)
    process.send_signal(signal.SIGTERM)
    client.join(60)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err
    assert any("transcript.text.done" in line for line in answers) and "data: [DONE]" in answers
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_stop_while_the_models_are_loaded_is_no_error(bundle, monkeypatch):
    """What is loaded finds the socket closed and the decoders gone: that is the stop's doing."""
    def fill(running):
        os.kill(os.getpid(), signal.SIGTERM)
        serving.until(lambda: running.state.stopping)
        time.sleep(1)
        ended.append(running)
        raise OSError(9, "Bad file descriptor")

    ended = []
    monkeypatch.setattr(server._Server, "load_models", fill)
    assert server.serve(server.ServeRequest([str(bundle)], port=0)) == 0 and ended


@pytest.mark.slow
def test_sigterm_lets_a_live_session_finish(bundle):
    process, url = started(f"level={bundle}")
    with connect(url.replace("http", "ws") + "/v1/audio/live") as session:
        session.send(json.dumps({"type": "start", "model": "level", "sample_rate": bundles.RATE}))
        session.send((bundles.say("hello") * 32767).astype("<i2").tobytes())
        assert [json.loads(session.recv(10))["type"] for _ in range(2)] == ["ready", "partial"]
        process.send_signal(signal.SIGTERM)
        messages = [json.loads(message) for message in session]
    assert [each["type"] for each in messages][-2:] == ["final", "done"] and messages[-2]["text"] == "hello"
    assert messages[-1]["reason"] == "stopping" and session.close_code == 1001, "the client can go on elsewhere"
    assert messages[-1]["duration"] == pytest.approx(len(bundles.say("hello")) / bundles.RATE, abs=0.001)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_who_comes_while_it_stops_is_sent_away_and_the_probes_are_answered(server):
    state = server.state
    state.draining = state.stopping = True
    try:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/audio/speech"),
                             ("GET", "/")):
            answer = httpx.request(method, server.url + path)
            assert answer.status_code == 503 and answer.headers["connection"] == "close"
            assert answer.json()["error"]["message"] == "the server is stopping"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").json() == {"ready": False, "why": "stopping"}
    finally:
        state.draining = state.stopping = False


def test_who_comes_while_it_drains_is_answered_and_goes_elsewhere_next(server):
    """A connection that is kept alive would bind a client to this server, whatever a balancer does."""
    state = server.state
    with httpx.Client() as client:
        first = client.get(f"{server.base}/models")
        assert first.status_code == 200 and first.headers.get("connection") != "close"
        state.draining = True
        try:
            answers = [client.get(f"{server.base}/models"), server.post("good"), httpx.get(f"{server.url}/health")]
            assert [each.status_code for each in answers] == [200] * 3 and answers[1].json()["text"] == "good"
            assert [each.headers.get_list("connection") for each in answers] == [["close"]] * 3
            ready = httpx.get(f"{server.url}/ready")
            assert (ready.status_code, ready.json()) == (503, {"ready": False, "why": "stopping"})
            with connect(server.live) as session:
                session.send(json.dumps({"type": "start", "model": "level", "sample_rate": bundles.RATE}))
                assert json.loads(session.recv(10))["type"] == "ready"
                session.send('{"type": "stop"}')
                assert json.loads(session.recv(10)) == {"type": "done", "duration": 0.0}
        finally:
            state.draining = False


@pytest.mark.slow
def test_a_rolling_update_loses_no_request_and_no_word(bundle):
    """Clients of a balancer that asks /ready, with connections that are kept alive, and somebody who speaks."""
    process, url = started(f"level={bundle}", drain_seconds=3)
    answers, heard, ready = [], [], threading.Event()
    ready.set()

    def ask():
        with httpx.Client(timeout=60) as client:
            while ready.is_set():
                answer = client.post(f"{url}/v1/audio/transcriptions", data={"model": "level"},
                                     files={"file": ("a.wav", serving.wav("good"))})
                answers.append((answer.status_code, answer.json().get("text")))

    def balance():  # as Kubernetes and others: each second, so that some requests come after the signal
        while httpx.get(f"{url}/ready").status_code == 200:
            time.sleep(1)
        ready.clear()

    clients = [threading.Thread(target=call) for call in (ask, ask, balance)]
    with connect(url.replace("http", "ws") + "/v1/audio/live") as session:
        session.send(json.dumps({"type": "start", "model": "level", "sample_rate": bundles.RATE}))
        assert json.loads(session.recv(10))["type"] == "ready"
        for client in clients:
            client.start()
        serving.until(lambda: len(answers) > 5)
        process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        session.send((bundles.say("hello") * 32767).astype("<i2").tobytes())
        heard += [json.loads(message) for message in session]
    for client in clients:
        client.join()
    _, err = process.communicate(timeout=30)
    assert set(answers) == {(200, "good")} and process.returncode == 0 and "Traceback" not in err
    assert [each.get("text") for each in heard][-2:] == ["hello", None] and heard[-1]["reason"] == "stopping"
    assert 3 <= time.monotonic() - signalled < 15 and "stopping in 3 s" in err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM, signal.SIGINT],
                                     [signal.SIGINT]])
def test_a_second_signal_or_ctrl_c_does_not_wait_for_the_drain(bundle, signals):
    process, url = started(f"level={bundle}", drain_seconds=100)
    for number in signals:
        process.send_signal(number)
        if number == signal.SIGTERM:
            with contextlib.suppress(httpx.TransportError):  # of the last one
                serving.until(lambda: httpx.get(f"{url}/ready").status_code == 503)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and time.monotonic() - began < 10 and "Traceback" not in err


STUCK = """
import sys, time
from sbkit.cli import main
from sbkit.infer import backends
real = backends.Onnx.__call__
def call(self, *batch):
    if batch[0].any():  # a server starts with silence
        time.sleep(1000)
    return real(self, *batch)
backends.Onnx.__call__ = call
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_one_deadline_ends_all_even_a_model_that_never_comes_back(bundle):
    """A live session, a request in the model and an upload that trickles: none of them adds its own time."""
    process, url, _ = serving.started(sys.executable, "-c", STUCK, f"level={bundle}", "--port", 0, "--threads", 1,
                                      "--grace-seconds", 2, "--drain-seconds", 0)
    port = int(url.rsplit(":", 1)[1])
    with connect(url.replace("http", "ws") + "/v1/audio/live") as session, \
            socket.create_connection(("127.0.0.1", port)) as upload:
        session.send(json.dumps({"type": "start", "model": "level", "sample_rate": bundles.RATE}))
        session.recv(10)
        session.send((bundles.say("hello") * 32767).astype("<i2").tobytes())
        upload.sendall(b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n"
                       b"content-type: multipart/form-data; boundary=x\r\n\r\n--x")
        answers = []

        def ask():
            answers.append(httpx.post(f"{url}/v1/audio/transcriptions", data={"model": "level"}, timeout=60,
                                      files={"file": ("a.wav", serving.wav("a"))}))

        asking = threading.Thread(target=ask)
        asking.start()
        serving.until(lambda: "sbkit_requests_inside 2" in httpx.get(f"{url}/metrics").text)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        asking.join()
    assert answers[0].status_code == 503 and "stopping" in answers[0].text
    assert process.returncode == 1 and "some requests were not finished within 2 s" in err


@pytest.mark.parametrize("blank", ["", "  ", "\n"])
def test_a_blank_key_does_not_open_the_server_to_everybody(bundle, monkeypatch, blank):
    monkeypatch.setenv(server.KEY_VARIABLE, blank)
    with refused("bad-api-key"):
        server.serve(server.ServeRequest([str(bundle)], port=0))


@pytest.mark.slow
def test_refused_sockets_are_no_errors_in_the_log(bundle):
    process, url = started(f"level={bundle}", env={server.KEY_VARIABLE: "secret"})
    serving.refused_socket(url.replace("http", "ws") + "/v1/audio/live")
    process.terminate()
    [line] = process.communicate(timeout=30)[1].splitlines()
    assert re.match(r"20\d\d-.* INFO sbkit\.serve\.access: 127\.0\.0\.1 WebSocket /v1/audio/live: 401 after ", line)


def test_a_port_that_is_taken_is_one_line_at_once(bundle, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert error_of(capsys, bundle, "--port", port) == (
            f"error: can't listen on 127.0.0.1:{port}: Address already in use; another server may run there; "
            "choose another port with --port [cannot-listen]")


@pytest.mark.parametrize("words, code", [
    (["--port", "0"], "missing-option"),
    (["nowhere", "--port", "0"], "no-such-path"),
    (["../etc=BUNDLE", "--port", "0"], "bad-value"),
    (["BUNDLE", "--port", "0", "--device", "cuda"], "device-unavailable"),
    (["good=BUNDLE", "bad=BROKEN", "--port", "0"], "damaged-bundle"),
    (["BUNDLE", "--port", "0", "--api-key-file", "no-such"], "no-such-path"),
    (["BUNDLE", "--max-upload-mb", "0"], "bad-value"),
    (["BUNDLE", "--host", "203.0.113.7", "--port", "0"], "cannot-listen"),
    (["BUNDLE", "--port", "99999"], "cannot-listen"),
])
def test_mistakes_are_one_line(bundle, tmp_path, capsys, words, code):
    broken = shutil.copytree(bundle, tmp_path / "broken")
    (broken / "model.onnx").write_bytes(b"cut off")
    places = [word.replace("BUNDLE", str(bundle)).replace("BROKEN", str(broken)) for word in words]
    assert error_of(capsys, *places).endswith(f" [{code}]")


def test_a_missing_extra_says_what_to_install(bundle):
    names = ("starlette", "uvicorn", "prometheus_client", "python_multipart", "websockets")
    code = f"""import sys; sys.modules.update(dict.fromkeys({names!r})); from sbkit.cli import main
sys.exit(main(["serve", {str(bundle)!r}]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"error: serving needs {', '.join(names)}; pip install 'sbkit[serve]' [missing-package]\n"


def test_bundles_are_called_as_their_folders_or_as_one_says(tmp_path):
    for name in ("en", "a=b"):
        (tmp_path / name).mkdir()
    found = registry.parse_bundles([str(tmp_path / "en"), f"whisper-1={tmp_path / 'en'}"])
    assert list(found) == ["en", "whisper-1"] and len(set(found.values())) == 1
    with refused("bad-option"):
        registry.parse_bundles([str(tmp_path / "en"), f"en={tmp_path}"])
    with refused("bad-value"):
        registry.parse_bundles([str(tmp_path / "a=b")])


def test_keys_come_from_the_environment_and_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SBKIT_API_KEY", " one \n")
    (tmp_path / "keys").write_text("two\n\n three \n")
    assert server.read_keys(tmp_path / "keys") == ["one", "two", "three"]
    (tmp_path / "none").write_text("\n")
    with refused("bad-api-key"):
        server.read_keys(tmp_path / "none")
    for key in ("schlüssel", "a\tb", "日本"):  # as latin-1 or UTF-8 in a header: 401 for some clients, not for others
        (tmp_path / "keys").write_text(f"two\n{key}\n", encoding="utf-8")
        with refused("bad-api-key") as error:
            server.read_keys(tmp_path / "keys")
        assert key not in str(error.value)
    monkeypatch.setenv("SBKIT_API_KEY", "schlüssel")
    with refused("bad-api-key"):
        server.read_keys(None)


def test_answers_are_not_held_back_for_the_next_packet():
    """asyncio switches Nagle's algorithm off for sockets that say they are TCP; else each answer takes 40 ms."""
    with server.bind("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP


def test_who_listens_to_all_is_told_when_there_is_no_key(bundle, capfd, monkeypatch):
    monkeypatch.setattr(server._Server, "run", lambda self: 0)
    monkeypatch.delenv("SBKIT_API_KEY", raising=False)
    assert server.serve(server.ServeRequest([str(bundle)], host="0.0.0.0", port=0)) == 0
    assert "anyone who can reach 0.0.0.0" in capfd.readouterr().err
    monkeypatch.setenv("SBKIT_API_KEY", "x")
    server.serve(server.ServeRequest([str(bundle)], host="0.0.0.0", port=0))
    server.serve(server.ServeRequest([str(bundle)], port=0))
    assert capfd.readouterr().err == ""
