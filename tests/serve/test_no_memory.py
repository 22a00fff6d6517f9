"""Memory that runs out at any step of serving: an error for whoever asked, and the next answer is right."""

import contextlib
import itertools
import json

import bundles
import numpy as np
import pytest
import serving
import tried
import voices
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from sbkit.serve.limits import Limits

#: What makes arrays while a server works.
MAKERS = ("array", "asarray", "ascontiguousarray", "concatenate", "empty", "frombuffer", "fromfile", "full", "pad",
          "stack", "zeros", "zeros_like")

RECORDING, SAMPLES = serving.wav("good people"), (bundles.say("good people") * 32767).astype("<i2").tobytes()


class WithoutMemory:
    """The n-th array is one too many, and so is a batch, which is counted with them."""

    def __init__(self, monkeypatch, server, number):
        self.done, self.number = itertools.count(1), number
        for name in MAKERS:
            monkeypatch.setattr(np, name, self.counted(getattr(np, name)))
        for served in server.state.registry:
            for engine in served.engines:
                backend = self.counted(engine.backend)
                backend.running, backend.free = engine.backend.running, engine.backend.free
                monkeypatch.setattr(engine, "backend", backend)

    def counted(self, function):
        def call(*args, **options):
            if next(self.done) == self.number:
                raise MemoryError("there is none left")
            return function(*args, **options)
        return call


def transcribed(server):
    answer = server.post(RECORDING)
    return answer.status_code, answer.json().get("text") == "good people" or answer.json()["error"]


def streamed(server):
    answer = server.post(RECORDING, stream="true")
    last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.json()]
    return answer.status_code, last[-1].get("text") == "good people" or last[-1]["error"]


def spoken(server):
    answer = server.speech(input="ab c", response_format="wav")
    return answer.status_code, answer.content[:4] == b"RIFF" or answer.json()["error"]


def heard(server):
    with connect(server.live) as socket:
        with contextlib.suppress(ConnectionClosed):  # the server may have told its error before all was sent
            socket.send(json.dumps({"type": "start", "model": "level", "sample_rate": bundles.RATE}))
            socket.send(SAMPLES)
            socket.send(json.dumps({"type": "stop"}))
        messages = []
        with contextlib.suppress(ConnectionClosed):  # after an error of the server, not as usual
            messages.extend(json.loads(message) for message in socket)
    text = " ".join(each["text"] for each in messages if each["type"] == "final")
    return 200, messages[-1].get("error") or text == "good people"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    level, tts = bundles.make(folder / "level", streams=True), voices.make(folder / "tts")
    with serving.serving({"level": level, "tts": tts}, limits=Limits(decoders=1)) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("ask", [transcribed, spoken, heard, pytest.param(streamed, marks=pytest.mark.long)])
def test_without_memory_at_any_step_a_request_gets_an_error_and_the_next_one_is_right(server, monkeypatch, ask):
    assert ask(server) == (200, True)
    for number in itertools.count(1):
        with monkeypatch.context() as patch:
            memory = WithoutMemory(patch, server, number)
            _, told = ask(server)
            enough = next(memory.done) <= number
        if enough:
            break
        assert told is True or (told["type"] == "server_error" and told["message"]), number
        assert ask(server) == (200, True), f"after {number}: {told}"
        serving.until(lambda: server.counted("sbkit_requests_inside") == server.counted("sbkit_live_sessions") == 0)
        assert server.state.disk.reserved == 0 and not server.state.faults()
    tried.record("allocations that fail while a server answers", number - 1)
