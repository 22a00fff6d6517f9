"""Hugging Face datasets: bytes go into shards once and are decoded by our own reader only."""

from __future__ import annotations

import errno
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import prepared
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data import tar as tar_members
from sbkit.data.audio import read_audio, read_utterance
from sbkit.data.sources import embedded, open_source
from sbkit.data.sources.huggingface import Hub


def make(n: int = 6, kind: str = "flac", paths: bool = False, **columns) -> datasets.Dataset:
    audio = [{"bytes": encoded(speechlike(0.5 + 0.1 * i, seed=i), 16000, kind), "path": f"x{i}.{kind}"}
             for i in range(n)]
    data = {"audio": audio, "sentence": [f"Sentence {i}!" for i in range(n)], "client_id": list(range(n)),
            "gender": [i % 2 for i in range(n)], **columns}
    labels = datasets.ClassLabel(names=["female", "male"])
    result = datasets.Dataset.from_dict(data).cast_column("gender", labels)
    return result.cast_column("audio", datasets.Audio())  # which would decode with torchcodec if asked


def undecoded(n: int) -> dict[str, list]:
    return make(n).cast_column("audio", datasets.Audio(decode=False)).to_dict()


@pytest.fixture(params=["disk", "parquet"])
def source(request, tmp_path):
    """The same two splits, in memory at once or streamed; test_sources_hub has both from the hub."""
    splits = datasets.DatasetDict(train=make(6), validation=make(2))
    if request.param == "disk":
        splits.save_to_disk(tmp_path / "source")
    else:
        for name, split in splits.items():
            split.to_parquet(tmp_path / "source" / f"{name}-00000-of-00001.parquet")
    return str(tmp_path / "source")


def test_every_shape_gives_the_same_manifest(source, tmp_path):
    manifests = prepared(source, tmp_path / "m")[1]
    train = manifests["train"]
    assert list(manifests) == ["train", "dev"] and len(train) == 6 and len(manifests["dev"]) == 2
    row = train.row(3)
    assert (row.id, row.text, row.speaker, row.meta) == ("x3", "sentence 3", "3", {"gender": "male"})
    assert ".tar?offset=" in row.wav and row.duration == pytest.approx(0.8)
    np.testing.assert_allclose(read_audio(row.wav), speechlike(0.8, seed=3), atol=1e-4)
    assert "torchcodec" not in sys.modules
    with tarfile.open(row.wav.partition("?")[0]) as tar:
        assert tar.getnames() == [f"{i:08d}.flac" for i in range(6)]


def test_it_is_stored_once(source, tmp_path, monkeypatch):
    first = prepared(source, tmp_path / "m")[1]
    monkeypatch.setattr(embedded.ShardWriter, "add", lambda *_: pytest.fail("stored twice"))
    again = prepared(source, tmp_path / "m", text={"case": "upper"})[1]
    assert again["train"].wavs == first["train"].wavs and again["train"].texts[0] == "SENTENCE 0"


def test_a_shard_that_is_gone_is_stored_again(source, tmp_path):
    _, first = prepared(source, tmp_path / "m")
    shard = Path(first["train"].wavs[0].partition("?")[0])
    shard.unlink()
    prepared(source, tmp_path / "m")[1]
    assert shard.exists()


def test_an_interrupted_storing_goes_on_after_the_last_shard(tmp_path, monkeypatch):
    make(10).to_parquet(tmp_path / "p" / "train.parquet")
    monkeypatch.setattr(embedded, "SHARD_ROWS", 3)
    monkeypatch.setattr("sbkit.data.sources.parquet.BATCH", 1)
    add, rows = embedded.ShardWriter.add, []

    def stop_at_eight(self, row, number):
        if number == 8 and stop:
            raise KeyboardInterrupt
        rows.append(number)
        add(self, row, number)

    stop = True
    monkeypatch.setattr(embedded.ShardWriter, "add", stop_at_eight)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "p", tmp_path / "m")[1]
    files = sorted(path.name for path in (tmp_path / "m" / "audio").rglob("*train-*"))
    # Nothing half-written.
    assert files == [f"train-{i:06d}.{kind}" for i in range(2) for kind in ("parquet", "tar")]
    left = next((tmp_path / "m" / "audio").iterdir()) / ".train-000002.tar.abcdefgh.partial"
    left.write_bytes(b"what a killed process leaves")
    stop, rows[:] = False, []
    train = prepared(tmp_path / "p", tmp_path / "m")[1]["train"]
    assert rows == [6, 7, 8, 9] and not left.exists()
    assert list(train.ids) == [f"x{i}" for i in range(10)]
    for i in range(10):
        np.testing.assert_allclose(read_audio(train.wavs[i]), speechlike(0.5 + 0.1 * i, seed=i), atol=1e-4)


def test_a_disk_that_ends_while_a_dataset_is_read_is_named_and_not_the_shard(tmp_path):
    row = {"bytes": encoded(speechlike(0.5), 16_000), "path": "", "start": None, "duration": None}

    def tables(skip):
        yield pa.Table.from_pylist([row])
        raise OSError(errno.ENOSPC, "No space left on device", "/elsewhere/cache")

    with refused("disk-full", wording=False, file="/elsewhere/cache"):
        embedded.store_rows(tables, tmp_path, "train", "a dataset", show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".train.lock"]


def test_files_that_a_dataset_only_points_to_stay_where_they_are(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.wav").write_bytes(encoded(speechlike(0.5), 16000))
    paths = [str(tmp_path / f"{i}.wav") for i in range(3)] + [str(tmp_path / "gone.wav")]
    data = {"audio": [{"bytes": None, "path": path} for path in paths], "text": list("abcd")}
    pq.write_table(pa.Table.from_pydict(data), tmp_path / "train.parquet")
    corpus, found = prepared(tmp_path, tmp_path / "m")
    train = found["train"]
    assert list(train.wavs) == paths[:3] and train.durations[0] == pytest.approx(0.5)
    assert corpus.report["splits"]["train"]["left_out"]["missing clip"]["count"] == 1
    assert not list((tmp_path / "m").rglob("*.tar"))


def test_damaged_and_missing_audio_is_counted(tmp_path):
    data = undecoded(3)
    data["audio"][0]["bytes"] = b"no audio"
    data["audio"][1] = {"bytes": None, "path": None}
    pq.write_table(datasets.Dataset.from_dict(data).data.table, tmp_path / "train.parquet")
    corpus, found = prepared(tmp_path, tmp_path / "m")
    assert len(found["train"]) == 1
    left_out = corpus.report["splits"]["train"]["left_out"]
    assert {reason: left_out[reason]["count"] for reason in left_out} == {"missing clip": 1, "undecodable": 1}


def test_a_name_that_may_be_a_mistyped_path_is_reported_as_both(tmp_path):
    named, mistyped = (open_source(name, cache=tmp_path) for name in ("hf://data/fr", "data/fr"))
    assert "there is no local folder data/fr" in str(mistyped.unreadable(mistyped.where, OSError("no network")))
    assert "no folder" not in str(named.unreadable(named.where, OSError("no network")))


def test_what_lies_in_a_tar_is_called_by_what_it_is():
    flac = encoded(speechlike(0.2), 16000, "flac")
    assert tar_members.suffix(flac, "a.wav") == "flac"
    assert [tar_members.suffix(b"?", name) for name in ("a.OPUS", "a.b/c", "a.\u00f6")] == ["opus", "audio", "audio"]


def test_embedded_segments_end_where_they_say(tmp_path):
    """One recording of two seconds, cut by its rows; a duration alone is only a list's word."""
    audio = {"bytes": encoded(speechlike(2.0), 16000, "flac"), "path": "talk.flac"}
    starts, durations = [0.0, 0.5, 1.0, 1.5, None, 0.25, -1.0], [0.5, 0.5, None, 3.0, 1.0, None, 1.0]
    data = {"audio": [audio] * 7, "text": list("abcdefg"), "start": starts, "duration": durations}
    pq.write_table(pa.Table.from_pydict(data), tmp_path / "train.parquet")
    train = prepared(tmp_path, tmp_path / "m")[1]["train"]
    np.testing.assert_allclose(train.starts, [0.0, 0.5, 1.0, 1.5, 0.0, 0.25])
    np.testing.assert_allclose(train.durations, [0.5, 0.5, 1.0, 0.5, 2.0, 1.75])
    for row in train:
        first, size = round(row.start * 16000), round(row.duration * 16000)
        np.testing.assert_allclose(read_utterance(row.wav, row.start, row.duration),
                                   speechlike(2.0)[first : first + size], atol=1e-4)


def test_columns_are_found_by_name_or_by_kind_or_named(tmp_path):
    data = make(2).rename_columns({"audio": "recording", "sentence": "said"})
    data.to_parquet(tmp_path / "train.parquet")
    with refused("missing-column"):
        open_source(tmp_path, cache=tmp_path / "c").read("train", False)
    rows = open_source(tmp_path, cache=tmp_path / "c", columns={"text": "said"}).read("train", False)
    assert list(rows.texts) == ["Sentence 0!", "Sentence 1!"]


def test_files_with_one_name_get_ids_of_their_own(tmp_path):
    data = undecoded(3)
    for audio in data["audio"]:
        audio["path"] = "audio.flac"
    pq.write_table(datasets.Dataset.from_dict(data).data.table, tmp_path / "train.parquet")
    assert list(prepared(tmp_path, tmp_path / "m")[1]["train"].ids) == [
        "audio", "audio-2", "audio-3"]


def test_a_hub_dataset_is_prepared_again_when_its_commit_changed(tmp_path, monkeypatch):
    commits, loaded = ["a" * 40], []

    def ask(self, address, *, revision, timeout):
        if not commits:
            raise ConnectionError("no network")
        return SimpleNamespace(sha=commits[-1])

    def load(address, config, *, split, revision, streaming):
        loaded.append((split, revision[0]))
        return make(2 if revision == "a" * 40 else 3)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load)

    def rows(address: str = "hf://owner/name") -> int:
        return len(prepared(address, tmp_path / "m")[1]["train"])

    assert [rows(), rows()] == [2, 2] and loaded == [("train", "a")]
    commits.append("b" * 40)
    assert [rows(), rows()] == [3, 3] and loaded == [("train", "a"), ("train", "b")]
    commits.clear()  # without a network what is there will do
    assert rows() == 3 and len(loaded) == 2
    assert rows("hf://owner/name?revision=" + "a" * 40) == 2  # a commit need not be asked for


def test_addresses_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="a" * 40))
    hub = open_source("owner/name", cache=tmp_path)
    assert isinstance(hub, Hub) and hub.id == "owner/name" and hub.config is None
    hub = Hub("hf://owner/name?config=fr&revision=v2&streaming=true", tmp_path, {})
    assert (hub.id, hub.config, hub.revision, hub.streaming) == ("owner/name", "fr", "v2", True)
    assert Hub("hf://name", tmp_path, {}).id == "name"
    page = open_source("https://huggingface.co/datasets/owner/name?config=fr", cache=tmp_path)
    assert page.fingerprint() == Hub("hf://owner/name?config=fr", tmp_path, {}).fingerprint()
    for address in ("hf://owner/name?lang=fr", "hf://a/b/c"):
        with refused("bad-hub-address", value=address):
            Hub(address, tmp_path, {})


def test_parquet_files_by_split(tmp_path):
    for name in ("fr/train-00000-of-00002", "fr/train-00001-of-00002", "fr/test-00000-of-00001"):
        make(1).to_parquet(tmp_path / f"{name}.parquet")
    source = open_source(tmp_path, cache=tmp_path / "c")
    assert {name: len(files) for name, files in source.files.items()} == {"train": 2, "test": 1}
    make(1).to_parquet(tmp_path / "de" / "train.parquet")
    with refused("ambiguous-corpus"):
        open_source(tmp_path, cache=tmp_path / "c")
