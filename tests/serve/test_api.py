"""OpenAI's own client, unchanged, against a real server; and what it would never ask."""

import io
import json
import zlib
from concurrent.futures import ThreadPoolExecutor

import bundles
import httpx
import numpy as np
import openai
import pytest
import serving
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sbkit.decode.spans import Word
from sbkit.infer.kinds import load
from sbkit.infer.pipeline import Options
from sbkit.infer.transcript import Transcript
from sbkit.serve import served
from sbkit.serve.replies import verbose

TEXT = "hello there good people"


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def long():
    """More than a chunk, with pauses."""
    rng = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    text = " ".join("".join(rng.choice(letters, 5)) for _ in range(60))
    signal = np.concatenate([np.concatenate([bundles.say(word), np.zeros(8000, np.float32)]) for word in text.split()])
    file = io.BytesIO()
    soundfile.write(file, signal, bundles.RATE, format="FLAC", subtype="PCM_16")
    return text, file.getvalue()


def ask(client, data, name="a.wav", **options):
    return client.audio.transcriptions.create(file=(name, data), model="level", **options)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3"])
def test_json_is_the_default(client, kind):
    subtype = {"MP3": "MPEG_LAYER_III"}.get(kind, "PCM_16")
    found = ask(client, serving.wav(TEXT, format=kind, subtype=subtype), f"a.{kind.lower()}")
    assert found.usage.type == "duration" and found.usage.seconds == pytest.approx(2.88, abs=0.1)
    if kind != "MP3":  # which does not keep a level
        assert found.text == TEXT


def test_text_and_subtitles_are_strings(client):
    data = serving.wav(TEXT)
    assert ask(client, data, response_format="text") == f"{TEXT}\n"
    assert ask(client, data, response_format="srt") == f"1\n00:00:00,120 --> 00:00:02,840\n{TEXT}\n"
    assert ask(client, data, response_format="vtt").startswith("WEBVTT\n\n00:00:00.120 --> 00:00:02.840\n")


def test_with_vad_a_server_writes_words_only_where_somebody_speaks(bundle):
    """The model writes words for levels, which aren't speech."""
    with serving.serving(bundle, vad=True) as server:
        reply = server.post(TEXT, response_format="verbose_json").json()
    assert reply["text"] == "" and reply["duration"] == pytest.approx(2.88, abs=0.1)


@pytest.mark.parametrize("kind", ["json", "verbose_json", "text", "stream"])
def test_an_upload_that_was_cut_off_is_answered_with_a_warning(server, kind):
    data = serving.wav(TEXT)
    form = {"stream": "true"} if kind == "stream" else {"response_format": kind}
    found = [server.post(each, **form) for each in (data, data[: len(data) // 2])]
    told = [f"{answer.text} {answer.headers.get('x-warning')}" for answer in found]
    assert "cut off: " not in told[0] and "cut off: 1.4" in told[1]


def test_verbose_json_has_segments_or_words_or_both(client):
    data = serving.wav(TEXT)
    found = ask(client, data, response_format="verbose_json")
    assert (found.text, found.language, found.words) == (TEXT, "en", None)
    assert found.duration == pytest.approx(2.88)
    assert [each.text for each in found.segments] == [TEXT] and found.segments[0].avg_logprob <= 0
    found = ask(client, data, response_format="verbose_json", timestamp_granularities=["word"])
    assert found.segments is None and [each.word for each in found.words] == TEXT.split()
    assert all(0 <= each.start < each.end <= 2.88 for each in found.words)
    found = ask(client, data, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert found.segments and found.words


@given(st.lists(st.tuples(st.sampled_from(["a", "the", "yes"]), st.floats(0, 1)), min_size=1, max_size=8))
def test_figures_of_a_segment_are_computed_from_its_words(words):
    """Whisper's formulas; a silence that is written as words of low confidence is told from speech."""
    said = [Word(text, 0.1 * i, 0.1 * i + 0.1, confidence) for i, (text, confidence) in enumerate(words)]
    text = " ".join(word.text for word in said)
    [found] = verbose(Transcript("a", text, said, 1.0), ["segment"])["segments"]
    confidences = np.maximum([word.confidence for word in said], 1e-6)
    assert found["avg_logprob"] == pytest.approx(np.log(confidences).mean(), abs=1e-4)
    assert found["no_speech_prob"] == pytest.approx(1 - confidences.max(), abs=1e-4)
    assert found["compression_ratio"] == pytest.approx(len(text) / len(zlib.compress(text.encode())), abs=1e-4)
    assert set(found) == {"id", "start", "end", "text", "avg_logprob", "compression_ratio", "no_speech_prob"}


@pytest.mark.parametrize("search", [None, {"beam": 4, "hot_words": {"birds": 2.0}}], ids=["greedy", "beam"])
@pytest.mark.parametrize("make", [bundles.make, bundles.make_transducer])
def test_figures_follow_what_the_model_hears_of_whichever_kind_it_is(make, search, tmp_path):
    """None is a constant: words between two letters are less sure, noise less than both; silence has no sure one."""
    noise = np.random.default_rng(0).uniform(0, 0.6, 40 * bundles.FRAME).astype(np.float32)
    said = bundles.say("good people")
    signals = [said, said + 0.4 / bundles.LEVELS, noise, np.zeros(bundles.RATE, np.float32)]
    with load(make(tmp_path / "level"), device="cpu", threads=1, options=Options(search=search)) as model:
        *found, silent = [verbose(model.transcribe(each.astype(np.float32)), ["segment", "word"]) for each in signals]
    assert all(each["no_speech_prob"] > 0.9 for each in silent["segments"])
    figures = {name: [each["segments"][0][name] for each in found] for name in ("avg_logprob", "no_speech_prob")}
    least = [min(word["confidence"] for word in each["words"]) for each in found]
    assert least[0] > 0.99 > least[1] > 0 and least[2] < least[0]
    assert figures["avg_logprob"][0] > figures["avg_logprob"][1] and figures["avg_logprob"][0] > -0.01
    assert figures["no_speech_prob"][0] < 0.01 < figures["no_speech_prob"][1] < 1


def test_a_stream_has_deltas_and_all_of_the_text_exactly_once(client, long):
    text, data = long
    events = list(ask(client, data, "a.flac", stream=True))
    kinds = [each.type for each in events]
    assert kinds == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert len(events) > 3, "the text comes in pieces"
    assert "".join(each.delta for each in events[:-1]) == events[-1].text == text
    assert ask(client, data, "a.flac").text == text


def test_words_are_streamed_before_the_rest_was_heard(server, client, long):
    """The first comes while the model has not said a thing about the end of the recording."""
    text, data = long
    with server.held(after=1) as go:
        events = iter(ask(client, data, "a.flac", stream=True))
        first = next(events).delta
        assert not go.is_set() and text.startswith(first) and len(first) < len(text)
        go.set()
        assert list(events)[-1].text == text


def test_requests_that_come_at_once_share_batches_and_none_gets_anothers_answer(server, client):
    texts = [f"{a}{b} says {b}{a}" for a in "abcd" for b in "wxyz"]
    rows, batches = (server.counted(f"sbkit_batch_rows_{each}") for each in ("sum", "count"))
    with ThreadPoolExecutor(len(texts)) as pool:
        with server.held():
            found = [pool.submit(ask, client, serving.wav(text)) for text in texts]
            serving.until(lambda: server.counted("sbkit_signals_waiting") == len(texts) - 1)
        assert [each.result().text for each in found] == texts
    assert server.counted("sbkit_batch_rows_sum") - rows == len(texts)
    assert server.counted("sbkit_batch_rows_count") - batches <= 5, "the first alone, then as many as fit"


def test_a_stream_of_silence_is_done_with_no_text(client):
    [event] = list(ask(client, serving.silence(1), "a.flac", stream=True))
    assert (event.type, event.text) == ("transcript.text.done", "")


def test_the_stream_ends_as_openais_does(server):
    answer = server.post("a", stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\ndata: [DONE]\n\n") and answer.text.count("transcript.text.done") == 1


def test_models_are_listed_and_found_by_name(client):
    assert [each.id for each in client.models.list()] == ["level", "whisper-1"]
    found = client.models.retrieve("whisper-1")
    assert (found.id, found.object, found.owned_by) == ("whisper-1", "model", "sbkit")
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("../etc/passwd")
    assert error.value.code in ("model_not_found", "unknown_url")
    with pytest.raises(openai.NotFoundError) as error:
        client.audio.transcriptions.create(file=("a.wav", serving.wav("a")), model="/tmp")
    assert error.value.code == "model_not_found" and error.value.request_id.startswith("req_")


@pytest.mark.parametrize("field, value, code", [
    ("response_format", "diarized_json", "unsupported_value"),
    ("timestamp_granularities", ["phoneme"], "unsupported_value"),
    ("timestamp_granularities", ["word"], "invalid_value"),
    ("language", "fr", "unsupported_value"),
    ("temperature", 7, "invalid_value"),
    ("include", ["logprobs"], "unsupported_parameter"),
])
def test_what_cannot_be_met_is_refused_by_name(client, field, value, code):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, serving.wav("a"), **{field: value})
    assert (error.value.param, error.value.type, error.value.code) == (field, "invalid_request_error", code)


def test_what_changes_nothing_is_taken(client):
    assert ask(client, serving.wav("a b"), language="en-GB", prompt="letters", temperature=0).text == "a b"


@pytest.mark.parametrize("data, words", [
    (b"", "file is empty"), (b"no audio at all", "Format not recognised; send WAV"),
    (serving.wav("a")[:30], "the audio")])
def test_bad_audio_is_the_clients_mistake(client, data, words):
    with pytest.raises(openai.BadRequestError, match=words) as error:
        ask(client, data)
    assert (error.value.param, error.value.code) == ("file", "invalid_audio")


def field(name, value):
    return b'--x\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n--x--\r\n' % (name, value)


OF_X = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize("body, code", [
    ({"data": {"model": "level"}, "files": {"other": ("a", b"1")}}, "unsupported_parameter"),
    ({"data": {"model": "level"}, "files": {"model": ("a", b"1")}}, "duplicate_parameter"),
    ({"files": {"file": ("a.wav", b"1")}}, "missing_required_parameter"),
    ({"data": {"modle": "level"}, "files": {"file": ("a", b"1")}}, "unsupported_parameter"),
    ({"json": {"model": "level"}}, "invalid_body"),
    ({"data": {"model": "level"}, "files": [("file", ("a", b"1")), ("file", ("b", b"1"))]}, "invalid_body"),
    ({"content": b"--x\r\n\r\n", "headers": {"content-type": "multipart/form-data"}}, "invalid_body"),
    ({"content": b"junk", "headers": OF_X}, "invalid_body"),
    ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=x; charset=utf-7"}}, "not_utf8"),
    ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=" + "x" * 300}}, "invalid_body"),
    ({"content": field(b"model", b"\xff"), "headers": OF_X}, "not_utf8"),
    ({"content": field(b"\xff", b"x"), "headers": OF_X}, "not_utf8"),
    ({"content": field(b"x" * 4096, b"x"), "headers": OF_X}, "invalid_body"),
])
def test_forms_that_are_none(server, body, code):
    answer = httpx.post(f"{server.base}/audio/transcriptions", **body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == code


def test_a_path_that_is_no_text_is_a_400(server):
    answer = httpx.get(f"{server.url}/v1/models/%ff")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_utf8"
    assert httpx.get(f"{server.url}/v1/models/%C3%A9").status_code == 404


@pytest.mark.parametrize("method, path", [("GET", "/v1/audio/transcriptions"), ("GET", "/docs"), ("POST", "/v1/x"),
                                          ("GET", "/openapi.json"), ("GET", "/../etc/passwd")])
def test_other_paths_are_unknown_in_openais_shape(server, method, path):
    answer = httpx.request(method, server.url + path)
    assert answer.status_code in (404, 405)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_health_says_what_was_asked_for_and_what_runs(server):
    answer = httpx.get(f"{server.url}/health")
    found = answer.json()["models"]["level"]
    assert answer.status_code == 200 and answer.json()["status"] == "ok"
    assert (found["asked"], found["device"], found["provider"]) == ("cpu", "cpu", "CPUExecutionProvider")
    assert found["versions"]["onnxruntime"] and found["fault"] is None
    assert httpx.get(f"{server.url}/ready").json() == {"ready": True, "why": None}


def test_health_answers_at_once_while_the_model_is_busy(server):
    with server.held():
        with httpx.stream("POST", f"{server.base}/audio/transcriptions", data={"model": "level", "stream": "true"},
                          files={"file": ("a.wav", serving.wav("a"))}):
            serving.until(lambda: server.counted("sbkit_requests_inside") == 1)
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
            assert httpx.get(f"{server.url}/ready", timeout=5).status_code == 200


def test_before_the_models_are_there_nothing_is_ready_and_all_is_told(bundle):
    with serving.serving(bundle, loaded=False) as server:
        assert httpx.get(f"{server.url}/health").json()["status"] == "loading"
        assert httpx.get(f"{server.url}/ready").status_code == 503
        for answer in (httpx.get(f"{server.base}/models"), server.post("a"), server.speech(input="a")):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["code"] == "not_ready"


def failing(message):
    def act(real, *batch):
        raise RuntimeError(message)

    return act


def test_a_broken_device_is_unhealthy_and_says_so(bundle):
    with serving.serving(bundle) as server:
        with server.acting(failing("CUDA error: device-side assert triggered\nmore")):
            first = server.post("a")
        for answer in (first, server.post("a")):
            assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"
            assert answer.json()["error"]["code"] == "device_fault"
        answer = httpx.get(f"{server.url}/health")
        assert answer.status_code == 503 and "device-side assert" in answer.json()["faults"][0]
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert server.counted("sbkit_device_fault") == 1


def test_a_request_too_large_for_the_memory_fails_alone(bundle):
    with serving.serving(bundle) as server:
        with server.acting(failing("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")):
            answer = server.post("a")
        assert answer.status_code == 507 and answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert error["code"] == "out_of_memory" and "out of memory on cpu: CUDA out of memory" in error["message"]
        assert server.post("a").status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_model_that_hangs_is_unhealthy_until_it_goes_on(server, client, monkeypatch):
    monkeypatch.setattr(served, "STUCK_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as pool, server.held() as go:
        slow = pool.submit(ask, client, serving.wav("slow"))
        serving.until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert "a batch has been running for" in httpx.get(f"{server.url}/health").json()["faults"][0]
        go.set()
        assert slow.result().text == "slow"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_metrics_are_prometheus_text(server, client):
    ask(client, serving.wav("a"))
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    types = {each.name: each.type for each in text_string_to_metric_families(answer.text)}
    assert types["sbkit_requests"] == "counter" and types["sbkit_request_seconds"] == "histogram"
    assert "unknown" not in types.values() and 'sbkit_audio_seconds_total{model="level"}' in answer.text


def test_a_search_with_hot_words_is_what_transcribe_does(bundle, long):
    """In one piece and as a stream, many at once."""
    text, data = long
    with serving.serving(bundle, search={"hot_words": {"hello": 5.0}, "beam": 4}) as server:
        with server.openai() as client:
            with ThreadPoolExecutor(8) as pool:
                texts = [f"hello number {letter}" for letter in "abcdefgh"]
                assert [each.text for each in pool.map(lambda t: ask(client, serving.wav(t)), texts)] == texts
            events = list(ask(client, data, "a.flac", stream=True))
            assert "".join(each.delta for each in events[:-1]) == events[-1].text == text


def test_an_error_amid_a_stream_reaches_the_client(bundle):
    with serving.serving(bundle) as server:
        with server.openai() as client, server.acting(failing("out of luck")), \
                pytest.raises(openai.APIError, match="the server failed"):
            list(ask(client, serving.wav("a"), stream=True))
        assert json.loads(httpx.get(f"{server.url}/ready").text)["ready"]
