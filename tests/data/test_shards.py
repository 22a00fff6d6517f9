"""Shards: what goes in comes out, whole or not at all, and a stopped packing goes on where it was."""

from __future__ import annotations

import csv
import itertools
import json
import os
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import encoded, speechlike

from sbkit.cli import main
from sbkit.data import shards, tar
from sbkit.data.audio import read_audio, read_bytes
from sbkit.data.corpus import Corpus
from sbkit.data.lock import locked
from sbkit.data.manifest import Manifest
from sbkit.data.shards import write_shards
from sbkit.system import disk


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    """20 MP3s of 1 to 2 s at 48 kHz, with texts that need quoting."""
    folder = tmp_path_factory.mktemp("clips")
    seconds = [1 + 0.05 * i for i in range(20)]
    for i, length in enumerate(seconds):
        (folder / f"{i}.mp3").write_bytes(encoded(speechlike(length, 48000, seed=i), 48000, "mp3"))
    return Manifest(ids=[f"clip/{i}.ö" for i in range(20)], durations=seconds,
                    wavs=[str(folder / f"{i}.mp3") for i in range(20)],
                    texts=[f'word "{i}", $x' for i in range(20)],
                    speakers=["ann", "bob"] * 10, meta={"accent": ["north"] * 20})


def pack(manifest: Manifest, out, **options) -> Manifest:
    options = {"show_progress": False, "workers": 1, "shard_size_mb": 0.05, **options}
    return write_shards(manifest, out, **options)


def by_id(manifest: Manifest) -> dict:
    return {row.id: row for row in manifest}


@pytest.mark.parametrize("workers", [1, 2])
def test_copied_files_come_back_byte_for_byte(manifest, tmp_path, workers):
    result = pack(manifest, tmp_path, workers=workers)
    assert len(list(tmp_path.glob("shard-*.tar"))) > 2
    again = Manifest.read(tmp_path / "shard.csv")
    assert sorted(result.ids) == sorted(manifest.ids) and list(result.ids) != list(manifest.ids)
    assert list(again.wavs) == list(result.wavs)
    before, after = by_id(manifest), by_id(again)
    for name, row in before.items():
        assert read_bytes(after[name].wav) == read_bytes(row.wav)
        assert (after[name].text, after[name].speaker, after[name].meta) == (row.text, row.speaker, row.meta)
        assert after[name].duration == pytest.approx(row.duration, abs=0.05)


@pytest.mark.parametrize(("encode", "rate"), [("wav16k", 16_000), ("flac", 16_000), ("wav", 24_000)])
def test_encoded_audio_has_the_rate_that_was_asked_for_and_sounds_the_same(manifest, tmp_path, encode, rate):
    rows = by_id(pack(manifest, tmp_path, encode=encode, sample_rate=rate))
    for before in manifest:
        expected = read_audio(before.wav, sample_rate=rate)
        found = read_audio(rows[before.id].wav, sample_rate=None)
        assert len(found) == len(expected) == round(rows[before.id].duration * rate)
        assert np.abs(found - expected).max() <= 1 / 32768


def test_the_layout_is_webdatasets(manifest, tmp_path):
    pack(manifest, tmp_path, encode="flac", name="train")
    total = 0
    for path in sorted(tmp_path.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            names = tar.getnames()
            for audio, text in zip(names[::2], names[1::2], strict=True):
                key = audio.removesuffix(".flac")
                assert text == f"{key}.json" and "." not in key
                described = json.load(tar.extractfile(text))
                row = by_id(manifest)[described["id"]]
                assert (described["text"], described["speaker"]) == (row.text, row.speaker)
                assert described["accent"] == "north"
                assert tar.extractfile(audio).read(4) == b"fLaC"
                total += 1
    index = json.loads((tmp_path / "train-index.json").read_text())
    assert total == len(manifest) == sum(shard["nsamples"] for shard in index["shardlist"])
    shards = [shard["url"] for shard in index["shardlist"]]
    assert shards == sorted(path.name for path in tmp_path.glob("train-*.tar"))


def test_shards_in_an_object_store_are_a_corpus(manifest, tmp_path):
    """Their lists stay here; ``data_root`` says where the tars went."""
    result = pack(manifest, tmp_path, name="train", encode="wav16k")
    for shard in tmp_path.glob("train-*.tar"):
        with fsspec.open(f"memory://bucket/corpus/{shard.name}", "wb") as file:
            file.write(shard.read_bytes())
    there = Corpus(tmp_path, folder=tmp_path / "manifests", data_root="memory://bucket/corpus").prepare(
        show_progress=False)["train"]
    assert len(there) == 20 and all(wav.startswith("memory://bucket/corpus/train-") for wav in there.wavs)
    before = by_id(result)
    for row in there:
        assert np.array_equal(read_audio(row.wav, remote=there.remote), read_audio(before[row.id].wav))


def test_the_folder_can_be_moved(manifest, tmp_path):
    pack(manifest, tmp_path / "here")
    os.rename(tmp_path / "here", tmp_path / "there")
    moved = Manifest.read(tmp_path / "there" / "shard.csv")
    assert all(len(read_audio(wav)) for wav in moved.wavs)
    with open(tmp_path / "there" / "shard.csv", encoding="utf-8") as file:
        assert next(csv.DictReader(file))["wav"].startswith("$data_root/shard-")


@pytest.mark.parametrize("rate", [16_000, 48_000])
def test_segments_are_cut_out_and_keep_their_rate(tmp_path, rate):
    long = tmp_path / "long.wav"
    long.write_bytes(encoded(speechlike(9, rate), rate))
    whole = read_audio(long, sample_rate=None)
    rows = Manifest(ids=["head", "mid"], durations=[2.0, 1.5], wavs=[str(long)] * 2, texts=["a", "b"],
                    starts=[0.0, 4.0])
    packed = by_id(pack(rows, tmp_path / "out"))
    assert {row.start for row in packed.values()} == {0.0}
    for name, segment in (("mid", whole[4 * rate : 11 * rate // 2]), ("head", whole[: 2 * rate])):
        assert np.allclose(read_audio(packed[name].wav, sample_rate=None), segment, atol=1 / 32768)


# ---------------------------------------------------------------- stops and damage


def test_two_packings_into_one_folder_take_turns(manifest, tmp_path, caplog):
    with ThreadPoolExecutor(1) as pool, locked(tmp_path / ".shard.lock"):
        other = pool.submit(pack, manifest, tmp_path)
        while "another process is working there" not in caplog.text:
            assert not other.done()
            time.sleep(0.01)
        assert not list(tmp_path.glob("*.tar"))
        dev = pack(manifest, tmp_path, name="dev")  # another name does not wait
        assert len(dev) == 20 and not other.done()
    assert sorted(other.result().ids) == sorted(manifest.ids)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's list of open files")
def test_processes_that_outlive_a_killed_packing_do_not_hold_its_lock(manifest, tmp_path, monkeypatch):
    encoded = shards.encode_row

    def open_locks(*asked):
        held = [os.path.realpath(file.path) for file in os.scandir("/proc/self/fd") if file.is_symlink()]
        assert not [path for path in held if path.endswith(".lock")]
        return encoded(*asked)

    monkeypatch.setattr(shards, "encode_row", open_locks)
    assert len(pack(manifest, tmp_path, workers=2)) == 20


def test_a_stopped_packing_goes_on_with_what_is_missing(manifest, tmp_path, monkeypatch):
    whole = pack(manifest, tmp_path / "whole")
    append, calls = tar.append, []

    def failing(file, name, data):
        calls.append(name)
        if len(calls) > 15:
            raise KeyboardInterrupt
        return append(file, name, data)

    monkeypatch.setattr(tar, "append", failing)
    with pytest.raises(KeyboardInterrupt):
        pack(manifest, tmp_path / "out")
    monkeypatch.setattr(tar, "append", append)
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert there and [path.name for path in there if path.name.startswith(".")] == [".shard.lock"]
    assert all(tarfile.is_tarfile(path) for path in there if path.suffix == ".tar")
    result = pack(manifest, tmp_path / "out")
    assert all(path.stat().st_mtime_ns == when for path, when in there.items() if path.suffix == ".tar")
    assert [(row.id, row.duration, row.wav.split("/")[-1]) for row in result] == [
        (row.id, row.duration, row.wav.split("/")[-1]) for row in whole
    ]


def test_done_is_not_done_again_and_other_options_are(manifest, tmp_path):
    def written():
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-0*.tar")}

    pack(manifest, tmp_path)
    first = written()
    pack(manifest, tmp_path)
    assert written() == first
    pack(manifest, tmp_path, encode="flac")
    assert all(written()[name] != first[name] for name in first if name in written())
    second = written()
    path = tmp_path / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:-100])  # cut off by something else
    pack(manifest, tmp_path, encode="flac")
    assert {name for name in second if written()[name] != second[name]} == {"shard-000001.tar"}


def test_fewer_shards_than_before_leave_no_old_ones_but_those_of_another_name(manifest, tmp_path):
    pack(manifest, tmp_path, name="train-2")
    others = {path.name for path in tmp_path.iterdir()}
    assert sum(name.endswith(".tar") for name in others) > 2
    pack(manifest, tmp_path, name="train")
    result = pack(manifest, tmp_path, name="train", shard_size_mb=100)
    assert {path.name for path in tmp_path.iterdir()} - others == {
        ".train.lock", "train-000000.json", "train-000000.tar", "train-index.json", "train-report.json", "train.csv"}
    assert len(result) == len(manifest) and others <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("encode", [None, "wav16k"])
def test_rows_are_kept_or_named(manifest, tmp_path, encode):
    broken = tmp_path / "broken.mp3"
    broken.write_bytes(b"nothing")
    cut = tmp_path / "cut.mp3"
    cut.write_bytes(encoded(speechlike(0.5, 48000), 48000, "mp3"))
    wavs = list(manifest.wavs)
    wavs[3], wavs[7], wavs[15] = str(broken), str(tmp_path / "gone.mp3"), str(cut)
    result = pack(manifest.replace(wavs=wavs), tmp_path / "out", encode=encode)
    report = json.loads((tmp_path / "out" / "shard-report.json").read_text())
    assert report["rows"] == 20 == report["kept"] + len(report["left_out"])
    assert report["kept"] == len(result) == 17
    reasons = {entry["id"]: entry["reason"] for entry in report["left_out"]}
    assert "cannot be decoded" in reasons["clip/3.ö"] and reasons["clip/7.ö"] == "no such file"
    assert "are missing" in reasons["clip/15.ö"]


@pytest.mark.parametrize("there", [True, False])
def test_mended_recordings_are_packed_the_next_time(manifest, tmp_path, there):
    wavs = list(manifest.wavs)
    wavs[3] = str(tmp_path / "mended.mp3")
    if there:
        (tmp_path / "mended.mp3").write_bytes(b"nothing")
    source = manifest.replace(wavs=wavs)
    assert len(pack(source, tmp_path / "out", encode="flac")) == 19
    (tmp_path / "mended.mp3").write_bytes(read_bytes(manifest.wavs[3]))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert len(pack(source, tmp_path / "out", encode="flac")) == 20
    assert sum(path.stat().st_mtime_ns != when for path, when in before.items()) == 1


def test_the_manifest_that_is_packed_stays(manifest, tmp_path, capsys):
    manifest.write(tmp_path / "train.csv")
    assert main(["shard", str(tmp_path / "train.csv"), str(tmp_path)]) != 0
    assert "the manifest of the shards would overwrite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


@pytest.mark.parametrize(("options", "code"), [
    ({"shard_size_mb": 0}, "bad-value"), ({"shard_size_mb": float("nan")}, "bad-value"), ({"workers": 0}, "bad-value"),
    ({"encode": "mp4"}, "bad-value"), ({"encode": "wav16k", "sample_rate": 8000}, "conflicting-options")])
def test_wrong_options_are_reported(manifest, tmp_path, options, code):
    with refused(code):
        pack(manifest, tmp_path, **options)


def test_what_cannot_be_packed_is_reported(manifest, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with refused("not-writable"):
        pack(manifest, tmp_path / "file")
    with refused("no-utterances"):
        pack(manifest.select([]), tmp_path)
    with refused("too-much-damaged-audio"):
        pack(manifest.replace(wavs=["/nowhere.mp3"] * 20), tmp_path)
    monkeypatch.setattr(disk, "free", lambda _: 10)
    with refused("disk-full", wording=False):
        pack(manifest, tmp_path / "full")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=200), st.floats(1, 1e4))
def test_shards_cover_all_rows_in_about_equal_parts(seconds, per_shard):
    bounds = shards.shard_bounds(np.array(seconds, np.float32), per_shard)
    assert bounds[0] == 0 and bounds[-1] == len(seconds) and (np.diff(bounds) > 0).all()
    parts = [sum(seconds[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(parts) <= 1.6 * per_shard + 2 * max(seconds)
