"""Recordings without any list of them: a corpus for what learns without texts."""

import pytest
from sounds import encoded, speechlike

from sbkit.data.corpus import Corpus
from sbkit.errors import SbkitError


def folder(home, *names):
    for i, name in enumerate(names):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(speechlike(0.5 + 0.1 * i, seed=i), 16_000))
    return home


def prepared(tmp_path, source, **options):
    return Corpus(source, folder=tmp_path / "manifests", **options).prepare(needs_text=False)


def test_all_below_a_folder_is_one_split_and_paths_are_ids(tmp_path):
    source = folder(tmp_path / "c", "anna/1.wav", "anna/2.WAV", "ben/1.wav", "ben/1.flac", "notes/readme.txt")
    found = prepared(tmp_path, source, only=["train"])["train"]
    assert list(found.ids) == ["anna/1", "anna/2", "ben/1.flac", "ben/1.wav"]
    assert found.durations.tolist() == pytest.approx([0.5, 0.6, 0.8, 0.7], abs=0.01)
    assert set(found.texts) == {""} and found.wavs[0] == str(source / "anna" / "1.wav")


def test_folders_named_after_splits_are_splits(tmp_path):
    source = folder(tmp_path / "c", "train/1.wav", "train/ben/2.wav", "validation/1.wav", "Test/3.wav", "aside/4.wav")
    (source / "eval").mkdir()
    found = prepared(tmp_path, source)
    assert {split: list(rows.ids) for split, rows in found.items()} == {
        "train": ["1", "ben/2"], "dev": ["1"], "test": ["3"]}


def test_a_recording_that_comes_is_noticed(tmp_path):
    source = folder(tmp_path / "c", "a/1.wav", "b/1.wav")
    assert len(prepared(tmp_path, source, only=["train"])["train"]) == 2
    folder(tmp_path / "c", "b/2.wav")
    assert len(prepared(tmp_path, source, only=["train"])["train"]) == 3


def test_where_texts_are_needed_they_are_asked_for(tmp_path):
    source = folder(tmp_path / "c", "train/1.wav", "dev/1.wav", "test/1.wav")
    with pytest.raises(SbkitError, match="has recordings, and no list of them that says what is said"):
        Corpus(source, folder=tmp_path / "manifests").prepare()
