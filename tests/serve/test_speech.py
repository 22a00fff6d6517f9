"""OpenAI's own client has texts spoken by a real server: formats, streams, events; what is refused stays unspoken."""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import serving
import soundfile
import voices
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from websockets.sync.client import connect

from sbkit.infer.sound_file import KINDS
from sbkit.infer.voice_engine import VoiceEngine
from sbkit.serve import registry
from sbkit.serve.limits import Limits
from sbkit.serve.served import BundleOptions

TEXT = "Hello there. Good bye, all of you!"
SAID = TEXT.lower()
SECONDS = (len(TEXT) - 1) * voices.SYMBOL_SECONDS + 0.25
FORMATS = ["mp3", "opus", "flac", "wav", "pcm"]


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    return voices.make(tmp_path_factory.mktemp("speech") / "voice")


@pytest.fixture(scope="module")
def server(voice, bundle):
    with serving.serving({"tts": voice, "level": bundle}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as client:
        yield client


def speak(client, text=TEXT, **options):
    return client.audio.speech.create(**({"model": "tts", "input": text, "voice": "anna"} | options))


def samples(data, kind):
    if kind == "pcm":
        return np.frombuffer(data, "<i2") / 32768.0, 24_000
    return soundfile.read(io.BytesIO(data))


def heard(data, kind="wav", speed=1.0):
    found, rate = samples(data, kind)
    return voices.heard(found, speed, rate)


@pytest.mark.parametrize("kind, given", [("mp3", {}), *((kind, {"response_format": kind}) for kind in FORMATS)])
def test_each_format_says_the_text_and_mp3_is_the_default(client, kind, given):
    answer = speak(client, **given)
    assert answer.response.headers["content-type"] == KINDS[kind].media_type
    found, rate = samples(answer.content, kind)
    assert voices.heard(found, 1.0, rate) == SAID
    assert len(found) / rate == pytest.approx(SECONDS, abs=0.01 if kind != "mp3" else 0.2)
    assert rate == (24_000 if kind == "pcm" else voices.RATE)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_text_of_one_sentence_is_a_whole_file(client, kind):
    found, rate = samples(speak(client, "good bye", response_format=kind).content, kind)
    assert len(found) / rate == pytest.approx(8 * voices.SYMBOL_SECONDS, abs=0.001)


def test_a_speed_of_2_halves_the_length_and_1_5_is_no_1(client):
    texts = "a" * 30
    length = {speed: len(samples(speak(client, texts, response_format="wav", speed=speed).content, "wav")[0])
              for speed in (1, 1.5, 2, 4, 0.25)}
    assert [length[1] / length[speed] for speed in (2, 4, 0.25)] == [2, 4, 0.25]
    assert length[1] / length[1.5] == pytest.approx(4 / 3)  # the voice of tests has 4 frames, or 3, or 2


@pytest.mark.parametrize("name, gain", [("anna", 0.5), ("ben", 0.25), ({"id": "ben"}, 0.25)])
def test_a_voice_is_a_name_or_an_object(client, name, gain):
    found, _ = samples(speak(client, "aaa", voice=name, response_format="wav").content, "wav")
    assert np.abs(found).max() == pytest.approx(gain, abs=0.01)


def test_voices_and_models_are_listed_with_what_they_do(server, client):
    listed = {each.id: each for each in client.models.list()}
    assert listed["tts"].endpoints == ["/v1/audio/speech"]
    assert "/v1/audio/transcriptions" in listed["level"].endpoints
    assert client.models.retrieve("tts").id == "tts"
    found = httpx.get(f"{server.base}/audio/voices").json()
    assert [(each["id"], each["model"], each["default"]) for each in found["data"]] == [
        ("anna", "tts", True), ("ben", "tts", False)]
    health = httpx.get(f"{server.url}/health").json()["models"]["tts"]
    assert (health["device"], health["provider"], health["voices"]) == ("cpu", "CPUExecutionProvider", ["anna", "ben"])


def test_a_model_is_asked_only_for_what_it_does(server, client):
    with pytest.raises(openai.BadRequestError) as error:
        speak(client, model="level")
    assert error.value.code == "model_not_supported" and "/v1/audio/transcriptions" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        client.audio.transcriptions.create(model="tts", file=("a.wav", serving.wav("hello")))
    assert error.value.code == "model_not_supported" and "/v1/audio/speech" in error.value.message
    with pytest.raises(openai.NotFoundError) as error:
        speak(client, model="gpt-4o-mini-tts")
    assert error.value.code == "model_not_found" and "tts, level" in error.value.message
    with connect(server.live) as live:
        live.send(json.dumps({"type": "start", "model": "tts", "sample_rate": 16_000}))
        assert json.loads(live.recv())["error"]["code"] == "model_not_supported"
    said = client.audio.transcriptions.create(model="level", file=("a.wav", serving.wav("hello"))).text
    assert said == "hello", "both at once"


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("kind", ["mp3", "opus", "wav", "pcm"])
def test_a_sentence_is_sent_before_the_next_one_is_computed(server, client, kind):
    text = "Hello there. " * 3
    with server.held(after=1) as go, client.audio.speech.with_streaming_response.create(
            model="tts", voice="anna", input=text, response_format=kind) as answer:
        parts = answer.iter_bytes(64)
        first = next(parts)
        assert not go.is_set()
        go.set()
        data = first + b"".join(parts)
    assert heard(data, kind) == text.lower().strip()


def test_events_carry_the_sound_and_end_with_what_it_took(client):
    answer = speak(client, response_format="wav", stream_format="sse")
    assert answer.response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert [each["type"] for each in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    assert heard(b"".join(base64.b64decode(each["audio"]) for each in events[:-1])) == SAID
    symbols, frames = len(TEXT) - 1, voices.FRAMES * (len(TEXT) - 1)
    assert events[-1]["usage"] == {"input_tokens": symbols, "output_tokens": frames, "total_tokens": symbols + frames}


def test_texts_and_live_sessions_wait_for_no_threads_of_each_other(server, client):
    go = threading.Event()

    async def hold():  # the threads that decode what live sessions hear
        await asyncio.gather(*(asyncio.to_thread(go.wait, 60) for _ in range(64)))

    held = asyncio.run_coroutine_threadsafe(hold(), server.state.loop)
    try:
        heard(speak(client, response_format="wav", timeout=10).content)
    finally:
        go.set()
        held.result(30)


def test_texts_at_once_share_batches_and_each_gets_its_own(server, client):
    texts = [f"{letter} {letter * 7}" for letter in "abcdefghijkl"]
    with ThreadPoolExecutor(len(texts)) as pool:
        said = pool.map(lambda text: heard(speak(client, text, response_format="wav").content), texts)
        assert list(said) == texts
    assert server.counted("sbkit_batch_rows_sum") >= len(texts)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("given, param, code", [
    ({"input": ""}, "input", "empty_input"), ({"input": " \n"}, "input", "empty_input"),
    ({"input": "a" * 4097}, "input", "string_above_max_length"),
    ({"input": "fine. naïve"}, "input", "unknown_characters"),
    ({"voice": "alloy"}, "voice", "voice_not_found"), ({"voice": 3}, "voice", "invalid_type"),
    ({"speed": 9}, "speed", "invalid_value"), ({"speed": 0.1}, "speed", "invalid_value"),
    ({"speed": "1"}, "speed", "invalid_value"), ({"speed": True}, "speed", "invalid_value"),
    ({"response_format": "aac"}, "response_format", "unsupported_value"),
    ({"stream_format": "ws"}, "stream_format", "unsupported_value"),
    ({"instructions": "Whisper."}, "instructions", "unsupported_parameter"),
    ({"extra_body": {"temperature": 1}}, "temperature", "unsupported_parameter"),
    ({"extra_body": {"skip_unknown": 1}}, "skip_unknown", "invalid_type"),
])
def test_what_is_wrong_is_told_in_openai_s_form(client, given, param, code):
    with pytest.raises(openai.BadRequestError) as caught:
        speak(client, **given)
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")


@pytest.mark.slow
def test_4096_characters_are_spoken(client):
    text = ("abcdefg " * 512).strip() + "."
    assert len(text) == 4096
    answer = speak(client, text, speed=4.0, response_format="wav")
    assert heard(answer.content, speed=4.0) == text


@pytest.mark.parametrize("text, said, given", [
    ("na\u0131ve", "nave", {"extra_body": {"skip_unknown": True}}), ("good", "good", {"instructions": ""})])
def test_unknown_characters_can_be_left_out_and_no_instructions_are_none(client, text, said, given):
    assert heard(speak(client, text, response_format="wav", **given).content) == said


BODIES = [b"", b"[]", b"null", b'"x"', b"{", b"\xff\xfe", b"[" * 60_000,
          b'{"model": "tts", "speed": 1' + b"0" * 9000 + b"}",
          b'{"model": "tts", "input": "a", "input": "b"}', b'{"model": "tts", "input": "a", "speed": NaN}',
          b'{"model": "tts", "input": "a", "speed": 1e999}', b'{"model": "tts", "input": "\\ud800"}',
          b'{"\\ud800": 1}', b'{"model": "\\ud800", "input": "a"}', b'{"input": "a"}', b'{"model": "tts"}',
          b'{"model": ["tts"], "input": "a"}', b'{"model": "tts", "input": {"text": "a"}}',
          b'{"model": "tts", "input": "a", "voice": {"id": "anna", "x": 1}}', b'{"model": "tts", "input": "\\u0000"}']


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:40].decode("latin-1"))
def test_a_body_that_no_client_sends_is_a_400(server, body):
    answer = httpx.post(f"{server.base}/audio/speech", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_other_bodies_are_refused_by_their_kind_and_size(server):
    url, good = f"{server.base}/audio/speech", {"model": "tts", "input": "a"}
    assert httpx.post(url, data=good).status_code == 400
    assert httpx.post(url, content=json.dumps(good), headers={"content-type": "text/plain"}).status_code == 400
    zipped = {"content-type": "application/json", "content-encoding": "gzip"}
    assert httpx.post(url, content=b"\x1f\x8b", headers=zipped).status_code == 400
    assert httpx.post(url, json={**good, "input": "a" * (1 << 19)}).status_code == 413
    assert httpx.get(url).status_code == 405
    assert httpx.post(url, json=good).status_code == 200


WRONG = st.one_of(
    st.fixed_dictionaries({"input": st.one_of(
        st.none(), st.integers(), st.text(st.sampled_from(" \n\t")), st.text(min_size=4097, max_size=4200),
        st.text(st.characters(exclude_characters=[*"".join(voices.SYMBOLS[1:]), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"],
                              exclude_categories=["Cs"]), min_size=1).map(lambda text: f"a {text}\u0416. b"))}),
    st.fixed_dictionaries({"voice": st.one_of(st.integers(), st.lists(st.text()), st.text().filter(
        lambda name: name not in voices.SPEAKERS))}),
    st.fixed_dictionaries({"speed": st.one_of(
        st.text(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not 0.25 <= x <= 4),
        st.integers().filter(lambda x: not 1 <= x <= 4))}),
    st.fixed_dictionaries({"response_format": st.one_of(st.text(min_size=1).filter(lambda x: x not in FORMATS),
                                                        st.integers())}),
    st.fixed_dictionaries({"stream_format": st.text(min_size=1).filter(lambda x: x not in ("audio", "sse"))}),
    st.fixed_dictionaries({"model": st.one_of(st.none(), st.integers(), st.text().filter(lambda x: x != "tts"))}),
    st.dictionaries(st.text().filter(lambda x: x not in ("input", "model", "voice", "speed", "response_format",
                                                         "stream_format", "instructions", "skip_unknown")),
                    st.none(), min_size=1),
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WRONG, st.sampled_from([{}, {"stream_format": "sse"}, {"response_format": "wav"}, {"skip_unknown": False}]))
def test_a_bad_request_never_gets_a_200_and_nothing_is_computed(server, bad, also):
    before = server.counted("sbkit_batch_rows_sum")
    body = {"model": "tts", "input": "good", "voice": "anna"} | also | bad
    answer = httpx.post(f"{server.base}/audio/speech", content=json.dumps(body).encode(),
                        headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404), (body, answer.text[:200])
    assert answer.json()["error"]["message"]
    assert server.counted("sbkit_batch_rows_sum") == before


# ---------------------------------------------------------------- limits and failures


def test_a_client_that_leaves_in_the_middle_frees_its_place_and_nothing_more_is_computed(voice):
    with serving.serving({"tts": voice}, limits=Limits(decoders=1)) as server:
        body, runs = {"model": "tts", "input": "good bye. " * 300, "response_format": "pcm"}, []

        def steady(real, *batch):
            runs.append(1)
            time.sleep(0.05)
            return real(*batch)

        with server.acting(steady):
            with httpx.stream("POST", f"{server.base}/audio/speech", json=body) as answer:
                assert answer.status_code == 200
            serving.until(lambda: server.counted("sbkit_requests_inside") == 0)
            assert server.counted("sbkit_cancelled_total") == 1
            before = len(runs)
            time.sleep(0.3)
            assert len(runs) <= before + 1 < 300
        assert server.speech(input="good").status_code == 200


def test_a_full_queue_is_a_429_and_a_deadline_a_504_before_anything_is_sent(voice):
    limits = Limits(decoders=1, max_requests=1, request_seconds=1.0)
    with serving.serving({"tts": voice}, limits=limits) as server, server.openai() as client:
        with server.held():
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(speak, client)
                serving.until(lambda: server.counted("sbkit_requests_inside") == 1)
                with pytest.raises(openai.RateLimitError, match="already has 1 requests running or waiting"):
                    speak(client)
            error = waiting.exception()
        assert error.status_code == 504 and error.code == "deadline_exceeded"
        assert heard(speak(client, response_format="wav").content) == SAID, "and the next one is right"


def test_a_text_that_can_not_be_spoken_in_time_is_refused_at_once(voice, monkeypatch):
    real = VoiceEngine.submit

    def slow(engine, lines):
        time.sleep(sum(map(len, lines)) / 200)
        return real(engine, lines)

    monkeypatch.setattr(VoiceEngine, "submit", slow)
    with serving.serving({"tts": voice}, limits=Limits(decoders=1, request_seconds=6)) as server, \
            server.openai() as client:
        began = time.monotonic()
        with pytest.raises(openai.APIStatusError) as caught:
            speak(client, "hello there. " * 200)
        assert caught.value.code == "deadline_exceeded" and time.monotonic() - began < 3
        assert heard(speak(client, response_format="wav").content) == SAID


@pytest.mark.parametrize("why", ["deadline", "failure"])
@pytest.mark.parametrize("streamed", ["audio", "sse"])
@pytest.mark.slow
def test_what_fails_in_the_middle_is_cut_off_or_an_event_and_never_ends_well(voice, why, streamed):
    with serving.serving({"tts": voice}, limits=Limits(decoders=1, request_seconds=1.0)) as server:
        runs = itertools.count()

        def fails(real, *batch):
            if next(runs):
                raise RuntimeError("no")
            return real(*batch)

        body = {"model": "tts", "input": "good. bye. now.", "response_format": "wav", "stream_format": streamed}
        with server.held(after=1) if why == "deadline" else server.acting(fails), \
                httpx.stream("POST", f"{server.base}/audio/speech", json=body) as answer:
            assert answer.status_code == 200
            if streamed == "audio":
                with pytest.raises(httpx.RemoteProtocolError):
                    answer.read()
            else:
                lines = answer.read().decode().split("\n\n")[:-1]
                events = [json.loads(each.removeprefix("data: ")) for each in lines]
                code = {"deadline": "deadline_exceeded", "failure": "internal_error"}[why]
                assert events[-1]["error"]["code"] == code
                assert "speech.audio.done" not in [each.get("type") for each in events]
        serving.until(lambda: server.counted("sbkit_requests_inside") == 0)
        assert server.counted("sbkit_cut_total") == 1


def test_options_that_no_voice_has_are_refused_where_nothing_hears(voice):
    with refused("wrong-bundle-kind"):
        registry.load({"tts": voice}, BundleOptions(device="cpu", chunk_seconds=3.0))


def test_a_broken_device_is_a_503_before_anything_is_sent_and_for_all_after(voice):
    with serving.serving({"tts": voice}) as server:
        def broken(real, *batch):
            raise RuntimeError("CUDA error: device-side assert triggered")

        with server.acting(broken):
            for _ in range(2):
                answer = server.speech(input="good. bye")
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "device_fault"
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_a_text_that_is_being_spoken_is_finished_when_the_server_stops(voice):
    with contextlib.ExitStack() as stay:
        server = stay.enter_context(serving.serving({"tts": voice}))
        go = stay.enter_context(server.held(after=1))
        body = {"model": "tts", "input": "good. bye. now.", "response_format": "pcm"}
        with httpx.stream("POST", f"{server.base}/audio/speech", json=body) as answer:
            parts = answer.iter_bytes(64)
            first = next(parts)
            server.state.stop()
            stopping = threading.Thread(target=stay.pop_all().close)
            stopping.start()
            go.set()
            assert heard(first + b"".join(parts), "pcm") == body["input"]
        stopping.join()


def test_what_was_spoken_is_counted(voice):
    with serving.serving({"tts": voice}) as server:
        server.speech(input="good")
        server.speech(input="")
        assert server.counted("sbkit_spoken_seconds_total") == pytest.approx(4 * voices.SYMBOL_SECONDS)
        assert server.counted("sbkit_first_audio_seconds_count") == 1
        text = server.state.metrics.text()
        assert 'sbkit_requests_total{path="/v1/audio/speech",status="200"} 1' in text
        assert 'sbkit_refused_total{reason="empty_input"} 1' in text


def test_a_rate_that_a_format_lacks_is_changed(tmp_path):
    with serving.serving({"tts": voices.make(tmp_path / "v", rate=22_050)}) as server:
        for kind in FORMATS:
            found, rate = samples(server.speech(input="good bye", response_format=kind).content, kind)
            assert rate == (24_000 if kind in ("pcm", "opus") else 22_050)
            assert len(found) / rate == pytest.approx(8 * voices.FRAMES * voices.FRAME / 22_050, abs=0.001)
