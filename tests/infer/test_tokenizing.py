"""A corpus to codes: of each recording its own, a bad one left out by name, and nothing half-written."""

import csv
import json

import numpy as np
import pytest
import soundfile
import toy_codec
import voices
from refusals import refused

from sbkit.cli import main
from sbkit.codes import Codes, shards
from sbkit.export import layout
from sbkit.infer import tokenizing
from sbkit.infer.codec import CodecModel


def recording(path, frames, seed):
    """Write a recording, and return its codes."""
    codes = toy_codec.drawn(frames, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, toy_codec.sound(codes), toy_codec.RATE)
    return codes


def listed(path, rows):
    lines = ["ID,duration,wav,spk_id,wrd", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def corpus(tmp_path):
    """Three splits of recordings of several lengths, and the codes of each."""
    folder, codes = tmp_path / "corpus", {}
    for number, (split, count) in enumerate({"train": 9, "dev": 2, "test": 3, "other": 2}.items()):
        rows = []
        for i in range(count):
            name, frames = f"{split}{i}", 5 + 37 * (i * 5 % 9)
            codes[name] = recording(folder / f"{name}.wav", frames, 100 * number + i)
            rows.append((name, frames * 0.02, f"{name}.wav", f"speaker{i}" if i % 2 else "",
                         '"Well, isn\'t it?"' if i else ""))
        listed(folder / f"{split}.csv", rows)
    return folder, codes


def tokenize(*words):
    assert main(["tokenize", *map(str, words), "--device", "cpu", "--threads", "1"]) == 0


def error_of(capsys, *words):
    """What a refused command says."""
    assert main(["tokenize", *map(str, words), "--device", "cpu", "--threads", "1"]) == 2
    return capsys.readouterr().err


def test_each_split_becomes_a_folder_of_codes(
        codec_bundle, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenizing, "AT_ONCE_SECONDS", 7.0)
    folder, wanted = corpus
    tokenize(codec_bundle, folder, "--to", tmp_path / "out")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["dev", "manifests", "test", "train"]
    for split, count in (("train", 9), ("dev", 2), ("test", 3)):
        codes = Codes(tmp_path / "out" / split, toy_codec.BOOKS)
        assert [each.id for each in codes] == [f"{split}{i}" for i in range(count)] == codes.ids
        for i, each in enumerate(codes):
            np.testing.assert_array_equal(each.codes, wanted[each.id])
            assert each.speaker == (f"speaker{i}" if i % 2 else None)
            assert each.text == ("Well, isn't it?" if i else None), "as it is written"
    last = capsys.readouterr().out.splitlines()[-1]
    frames = sum(map(len, (wanted[f"test{i}"] for i in range(3))))
    assert f"test: 3 utterances, 4.7 s, {frames:,} frames at {toy_codec.BOOKS.bit_rate:.0f} bit/s, " in last
    assert "as 16-bit samples" in last and "real-time factor" in last


def test_splits_are_chosen_by_name(codec_bundle, corpus, tmp_path, capsys):
    folder, _ = corpus
    tokenize(codec_bundle, folder, "--to", tmp_path / "out", "--split", "other", "--split", "dev")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["dev", "manifests", "other"]
    assert "[missing-split]" in error_of(
        capsys, codec_bundle, folder, "--to", tmp_path / "more", "--split", "validated")
    assert not (tmp_path / "more").exists()


def test_one_list_is_a_corpus_of_one_split(codec_bundle, corpus, tmp_path):
    folder, wanted = corpus
    (folder / "other.csv").rename(folder / "mine.csv")
    tokenize(codec_bundle, folder / "mine.csv", "--to", tmp_path / "out")
    [first, _] = Codes(tmp_path / "out" / "mine", toy_codec.BOOKS)
    np.testing.assert_array_equal(first.codes, wanted["other0"])


def test_recordings_without_any_list_are_a_corpus(codec_bundle, tmp_path):
    wanted = {f"{speaker}/{i}": recording(tmp_path / "corpus" / speaker / f"{i}.wav", 20 + i, ord(speaker) + i)
              for speaker in "ab" for i in range(2)}
    tokenize(codec_bundle, tmp_path / "corpus", "--to", tmp_path / "out")
    found = {each.id: each.codes for each in Codes(tmp_path / "out" / "train", toy_codec.BOOKS)}
    assert found.keys() == wanted.keys()
    for name, codes in wanted.items():
        np.testing.assert_array_equal(found[name], codes)


@pytest.mark.parametrize("name", ["manifests", "Manifests"])
def test_a_split_named_manifests_is_refused(
        codec_bundle, corpus, tmp_path, monkeypatch, capsys, name):
    folder, _ = corpus
    (folder / "other.csv").rename(folder / f"{name}.csv")
    monkeypatch.setattr(CodecModel, "open", lambda *_: pytest.fail("nothing must be loaded"))
    for words in ((folder / f"{name}.csv",), (folder, "--split", name)):
        assert "[same-output]" in error_of(capsys, codec_bundle, *words, "--to", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [("my dev", "my_dev"), ("my dev", "My_dev")])
def test_splits_with_the_same_folder_are_refused(
        codec_bundle, corpus, tmp_path, monkeypatch, capsys, names):
    folder, _ = corpus
    (folder / "test.csv").rename(folder / f"{names[0]}.csv")
    (folder / "other.csv").rename(folder / f"{names[1]}.csv")
    words = codec_bundle, folder, "--split", names[1], "--to", tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(CodecModel, "open", lambda *_: pytest.fail("nothing must be loaded"))
        assert "[same-output]" in error_of(capsys, *words, "--split", names[0])
    assert not (tmp_path / "out").exists()
    tokenize(*words)
    assert {each.id for each in Codes(tmp_path / "out" / names[1], toy_codec.BOOKS)} == {"other0", "other1"}


# ---------------------------------------------------------------- what is bad


def test_unreadable_recordings_are_listed_and_rows_add_up(codec_bundle, tmp_path, capsys):
    folder = tmp_path / "corpus"
    wanted = recording(folder / "good.wav", 50, 0)
    soundfile.write(folder / "nan.wav", np.full(16_000, np.nan, np.float32), 16_000, "FLOAT")
    (folder / "noise.wav").write_bytes(b"RIFF no sound at all")
    soundfile.write(folder / "cut.flac", np.random.default_rng(0).normal(0, 0.1, 64_000), 16_000)
    whole = (folder / "cut.flac").read_bytes()
    (folder / "cut.flac").write_bytes(whole[: len(whole) // 3])
    rows = {"good.wav": 1, "nan.wav": 1, "noise.wav": 1, "cut.flac": 4, "missing.wav": 1}
    listed(folder / "test.csv", [(name.split(".")[0], seconds, name, "", "") for name, seconds in rows.items()])
    tokenize(codec_bundle, folder, "--to", tmp_path / "out")
    [only] = Codes(tmp_path / "out" / "test", toy_codec.BOOKS)
    np.testing.assert_array_equal(only.codes, wanted)
    said = capsys.readouterr().err
    assert "test: 5 rows read, 1 kept, 4 left out: 3 undecodable, 1 missing clip" in said
    assert "nan: holds values that are not finite" in said and "cut: " in said
    assert f"all are in {tmp_path / 'out' / 'test' / 'left_out.csv'}" in said
    with open(tmp_path / "out" / "test" / "left_out.csv", encoding="utf-8") as file:
        assert {row["ID"]: row["split"] for row in csv.DictReader(file)}.keys() == {"nan", "noise", "cut", "missing"}


def test_uncodable_recordings_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shards, "MAX_FRAMES", 60)
    folder = tmp_path / "corpus"
    wanted = [recording(folder / "first.wav", 50, 0), recording(folder / "last.wav", 9, 1)]
    recording(folder / "long.wav", 61, 2)
    recording(folder / "told.wav", 5, 3)
    soundfile.write(folder / "loud.wav", np.full(16_000, 1e30, np.float32), 16_000, "FLOAT")
    listed(folder / "test.csv", [("first", 1, "first.wav", "", ""), ("loud", 1, "loud.wav", "", ""),
                                 ("long", 1.22, "long.wav", "", ""),
                                 ("told", 0.1, "told.wav", "", "word " * (1 << 18)),
                                 ("last", 0.18, "last.wav", "", "")])
    tokenize(toy_codec.make(tmp_path / "c", highest=np.inf), folder, "--to", tmp_path / "out")
    found = list(Codes(tmp_path / "out" / "test", toy_codec.BOOKS))
    assert [each.id for each in found] == ["first", "last"]
    assert all(map(np.array_equal, (each.codes for each in found), wanted))
    said = capsys.readouterr().err
    assert "test: 5 rows read, 2 kept, 3 left out: 2 uncodable, 1 undecodable" in said
    assert "loud: has samples as large as 1e+30; full scale is 1" in said
    with open(tmp_path / "out" / "test" / "left_out.csv", encoding="utf-8") as file:
        why = {row["ID"]: row["code"] for row in csv.DictReader(file)}
    assert why == {"long": "unstorable-utterance", "told": "unstorable-utterance", "loud": "bad-samples"}


def test_a_corpus_of_which_nothing_can_be_read_is_an_error_and_leaves_no_codes(codec_bundle, tmp_path, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(3):
        soundfile.write(folder / f"{i}.wav", np.full(16_000, np.nan, np.float32), 16_000, "FLOAT")
    listed(folder / "test.csv", [(i, 1.0, f"{i}.wav", "", "") for i in range(3)])
    said = error_of(capsys, codec_bundle, folder, "--to", tmp_path / "out")
    assert "all 3 rows of the split test were left out" in said and "[all-rows-left-out]" in said
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["manifests"]


def test_an_empty_corpus_is_an_error(codec_bundle, tmp_path, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    assert "is not a corpus" in error_of(capsys, codec_bundle, folder, "--to", tmp_path / "out")
    listed(folder / "test.csv", [])
    assert "split is empty" in error_of(capsys, codec_bundle, folder, "--to", tmp_path / "out")
    assert not (tmp_path / "out" / "test").exists()


def test_another_bundle_and_a_missing_corpus_are_reported_before_anything_is_made(codec_bundle, tmp_path, capsys):
    voice = voices.make(tmp_path / "voice")
    assert "[wrong-bundle-kind]" in error_of(capsys, voice, tmp_path, "--to", tmp_path / "out")
    assert "no such file or folder" in error_of(capsys, codec_bundle, tmp_path / "nowhere", "--to", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- whole or not at all


def test_existing_splits_are_replaced_only_with_force(codec_bundle, corpus, tmp_path, capsys, monkeypatch):
    folder, _ = corpus
    words = codec_bundle, folder, "--to", tmp_path / "out", "--split", "dev"
    tokenize(*words)
    before = (tmp_path / "out" / "dev" / "manifest.json").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(CodecModel, "open", lambda *_: pytest.fail("nothing must be loaded"))
        tokenize(*words)
        assert "dev: already encoded from this list by this codec" in capsys.readouterr().out
    rows = (folder / "dev.csv").read_text()
    (folder / "dev.csv").write_text(rows.replace("speaker1", "another"))
    with monkeypatch.context() as patch:
        patch.setattr(CodecModel, "open", lambda *_: pytest.fail("nothing must be loaded"))
        assert "[output-exists]" in error_of(capsys, *words)
    (folder / "dev.csv").write_text(rows)
    tokenize(*words, "--force")
    assert (tmp_path / "out" / "dev" / "manifest.json").stat().st_mtime_ns > before
    (tmp_path / "out" / "dev" / "manifest.json").unlink()
    assert "is neither a folder of codes nor empty, so it is not replaced" in error_of(capsys, *words, "--force")


def test_an_interrupted_split_leaves_no_folder(codec_bundle, corpus, tmp_path, monkeypatch):
    folder, _ = corpus
    monkeypatch.setattr(tokenizing, "AT_ONCE_SECONDS", 7.0)
    encode, calls = CodecModel.encode_each, []

    def stopped(codec, audio):
        calls.append(len(audio))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(codec, audio)

    words = ["tokenize", str(codec_bundle), str(folder), "--to", str(tmp_path / "out"), "--device", "cpu"]
    tokenize(*words[1:5], "--split", "dev")
    with monkeypatch.context() as patch:
        patch.setattr(CodecModel, "encode_each", stopped)
        assert main([*words, "--split", "dev", "--split", "train"]) == 130
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["dev", "manifests"]
    before = (tmp_path / "out" / "dev" / "manifest.json").stat().st_mtime_ns
    assert main([*words, "--split", "dev", "--split", "train"]) == 0
    assert (tmp_path / "out" / "dev" / "manifest.json").stat().st_mtime_ns == before, "what was done stays"
    assert len(Codes(tmp_path / "out" / "train")) == 9


def test_a_codec_that_outputs_invalid_codes_writes_none(tmp_path, corpus):
    wrong, (folder, _) = toy_codec.make(tmp_path / "c", graph_sizes=(90, 20)), corpus
    with refused("all-rows-left-out"):
        tokenizing.tokenize(tokenizing.TokenizeRequest(wrong, str(folder), tmp_path / "out", device="cpu"))
    assert not (tmp_path / "out" / "test").exists()


def test_codes_name_their_codec(codec_bundle, corpus, tmp_path):
    folder, _ = corpus
    tokenize(codec_bundle, folder, "--to", tmp_path / "out", "--split", "dev")
    books = json.loads((tmp_path / "out" / "dev" / "manifest.json").read_text())["books"]
    config = layout.CodecConfig.read(codec_bundle)
    assert books == {"sizes": config.books, "frame_rate": 50.0, "sample_rate": 16_000, "codec": config.codec}
