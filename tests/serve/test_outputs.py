"""A server of models that output tensors: ``/v1/audio/outputs``."""

import functools
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import bundles
import graph_bundles
import httpx
import numpy as np
import pytest
import serving
import soundfile

from sbkit.serve.limits import Limits
from sbkit.serve.served_kinds import ServedGraph


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("b")
    with serving.serving({"loudness": graph_bundles.make(home / "loudness"),
                          "quieter": graph_bundles.make(home / "quieter", sound=True),
                          "level": bundles.make(home / "level")}, limits=Limits(decoders=1)) as server:
        yield server


def wav(level=0.5, samples=800):
    file = io.BytesIO()
    soundfile.write(file, np.full(samples, level, np.float32), graph_bundles.RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def ask(server, path="outputs", data=None, **fields):
    return httpx.post(f"{server.base}/audio/{path}", data=fields, files={"file": ("a.wav", wav() if data is None
                                                                                  else data)})


@pytest.mark.slow
def test_outputs_are_json_with_their_label(served):
    answer = ask(served, model="loudness")
    assert answer.status_code == 200 and answer.json()["label"] == "loud" and answer.json()["model"] == "loudness"
    assert answer.json()["level"] == pytest.approx([-0.4, 0.4])


def test_sound_comes_as_sound(served):
    answer = ask(served, model="quieter", response_format="wav")
    assert answer.headers["content-type"] == "audio/wav"
    found, rate = soundfile.read(io.BytesIO(answer.content))
    assert rate == graph_bundles.RATE and found == pytest.approx(np.full(800, 0.25), abs=1e-4)


def test_what_waits_for_the_model_takes_no_room_on_the_disk(served):
    waiting, go = threading.Event(), threading.Event()

    def held(real, *batch):
        waiting.set()
        go.wait(30)
        return real(*batch)

    engine = served.state.registry.find("loudness", ServedGraph).engine
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "compute", functools.partial(held, engine.compute))
        asked = pool.submit(ask, served, model="loudness")
        try:
            assert waiting.wait(30) and served.state.disk.reserved == 0
        finally:
            go.set()
        assert asked.result().status_code == 200


def test_it_is_listed_with_its_endpoint(served):
    listed = {each["id"]: each["endpoints"] for each in httpx.get(f"{served.base}/models").json()["data"]}
    assert listed["loudness"] == ["/v1/audio/outputs"]


@pytest.mark.parametrize("path, fields, code", [
    ("outputs", {"model": "level"}, "model_not_supported"),
    ("transcriptions", {"model": "loudness"}, "model_not_supported"),
    ("outputs", {"model": "gone"}, "model_not_found"), ("outputs", {}, "missing_required_parameter"),
    ("outputs", {"model": "loudness", "language": "en"}, "unsupported_parameter"),
    ("outputs", {"model": "loudness", "response_format": "mp3"}, "unsupported_value"),
    ("outputs", {"model": "loudness", "response_format": "wav"}, "unsupported_value"),
])
def test_what_it_is_not_asked_for_is_refused(served, path, fields, code):
    answer = ask(served, path, **fields)
    assert answer.status_code in (400, 404) and answer.json()["error"]["code"] == code


def test_what_is_no_audio_is_refused(served):
    answer = ask(served, data=b"no audio", model="loudness")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_audio"


def test_a_recording_longer_than_a_model_takes_at_once_is_refused(served, monkeypatch):
    monkeypatch.setattr("sbkit.serve.app.MAX_SECONDS", 0.05)
    answer = ask(served, model="loudness")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "audio_too_long"
