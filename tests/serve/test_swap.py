"""A bundle that is put in a served one's place: new requests get it, none is lost, and a spoiled one is refused."""

import gc
import json
import os
import shutil
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import bundles
import graph_bundles
import httpx
import pytest
import serving
from websockets.sync.client import connect

from sbkit.cli import main
from sbkit.data import publish
from sbkit.export import layout
from sbkit.export.vocabulary import write_tokens
from sbkit.serve import registry


def make(folder, pieces=bundles.PIECES, **how):
    bundles.make(folder, **how)
    write_tokens(folder / layout.TOKENS, pieces, 0)
    files = layout.read(folder).files | {layout.TOKENS: layout.fingerprint(folder / layout.TOKENS)}
    return bundles.change(folder, files=files)


def loud(folder, **how):
    """A bundle that writes capitals."""
    return make(folder, [*bundles.PIECES[:4], *(each.upper() for each in bundles.PIECES[4:])], **how)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_requests_and_sessions_under_way_end_on_the_old_bundle_and_new_ones_get_the_new(tmp_path, streams):
    folder, texts, over = make(tmp_path / "level", streams=streams), [], threading.Event()
    with serving.serving(folder) as server, ThreadPoolExecutor(8) as pool:
        registry = server.state.registry

        def ask():
            while not over.is_set():
                answer = server.post("good people")
                texts.append(answer.json().get("text", answer.text))

        asking = [pool.submit(ask) for _ in range(4)]
        with connect(server.live) as session, server.held() as go:
            session.send(json.dumps({"type": "start", "model": "level", "sample_rate": bundles.RATE}))
            session.recv(10)
            inside = [pool.submit(server.post, "birds") for _ in range(3)]
            serving.until(lambda: server.counted("sbkit_requests_inside") >= 7)
            old = weakref.ref(next(iter(registry)))
            publish.publish(loud(tmp_path / "new", streams=streams), folder, layout.FOLDER, force=True)
            registry.refresh()
            assert next(iter(registry)) is old(), "it may still be copied"
            registry.refresh()
            assert next(iter(registry)) is not old()
            assert server.post("hello there").json()["text"] == "HELLO THERE", "while the old one is still at work"
            go.set()
            assert {each.result().json()["text"] for each in inside} == {"birds"}
            session.send((bundles.say("hello") * 32767).astype("<i2").tobytes())
            session.send('{"type": "stop"}')
            messages = [json.loads(each) for each in session]
            assert [each["type"] for each in messages][-2:] == ["final", "done"] and messages[-2]["text"] == "hello"
        over.set()
        assert all(each.result() is None for each in asking)
        assert set(texts) == {"good people", "GOOD PEOPLE"}, "no request failed"
        serving.until(lambda: gc.collect() + 1 and old() is None)  # with its engines


def nothing(folder):
    shutil.rmtree(folder)


def flipped(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("spoil, code", [
    (nothing, "no-such-path"),
    (lambda folder: (folder / "model.onnx").unlink(), "damaged-bundle"),
    (lambda folder: (folder / "model.onnx").write_bytes(flipped((folder / "model.onnx").read_bytes())),
     "damaged-bundle"),
    (lambda folder: (folder / layout.CONFIG).write_text("{"), "damaged-bundle"),
    (lambda folder: bundles.change(folder, vocabulary=7), "damaged-bundle"),
    pytest.param(lambda folder: (nothing(folder), graph_bundles.make(folder)), "wrong-bundle-kind",
                 marks=pytest.mark.slow),
])
@pytest.mark.slow
def test_a_spoiled_bundle_is_refused_and_the_old_one_serves_on(tmp_path, caplog, spoil, code):
    folder = make(tmp_path / "level")
    with serving.serving(folder) as server:
        new = loud(tmp_path / "new")
        assert publish.exchange(new, folder)
        spoil(folder)
        for _ in range(4):
            server.state.registry.refresh()
        assert server.post("good").json()["text"] == "good"
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200 and health.json()["models"]["level"]["refused_bundle"] is True
        assert server.counted("sbkit_bundle_refused") == 1
        [line] = [each.getMessage() for each in caplog.records if each.name == "sbkit.serve.registry"]
        assert f"[{code}]" in line and "the previous one stays in use" in line and "Traceback" not in line
        folder.mkdir(exist_ok=True)
        for refused in (False, True):  # the old one back, and the spoiled one once more
            publish.exchange(new, folder)
            server.state.registry.refresh()
            server.state.registry.refresh()
            health = httpx.get(f"{server.url}/health").json()["models"]["level"]
            assert health["refused_bundle"] is refused and server.post("good").json()["text"] == "good"


def pipe(folder):
    (folder / "model.onnx").unlink()
    os.mkfifo(folder / "model.onnx")


def unlisted_pipe(folder):
    os.mkfifo(folder / "model.onnx.data")


def link_to_a_device(folder):
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").symlink_to("/dev/zero")


def sparse(folder):
    os.truncate(folder / "model.onnx", 1 << 40)


def listed_sparse(folder):
    """Terabytes of zeros, as its list says."""
    sparse(folder)
    files = layout.read(folder).files
    bundles.change(folder, files=files | {"model.onnx": {"bytes": 1 << 40, "sha256": "0" * 64}})


@pytest.mark.slow
@pytest.mark.parametrize("spoil, code", [
    (pipe, "damaged-bundle"), (unlisted_pipe, "damaged-bundle"), (link_to_a_device, "damaged-bundle"),
    (sparse, "bundle-too-large"), (listed_sparse, "bundle-too-large"),
])
def test_a_file_without_an_end_is_refused_at_once_and_a_good_bundle_is_taken_after_it(tmp_path, caplog, spoil, code):
    folder = make(tmp_path / "level")
    spoiled = make(tmp_path / "spoiled")
    spoil(spoiled)
    good = loud(tmp_path / "good")
    with serving.serving(folder) as server:

        def refresh():
            loading = threading.Thread(target=lambda: [server.state.registry.refresh() for _ in range(2)], daemon=True)
            loading.start()
            loading.join(30)
            return not loading.is_alive()

        assert publish.exchange(spoiled, folder)
        assert refresh(), "the loader waits for the file"
        assert server.post("good").json()["text"] == "good"
        [line] = [record.getMessage() for record in caplog.records if record.name == "sbkit.serve.registry"]
        assert line.endswith(f"[{code}]") and "the previous one stays in use" in line
        assert publish.exchange(good, folder) and refresh()
        assert server.post("good").json()["text"] == "GOOD"


def test_what_is_refused_is_tried_again_when_there_may_be_memory(tmp_path, monkeypatch):
    folder, new = make(tmp_path / "level"), loud(tmp_path / "new")
    with serving.serving(folder) as server:
        monkeypatch.setattr(registry, "RETRY_SECONDS", 0.0)
        assert publish.exchange(new, folder)
        with mock.patch.object(layout, "read", side_effect=MemoryError("no room for two")):
            server.state.registry.refresh()
            server.state.registry.refresh()
        assert server.post("good").json()["text"] == "good"
        server.state.registry.refresh()
        assert server.post("good").json()["text"] == "GOOD"


def test_what_is_no_bundle_is_not_put_away_as_one(tmp_path, capsys):
    make(tmp_path / "b.previous")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    assert main(["rollback", str(tmp_path / "b")]) == 2 and (tmp_path / "b" / "thesis.txt").exists()
    (tmp_path / "b" / "thesis.txt").unlink()
    (tmp_path / "b").rmdir()
    assert main(["rollback", str(tmp_path / "b")]) == 0
    assert "brings it back" not in capsys.readouterr().out and not (tmp_path / "b.previous").exists()


def test_rollback_without_a_bundle_before_is_told(tmp_path, capsys):
    assert main(["rollback", str(make(tmp_path / "level"))]) == 2
    assert "there is no" in (told := capsys.readouterr().err) and "level.previous" in told and "improve" in told


@pytest.mark.slow
def test_a_running_server_swaps_and_goes_back_by_one_command_without_losing_a_request(tmp_path):
    folder, answers, over = make(tmp_path / "level"), [], threading.Event()
    process, url, lines = serving.started(sys.executable, "-m", "sbkit", "serve", folder, "--port", 0, "--threads", 1)
    reading = threading.Thread(target=lambda: lines.extend(process.stderr))

    def ask():
        with httpx.Client(timeout=60) as client:
            while not over.wait(0.1):
                answer = client.post(f"{url}/v1/audio/transcriptions", data={"model": "level"},
                                     files={"file": ("a.wav", serving.wav("good"))})
                answers.append((answer.status_code, answer.json().get("text")))

    def settled(text):
        """All have it: an answer from before a swap may come late."""
        return len(answers) > 8 and {each for _, each in answers[-8:]} == {text}

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for each in (reading, *asking):
        each.start()
    try:
        before = publish.previous(folder)
        publish.publish(loud(tmp_path / "new"), folder, layout.FOLDER, force=True, keep=before)
        for text in ("GOOD", "good"):
            serving.until(lambda text=text: settled(text))
            assert main(["rollback", str(folder)]) == 0
        serving.until(lambda: settled("GOOD"))
        (before / "model.onnx").write_bytes(b"x")
        assert main(["rollback", str(folder)]) == 0
        serving.until(lambda: any("the previous one stays in use" in each for each in lines))
    finally:
        over.set()
        for each in asking:
            each.join()
        process.terminate()
        process.wait(30)
        reading.join()
    assert process.returncode == 0 and answers[-1] == (200, "GOOD")
    assert set(answers) == {(200, "good"), (200, "GOOD")} and len(answers) > 20, "no request failed"
