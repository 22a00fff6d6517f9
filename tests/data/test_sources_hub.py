"""The hub by its own protocol: the real `datasets` and `huggingface_hub` load from a stand-in on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from hub import Hub, Repository
from sounds import encoded, speechlike

from sbkit.data.audio import read_audio
from sbkit.data.manifest import Manifest

CARD = b"""---
configs:
- config_name: fr
  data_files:
  - {split: train, path: fr/train-*}
  - {split: validation, path: fr/validation-*}
  - {split: test, path: fr/test-*}
- config_name: de
  data_files:
  - {split: train, path: de/train-*}
---
"""
ROWS = {"fr/train-00000-of-00002": (0, 4), "fr/train-00001-of-00002": (4, 7), "fr/validation-00000-of-00001": (7, 9),
        "fr/test-00000-of-00001": (9, 10), "de/train-00000-of-00001": (10, 12)}
#: Prepares corpora one after another in a process of its own, as what it depends on is read once in each.
CLIENT = """
import json, os, sys, time
wait = time.sleep
time.sleep = lambda seconds: wait(min(seconds, 0.01))
import datasets
datasets.config.STREAMING_READ_MAX_RETRIES = 2
from sbkit.data.corpus import Corpus
from sbkit.errors import SbkitError
for case in json.load(sys.stdin):
    os.environ["HF_TOKEN"] = case.get("token", "")
    try:
        manifests = Corpus(case["source"], folder=case["folder"]).prepare(show_progress=False)
        result = {split: [*manifest.ids] for split, manifest in manifests.items()}
    except SbkitError as error:
        result = str(error)
    print(json.dumps(result))
"""
PREPARED = {"train": [f"x{i}" for i in range(7)], "dev": ["x7", "x8"], "test": ["x9"]}


def parquet(rows: range) -> bytes:
    audio = [{"bytes": encoded(speechlike(0.5, seed=i), 16000, "flac"), "path": f"x{i}.flac"} for i in rows]
    data = datasets.Dataset.from_dict({"audio": audio, "sentence": [f"Sentence {'abcdefghijkl'[i]}" for i in rows]})
    file = io.BytesIO()
    data.cast_column("audio", datasets.Audio()).to_parquet(file)
    return file.getvalue()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {"README.md": CARD, **{f"{name}.parquet": parquet(range(*rows)) for name, rows in ROWS.items()}}


@pytest.fixture
def hub(files):
    with Hub() as hub:
        damaged = {**files, "fr/test-00000-of-00001.parquet": b"PAR1 and no more"}
        hub.repositories = {
            "owner/name": Repository(files), "owner/gated": Repository(files, gated=True, readers=("friend",)),
            "owner/text": Repository({"README.md": b"# Nothing"}), "owner/damaged": Repository(damaged)}
        yield hub


def environment(home: Path, **other: str) -> dict[str, str]:
    """A user's who has never been to the hub; no proxy of this machine stands before ours."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("HF_") and not name.lower().endswith("_proxy")}
    return {**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **other}


def prepared(home: Path, *cases: dict, **other: str) -> list:
    """What each case came to: ids by split, or the one message."""
    for i, case in enumerate(cases):
        case.setdefault("folder", str(home.parent / f"manifests-{home.name}-{i}"))
    done = subprocess.run([sys.executable, "-c", CLIENT], input=json.dumps(cases), capture_output=True, text=True,
                          env=environment(home, **other), timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_config_of_a_dataset_is_prepared_and_each_mistake_is_one_message_that_says_what_to_do(hub, tmp_path):
    """Over a line that breaks; offline, what was loaded once will do."""
    hub.breaks = {"fr/train-00001-of-00002.parquet": 1}
    page = f"{hub.url}/datasets/owner"
    cases = [
        ("hf://owner/nobody", "", "hf://owner/nobody cannot be read: the hub has no such dataset, or it is private; "
         "check the name; for a private one log in: `hf auth login`, or set HF_TOKEN"),
        ("hf://owner/nobody", "somebody", "hf://owner/nobody cannot be read: the hub has no such dataset, or"),
        ("owner/nobody", "", "there is no local folder owner/nobody; if you mean the hub, check the name"),
        ("hf://owner/gated?config=fr", "", "is a gated dataset on the Hub. You must be authenticated to access it.; "
         f"ask for access on {page}/gated and log in: `hf auth login`, or set HF_TOKEN"),
        ("hf://owner/gated?config=fr", "somebody", f"; ask for access on {page}/gated and log in"),
        ("hf://owner/name?config=es", "", "hf://owner/name has no config 'es'; say which, such as "
         "hf://owner/name?config=fr: it has fr, de"),
        ("hf://owner/name", "", "hf://owner/name has 2 configs; say which, such as hf://owner/name?config=fr"),
        ("hf://owner/name?config=fr&revision=v9", "", "it has no revision 'v9'; its branches and commits are on"),
        ("hf://owner/text", "", f"it has no files that `datasets` can load; look at what it has: {page}/text"),
        ("hf://owner/damaged?config=fr&streaming=true", "", f"look at its files: {page}/damaged"),
        ("hf://owner/name?config=fr&streaming=perhaps", "", "streaming is 'perhaps'; it is true or false"),
    ]
    welcome = {"source": "hf://owner/gated?config=fr", "token": "friend"}
    first, *reported, last = prepared(
        tmp_path / "home", {"source": "hf://owner/name?config=fr", "folder": str(tmp_path / "out")},
        *({"source": source, "token": token} for source, token, _ in cases), welcome, HF_ENDPOINT=hub.url)
    assert first == last == PREPARED
    for (source, _, message), said in zip(cases, reported, strict=True):
        assert message in said and "\n" not in said, source
    train = Manifest.read(tmp_path / "out" / "train.csv")
    assert list(train.ids) == PREPARED["train"] and train.texts[5] == "sentence f"
    np.testing.assert_allclose(read_audio(train.wavs[5]), speechlike(0.5, seed=5), atol=1e-4)
    assert not any("/de/" in request for request in hub.seen) and not any(hub.breaks.values())

    cached, unknown = prepared(tmp_path / "home", {"source": "hf://owner/name?config=fr"}, {"source": "hf://owner/text"},
                               HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert cached == PREPARED
    assert "HF_HUB_OFFLINE forbids asking" in unknown and "unset HF_HUB_OFFLINE" in unknown


@pytest.mark.long
@pytest.mark.slow
def test_streaming_keeps_no_file_and_a_line_that_stays_broken_is_reported(hub, files, tmp_path):
    """All through a proxy; nothing half-written is left."""
    broken = "de/train-00000-of-00001.parquet"
    hub.breaks = {"fr/train-00001-of-00002.parquet": 1, broken: 10**6}
    cases = [{"source": f"hf://owner/name?config={options}"} for options in
             ("fr&streaming=true", "de&streaming=true", "de")]
    streamed, *reported = prepared(tmp_path / "home", *cases, HF_ENDPOINT="http://hub.invalid", http_proxy=hub.url)
    assert streamed == PREPARED and hub.breaks["fr/train-00001-of-00002.parquet"] == 0
    whole = [request for request in hub.seen if "/storage/" in request and "bytes=" not in request]
    assert all(hashlib.sha256(files[broken]).hexdigest() in request for request in whole)
    assert not [*(tmp_path / "home").rglob("*.parquet"), *(tmp_path / "home").rglob("*.arrow")]
    for message, folder in zip(reported, ("manifests-home-1", "manifests-home-2"), strict=True):
        assert "cannot be read: peer closed connection" in message and "check the network" in message
        assert not [*(tmp_path / folder).rglob("*.csv"), *(tmp_path / folder).rglob("*.tar")]

    nowhere, first = "http://127.0.0.1:9", cases[0]
    there, never = prepared(tmp_path / "home", first, {"source": "hf://owner/name?config=fr"}, HF_ENDPOINT=nowhere)
    assert there == PREPARED  # what was prepared before will do
    assert "Connection refused" in never and nowhere in never and "check the network" in never
