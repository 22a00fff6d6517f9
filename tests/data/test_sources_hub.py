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
from refusals import check_wording
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
        result = [error.code, str(error)]
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
    """What each case came to: ids by split, or the code and the message of its error."""
    for i, case in enumerate(cases):
        case.setdefault("folder", str(home.parent / f"manifests-{home.name}-{i}"))
    done = subprocess.run([sys.executable, "-c", CLIENT], input=json.dumps(cases), capture_output=True, text=True,
                          env=environment(home, **other), timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_prepares_a_config_and_refuses_wrong_addresses(hub, tmp_path):
    """Over a line that breaks; offline, what was loaded once will do."""
    hub.breaks = {"fr/train-00001-of-00002.parquet": 1}
    cases = [
        ("hf://owner/nobody", "", "missing-dataset"),
        ("hf://owner/nobody", "somebody", "missing-dataset"),
        ("owner/nobody", "", "missing-dataset"),
        ("hf://owner/gated?config=fr", "", "dataset-access-denied"),
        ("hf://owner/gated?config=fr", "somebody", "dataset-access-denied"),
        ("hf://owner/name?config=es", "", "ambiguous-corpus"),
        ("hf://owner/name", "", "ambiguous-corpus"),
        ("hf://owner/name?config=fr&revision=v9", "", "missing-dataset"),
        ("hf://owner/text", "", "missing-dataset"),
        ("hf://owner/damaged?config=fr&streaming=true", "", "unreadable-dataset"),
        ("hf://owner/name?config=fr&streaming=perhaps", "", "bad-hub-address"),
    ]
    welcome = {"source": "hf://owner/gated?config=fr", "token": "friend"}
    first, *reported, last = prepared(
        tmp_path / "home", {"source": "hf://owner/name?config=fr", "folder": str(tmp_path / "out")},
        *({"source": source, "token": token} for source, token, _ in cases), welcome, HF_ENDPOINT=hub.url)
    assert first == last == PREPARED
    for (source, _, code), (code_of_error, message) in zip(cases, reported, strict=True):
        assert code_of_error == code, (source, message)
        check_wording(message)
    train = Manifest.read(tmp_path / "out" / "train.csv")
    assert list(train.ids) == PREPARED["train"] and train.texts[5] == "sentence f"
    np.testing.assert_allclose(read_audio(train.wavs[5]), speechlike(0.5, seed=5), atol=1e-4)
    assert not any("/de/" in request for request in hub.seen) and not any(hub.breaks.values())

    cached, unknown = prepared(tmp_path / "home", {"source": "hf://owner/name?config=fr"}, {"source": "hf://owner/text"},
                               HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert cached == PREPARED
    assert unknown[0] == "no-network"
    check_wording(unknown[1])


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
    for (code, message), folder in zip(reported, ("manifests-home-1", "manifests-home-2"), strict=True):
        assert code == "no-network" and "peer closed connection" in message
        assert not [*(tmp_path / folder).rglob("*.csv"), *(tmp_path / folder).rglob("*.tar")]

    nowhere, first = "http://127.0.0.1:9", cases[0]
    there, never = prepared(tmp_path / "home", first, {"source": "hf://owner/name?config=fr"}, HF_ENDPOINT=nowhere)
    assert there == PREPARED  # what was prepared before will do
    assert never[0] == "no-network" and nowhere in never[1]
