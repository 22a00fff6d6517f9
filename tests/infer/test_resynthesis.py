"""Codes to files of sound: those that were asked for, in their folder, or nothing where a code is not of this codec."""

import json
import re
import sys
import time
import weakref

import numpy as np
import pytest
import soundfile
import toy_codec
from refusals import refused
from safetensors.numpy import load_file, save_file

from sbkit.cli import main
from sbkit.codes import Books, Codes, InvalidCode, writing
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.infer import resynthesis
from sbkit.infer.codec import CodecModel
from sbkit.infer.resynthesis import ResynthesizeRequest, file_name, file_names
from sbkit.system import disk

FRAMES = (3, 120, 1, 55)


def codes(folder, ids=("a", "b", "c", "d"), books=toy_codec.BOOKS):
    with writing(folder, books) as out:
        for i, each in enumerate(ids):
            out.add(each, toy_codec.drawn(FRAMES[i % 4], i), f"text {i}" if i else None, "anna" if i % 2 else None)
    return folder


def resynthesize(*words):
    assert main(["resynthesize", *map(str, words), "--device", "cpu", "--threads", "1"]) == 0


def error_of(capsys, *words):
    assert main(["resynthesize", *map(str, words), "--device", "cpu", "--threads", "1"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("format", ["wav", "flac"])
def test_sounds_match_the_codec(codec_bundle, tmp_path, format, monkeypatch, capsys):
    monkeypatch.setattr(resynthesis, "AT_ONCE_SECONDS", 1.5)
    resynthesize(codec_bundle, codes(tmp_path / "codes"), "--to", tmp_path / "out", "--format", format)
    assert "4 recordings, 3.6 s; it took" in capsys.readouterr().out
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        *(f"{name}.{format}" for name in "abcd"), "manifest.csv", "resynthesis.json"]
    manifest = Manifest.read(tmp_path / "out" / "manifest.csv")
    for i, row in enumerate(manifest):
        sound, rate = soundfile.read(row.wav, dtype="float32")
        np.testing.assert_allclose(sound, toy_codec.sound(toy_codec.drawn(FRAMES[i], i)), atol=1e-4)
        assert rate == toy_codec.RATE and row.duration == pytest.approx(len(sound) / rate)
        assert (row.id, row.text, row.speaker) == ("abcd"[i], f"text {i}" if i else "", "anna" if i % 2 else "")


def test_splits_become_folders(codec_bundle, tmp_path, capsys):
    for split in ("dev", "test"):
        codes(tmp_path / "codes" / split)
    resynthesize(codec_bundle, tmp_path / "codes", "--to", tmp_path / "out")
    assert "8 recordings" in capsys.readouterr().out
    assert sorted(str(each.relative_to(tmp_path / "out")) for each in (tmp_path / "out").glob("*/*")) == sorted(
        f"{split}/{name}" for split in ("dev", "test") for name in ("a.wav", "b.wav", "c.wav", "d.wav", "manifest.csv"))
    assert "there is no manifest.json in it" in error_of(capsys, codec_bundle, tmp_path, "--to", tmp_path / "more")


# ---------------------------------------------------------------- names


def test_ids_cannot_leave_the_folder(codec_bundle, tmp_path):
    ids = ["../../up", "/etc/passwd", "a/b", "a\\b", "a_b", "A_B", "..", ".hidden", "x" * 400, "x" * 401, "con",
           "naïve 語", "-rf", "line\nbreak", *(["c\0d"] if sys.version_info >= (3, 11) else [])]
    resynthesize(codec_bundle, codes(tmp_path / "codes", ids), "--to", tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["codes", "out"]
    files = [each.name for each in (tmp_path / "out").glob("*.wav")]
    assert len({name.casefold() for name in files}) == len(ids)
    manifest = Manifest.read(tmp_path / "out" / "manifest.csv")
    assert list(manifest.ids) == ids
    assert {each.removeprefix(f"{tmp_path / 'out'}/") for each in manifest.wavs} == set(files)
    for i, row in enumerate(manifest):
        assert soundfile.info(row.wav).frames == FRAMES[i % 4] * toy_codec.STRIDE


@pytest.mark.parametrize("name, wanted", [
    ("common_voice_en_1", "common_voice_en_1"), ("a b/c", "a_b_c"), ("naïve", "naïve"), ("nai\u0308ve", "naïve"),
    ("..", "_"), ("", "_"), (".a.", "a"), ("NUL.txt", "_NUL.txt"), ("\ud800x", "_x"), ("1-2.5+3", "1-2.5+3"),
])
def test_file_names_have_no_special_characters(name, wanted):
    assert file_name(name) == wanted and re.fullmatch(r"[\w.+=@,-]+", file_name(name))


def test_file_names_are_unique_and_short():
    names = file_names(["a/b", "a_b", "A_b", "a_b-2", "語" * 300, "語" * 299])
    assert names[:4] == ["a_b", "a_b-2", "A_b-3", "a_b-2-2"]
    assert len({each.casefold() for each in names}) == 6 and max(len(each.encode()) for each in names) < 200


@pytest.mark.parametrize("ids", [["x" * 200 + str(i) for i in range(20_000)], ["x"] * 20_000, ["X", "x"] * 10_000],
                         ids=["long", "same", "case"])
def test_many_equal_names_take_linear_time(ids):
    began = time.process_time()
    names = file_names(ids)
    assert time.process_time() - began < 5, "each name that is taken was tried again for each id"
    assert len({each.casefold() for each in names}) == len(ids)


@pytest.mark.parametrize("name", ["x" * 3_000_000, "語" * 1_000_000, "a" + "\u0301\u0316" * 1_000_000])
def test_a_huge_name_takes_no_time(name):
    began = time.process_time()
    assert 100 < len(file_name(name).encode()) <= 180
    assert time.process_time() - began < 1


def test_a_cut_name_ends_with_a_whole_character_and_no_dot():
    assert file_name("a" * 179 + ".b") == "a" * 179
    assert file_name("a" + "語" * 60) == "a" + "語" * 59


# ---------------------------------------------------------------- what is refused


def planted(folder, index, id):
    """The folder with an id in its shard; its manifest agrees, as if another program had written both."""
    path, manifest = folder / "codes-00000.safetensors", folder / "manifest.json"
    tensors = load_file(path)
    tensors["codes"] = tensors["codes"].astype(np.int64)
    tensors["codes"][index] = id
    save_file(tensors, path)
    values = json.loads(manifest.read_text())
    values["shards"][0] |= {"bytes": path.stat().st_size, "sha256": disk.sha256(path)}
    manifest.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("level, size", [*enumerate(toy_codec.SIZES)])
@pytest.mark.parametrize("beyond", [None, 0, 63])
def test_an_invalid_code_is_refused_and_leaves_no_files(codec_bundle, tmp_path, monkeypatch, level, size, beyond):
    id = -1 if beyond is None else size + beyond
    folder = planted(codes(tmp_path / "codes"), (3 + 17, level), id)
    monkeypatch.setattr(CodecModel, "open", lambda *_: pytest.fail("nothing must be loaded"))
    with refused("code-out-of-range", kind=InvalidCode) as raised:
        resynthesis.resynthesize(ResynthesizeRequest(codec_bundle, folder, tmp_path / "out", device="cpu"))
    error = raised.value
    assert error.message == (f"{folder}/codes-00000.safetensors, b: frame 17, level {level}: id {id} is not in a "
                             f"codebook of {size} entries; 1 of 4 utterances have such ids")
    assert (error.position, error.level, error.id) == ((17,), level, id)
    assert [each.name for each in tmp_path.iterdir()] == ["codes"]


@pytest.mark.parametrize("changed, difference", [
    ({"codec": "ab" * 32}, "codec abababababab... instead of c0dec0000000..."),
    ({"sizes": (50, 10), "codec": "ab" * 32}, "sizes (50, 10) instead of (50, 20), codec ababab"),
    ({"frame_rate": 25.0}, "frame_rate 25.0 instead of 50.0"),
])
def test_codes_of_another_codec_are_refused(codec_bundle, tmp_path, capsys, changed, difference):
    books = Books(**(toy_codec.BOOKS.to_dict() | {"sizes": toy_codec.SIZES} | changed))
    with writing(tmp_path / "codes", books) as out:
        out.add("a", [[1, 2]])
    said = error_of(capsys, codec_bundle, tmp_path / "codes", "--to", tmp_path / "out")
    assert f"manifest.json has codes of another codec: {difference}" in said
    assert "create them again with this codec, or use the codec that created them" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_shard_is_reported_by_name_and_no_file_is_written(codec_bundle, tmp_path, capsys, damage):
    path = codes(tmp_path / "codes") / "codes-00000.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    said = error_of(capsys, codec_bundle, tmp_path / "codes", "--to", tmp_path / "out")
    assert f"{path} is damaged: it is not the file that manifest.json describes; copy or create" in said
    assert not (tmp_path / "out").exists()


def test_only_a_folder_of_sounds_is_replaced_and_only_with_force(codec_bundle, tmp_path, capsys):
    folder, out = codes(tmp_path / "codes"), tmp_path / "out"
    words = codec_bundle, folder, "--to", out
    resynthesize(*words)
    assert "[output-exists]" in error_of(capsys, *words)
    resynthesize(*words, "--format", "flac", "--force")
    assert not any(out.glob("*.wav")) and len(list(out.glob("*.flac"))) == 4
    (out / "notes.txt").write_text("years of listening")
    assert "not part of a folder of resynthesized audio: notes.txt, so" in error_of(capsys, *words, "--force")
    (out / "resynthesis.json").unlink()  # what is left could as well be somebody's corpus
    assert "out is neither a folder of resynthesized audio nor empty" in error_of(capsys, *words, "--force")
    assert len(list(out.glob("*.flac"))) == 4 and (out / "notes.txt").is_file()
    assert "is not replaced" in error_of(capsys, codec_bundle, folder, "--to", folder, "--force")


def test_memory_holds_one_window_of_codes(codec_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(resynthesis, "AT_ONCE_SECONDS", 1.0)
    folder, made, held = codes(tmp_path / "codes", [f"u{i}" for i in range(40)]), [], []
    read = Codes.__getitem__

    def noted(self, index):
        found = read(self, index)
        made.append(weakref.ref(found))
        held.append(sum(each() is not None for each in made))
        return found

    monkeypatch.setattr(Codes, "__getitem__", noted)
    resynthesize(codec_bundle, folder, "--to", tmp_path / "out")
    assert len(held) == 80, "each is checked, then decoded"
    assert max(held) <= 6


def test_an_interrupted_command_leaves_no_folder(codec_bundle, tmp_path, monkeypatch):
    def full(*_):
        raise SbkitError("disk-full", "the disk is full")

    monkeypatch.setattr(resynthesis, "write_sound", full)
    with refused("disk-full"):
        resynthesis.resynthesize(ResynthesizeRequest(codec_bundle, codes(tmp_path / "codes"), tmp_path / "out"))
    assert [each.name for each in tmp_path.iterdir()] == ["codes"]
