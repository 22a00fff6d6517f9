"""A row's URL is asked for only where that was allowed, no further than it says, and neither for long nor for much."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time

import fsspec
import numpy as np
import pytest
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data import measure
from sbkit.data.audio import AudioError, audio_info, read_audio
from sbkit.data.corpus import Corpus
from sbkit.data.reader import Reader, ReadRequest
from sbkit.data.remote import Remote
from sbkit.data.shards import write_shards
from sbkit.score.report.cards import AudioEmbedder
from sbkit.score.utterances import ScoredUtterance

WAV = encoded(speechlike(0.5), 16000)
MEMORY = Remote(("memory",))


class Server(http.server.ThreadingHTTPServer):
    """Notes what it is asked for; some paths are answered badly."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked, self.headers, self.sent = [], [], 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.server.headers.append(dict(self.headers))
        name = self.path.strip("/").partition("?")[0]
        elsewhere = f"http://localhost:{self.server.server_port}/elsewhere"
        answers = {"moved": (302, b"", {"Location": elsewhere}), "file": (302, b"", {"Location": "file:///etc/passwd"}),
                   "gone": (404, b"", {}), "cut": (200, WAV[:100], {"Content-Length": str(len(WAV))})}
        if name in ("part", "endless", "trickle"):
            getattr(self, f"give_{name}")()
        else:
            self.give(*answers.get(name, (200, WAV, {})))

    def give(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def give_part(self):
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.give(206, (bytes(100) + WAV)[first : last + 1], {})

    def give_endless(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.server.sent += self.wfile.write(bytes(1 << 16))

    def give_trickle(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(600):
                self.wfile.write(b"R")
                time.sleep(0.1)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def corpus(folder, rows: dict[str, list[str]], **options) -> Corpus:
    for split, wavs in rows.items():
        lines = [f"{split}{i},{wav},{split} says {i}" for i, wav in enumerate(wavs)]
        (folder / f"{split}.csv").write_text("\n".join(["ID,wav,wrd", *lines]) + "\n")
    return Corpus(folder, "en", folder / "manifests", only=tuple(rows), **options)


@pytest.fixture
def local(tmp_path):
    (tmp_path / "here.wav").write_bytes(WAV)
    return tmp_path / "here.wav"


# ---------------------------------------------------------------- what is opened


def test_a_local_corpus_asks_nobody(tmp_path, local, server, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    wavs = [str(local), f"{server.url}/a", f"reference://x::{server.url}/ref.json", f"simplecache::{server.url}/b",
            f"{server.url}/t.tar?offset=0&size=10", "reference://x", "ftp://127.0.0.1/a", "file:///etc/passwd"]
    made = corpus(tmp_path, {"train": wavs})
    manifest = made.prepare(show_progress=False)["train"]
    entry = made.report["splits"]["train"]
    assert list(manifest.wavs) == [str(local)] and server.asked == []
    assert (entry["rows"], entry["kept"], entry["left_out"]["refused URL"]["count"]) == (8, 1, 7)
    message = "\n".join(entry["left_out"]["refused URL"]["examples"])
    assert "corpus.schemes: [http]" in message and "within a URL (::) is never opened" in message
    assert "begin with file:// are never opened" in message and "begin with reference:// are never opened" in message
    assert (tmp_path / "manifests" / "left_out.csv").read_text().count("refused URL") == 7


def test_a_recipe_allows_a_kind_of_url_and_no_other(tmp_path, server):
    wavs = [f"{server.url}/a", f"reference://x::{server.url}/ref.json", f"{server.url}/moved", "https://127.0.0.1:1/a"]
    made = corpus(tmp_path, {"train": wavs}, schemes=["http"])
    manifest = made.prepare(show_progress=False)["train"]
    left_out = made.report["splits"]["train"]["left_out"]
    assert list(manifest.wavs) == wavs[:1] and server.asked == ["/a", "/moved"]
    assert left_out["refused URL"]["count"] == 2 and left_out["undecodable"]["count"] == 1
    reader = Reader(manifest, None)
    batch = reader.read(ReadRequest(1, 0, 0, 1, np.array([0])))
    assert batch.signal_lengths.tolist() == [8000] and not batch.damaged
    assert all(set(sent) <= {"Host", "Range", "Accept-Encoding"} for sent in server.headers)
    packed = write_shards(manifest, tmp_path / "shards", show_progress=False, workers=1)
    assert len(read_audio(packed.wavs[0])) == 8000


def test_a_corpus_in_a_store_may_name_that_store_alone(tmp_path, server):
    with fsspec.open("memory://bucket/fr/a.wav", "wb") as file:
        file.write(WAV)
    wavs = ["$data_root/a.wav", "memory://bucket/fr/a.wav", f"{server.url}/a", "s3://bucket/a.wav"]
    made = corpus(tmp_path, {"train": wavs}, data_root="memory://bucket/fr")
    assert len(made.prepare(show_progress=False)["train"]) == 2
    assert made.report["splits"]["train"]["left_out"]["refused URL"]["count"] == 2 and server.asked == []
    assert corpus(tmp_path, {"train": wavs}, data_root="memory://b", schemes=["s3"]).remote.schemes == ("s3",)
    assert Corpus("hf://owner/name").remote.schemes == Corpus("no-such-owner/name").remote.schemes == ("hf",)


def test_manifests_of_before_say_how_their_urls_are_allowed(tmp_path, local, server):
    rows = {"train": [str(local)], "test": [f"{server.url}/a"]}
    made = corpus(tmp_path, rows, schemes=["http"])
    made.prepare(show_progress=False)
    made.schemes = None  # what a recipe says that is older than the option
    for read in (made.load, lambda: made.manifest("test")):
        with refused("url-not-allowed", value=f"{server.url}/a"):
            read()
    report = json.loads(made.report_path.read_text())
    report["fingerprint"] = made._fingerprint(made._open(False))
    made.report_path.write_text(json.dumps(report))
    server.asked.clear()
    with refused("all-rows-left-out"):
        made.prepare(show_progress=False)
    assert server.asked == []


def test_a_report_opens_no_urls_unless_allowed(server):
    one = ScoredUtterance("a", "a", "b", None, 0.5, f"{server.url}/a")
    uri, why = AudioEmbedder(1, lambda wav: None).get(one)
    assert uri is None and "--schemes http" in why and server.asked == []
    assert AudioEmbedder(1, lambda wav: None, Remote(("http",))).get(one)[0].startswith("data:audio/mpeg")


@pytest.mark.slow
def test_processes_that_measure_know_what_is_allowed(server, monkeypatch):
    monkeypatch.setattr(measure, "WORTH_PROCESSES", 1)
    seconds, causes = measure.measure([f"{server.url}/a"] * 2, workers=2, remote=Remote(("http",)), show_progress=False)
    assert seconds.tolist() == [0.5, 0.5] and causes == {}
    _, causes = measure.measure([f"{server.url}/a"] * 2, workers=2, show_progress=False)
    assert causes[0].code == "url-not-allowed" and server.asked == ["/a", "/a"]


def test_a_scheme_that_is_never_opened_can_not_be_allowed():
    for scheme in ("reference", "file", "simplecache", "S3"):
        with refused("bad-value"):
            Corpus("x", schemes=[scheme])
        assert Remote((scheme,)).refusal(f"{scheme.lower()}://x")


# ---------------------------------------------------------------- how much, and for how long


def test_members_of_a_store_and_of_a_server_are_read_by_range(server):
    with fsspec.open("memory://bucket/shard.tar", "wb") as file:
        file.write(bytes(100) + WAV + bytes(1024))
    for tar, allowed in (("memory://bucket/shard.tar", MEMORY), (f"{server.url}/part", Remote(("http",)))):
        assert np.array_equal(read_audio(f"{tar}?offset=100&size={len(WAV)}", remote=allowed), read_audio(WAV))
    with refused("missing-audio", kind=AudioError):
        read_audio("memory://bucket/gone.tar?offset=0&size=4", remote=MEMORY)
    with refused("failed-download", kind=AudioError):
        read_audio("memory://bucket/shard.tar?offset=0&size=1001", remote=Remote(("memory",), megabytes=0.001))


@pytest.mark.parametrize("path, code", [
    ("moved", "failed-download"), ("file", "failed-download"), ("gone", "missing-audio"), ("cut", "failed-download"),
    ("a?offset=5&size=9", "failed-download"), ("endless", "failed-download")])
def test_an_answer_that_is_no_recording_is_reported(server, path, code):
    with refused(code, kind=AudioError):
        audio_info(f"{server.url}/{path}", Remote(("http",), megabytes=0.1))
    assert len(server.asked) == 1 and server.sent < 30e6, "what is sent beyond the limit lies in the system's buffers"


def test_a_server_that_trickles_is_left(server):
    started = time.monotonic()
    with refused("failed-download", kind=AudioError):
        audio_info(f"{server.url}/trickle", Remote(("http",), seconds=0.5))
    assert time.monotonic() - started < 30, "sixty seconds are what it would take"


@pytest.mark.parametrize("error", [fsspec.exceptions.FSTimeoutError, ImportError("Install s3fs to access S3")])
def test_what_the_client_of_a_store_raises_is_reported_in_plain_words(monkeypatch, error):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "cat_file", fails)
    with refused("failed-download", kind=AudioError):
        audio_info("memory://bucket/a.wav", MEMORY)
