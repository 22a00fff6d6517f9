"""Copies that are planted in a corpus are found and named, and left out of training; what is no copy stays."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from sounds import encoded

from sbkit.data import copies as module
from sbkit.data.audio import resample
from sbkit.data.copies import Copies
from sbkit.data.corpus import Corpus
from sbkit.data.demo_voice import speak
from sbkit.data.manifest import Column

pytest.importorskip("espeakng_loader")

WORDS = ("old farmer opens the window", "nine students look for candles", "brother never closes that door",
         "teacher carries two yellow chairs", "doctor paints the garden fence")


@functools.cache
def spoken(sentence: int, voice: str = "en-us+f2") -> np.ndarray:
    signal, rate = speak(f"the {WORDS[sentence]} before breakfast", voice)
    return resample(signal, rate, 16_000)


def planted() -> dict[str, list[tuple[str, bytes]]]:
    """Recordings of each split by name: those whose names end with -copy are copies of dev's or test's."""
    def wav(signal):
        return encoded(signal, 16_000)

    first, second, third = spoken(0), spoken(1), spoken(2)
    telephone = resample(second, 16_000, 8_000)
    return {
        "test": [("a.wav", wav(first)), ("b.wav", wav(second))],
        "dev": [("c.wav", wav(third)), ("d.wav", encoded(first, 16_000, "mp3"))],
        "train": [
            ("bytes-copy.wav", wav(first)), ("mp3-copy.mp3", encoded(third, 16_000, "mp3")),
            ("quiet-copy.flac", encoded(0.05 * second, 16_000, "flac")), ("cut-copy.wav", wav(first[9_000:-3_000])),
            ("telephone-copy.wav", encoded(telephone, 8_000)),
            ("louder-copy.opus", encoded(np.clip(1.5 * third, -1, 1), 16_000, "opus")),
            ("voice.wav", wav(spoken(0, "en-us+m3"))), ("other.wav", wav(spoken(3))), ("fourth.wav", wav(spoken(4))),
            ("broken.wav", b""), ("size.wav", wav(first[::-1])),
        ],
    }


@pytest.fixture
def source(tmp_path) -> dict[str, str]:
    lists = {}
    for split, files in planted().items():
        lines = ["ID,wav,spk_id,wrd"]
        for name, data in files:
            path = tmp_path / "sounds" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            if name == "broken.wav":
                soundfile.write(path, np.full(32_000, np.nan), 16_000, subtype="FLOAT")  # only decoding shows that
            lines.append(f"{name},{path},{split},the same words")
        lists[split] = str(tmp_path / f"{split}.csv")
        Path(lists[split]).write_text("\n".join(lines) + "\n")
    return lists


def prepare(source, folder: Path, **options) -> tuple[Corpus, dict]:
    corpus = Corpus(source, folder=folder, **options)
    return corpus, corpus.prepare(show_progress=False)


def left_out(folder: Path) -> dict[str, tuple[str, str]]:
    with open(folder / "left_out.csv", newline="") as file:
        return {row["ID"]: (row["reason"], row["detail"]) for row in csv.DictReader(file)}


def test_without_asking_nothing_is_compared(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "block_hash", lambda *_: pytest.fail("a file was read"))
    _, manifests = prepare(source, tmp_path / "m")
    assert len(manifests["train"]) == 11


def test_the_same_bytes_under_another_name_are_left_out_of_training(source, tmp_path):
    corpus, manifests = prepare(source, tmp_path / "m", check_audio="all")
    assert left_out(tmp_path / "m") == {"bytes-copy.wav": ("also in dev or test", "is test: a.wav")}
    assert len(manifests["train"]) == 10
    assert not [each for each in corpus.report["leaks"] if each["what"] == "copies"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [False, True])
def test_copies_by_sound_are_left_out_of_training_and_named_in_dev(source, tmp_path, processes, monkeypatch):
    if processes:
        monkeypatch.setattr(module, "WORTH_PROCESSES", 1)
        monkeypatch.setattr(module, "CHUNK", 2)
    corpus, manifests = prepare(source, tmp_path / "m", check_audio="decode", workers=2 if processes else 1)
    out = left_out(tmp_path / "m")
    reason, cause = out.pop("broken.wav")
    assert reason == "undecodable" and cause
    assert out == {name: ("also in dev or test", f"is {of}") for name, of in (
        ("bytes-copy.wav", "test: a.wav"), ("mp3-copy.mp3", "dev: c.wav"), ("quiet-copy.flac", "test: b.wav"),
        ("cut-copy.wav", "test: a.wav"), ("telephone-copy.wav", "test: b.wav"), ("louder-copy.opus", "dev: c.wav"))}
    assert list(manifests["train"].ids) == ["voice.wav", "other.wav", "fourth.wav", "size.wav"]
    assert list(manifests["dev"].ids) == ["c.wav", "d.wav"], "what is scored isn't changed"
    [named] = [each for each in corpus.report["leaks"] if each["what"] == "copies"]
    assert named["examples"] == ["d.wav = test: a.wav"]
    said = corpus.summary()
    assert "d.wav = test: a.wav" in said and "copies: the same audio twice" in said
    assert "sentences: not an error" in said, "they all say the same"
    report = json.loads((tmp_path / "m" / "prepare_report.json").read_text())
    assert report["splits"]["train"]["rows"] == 11 and not list((tmp_path / "m").glob(".copies-*"))


def test_a_search_that_was_stopped_goes_on(source, tmp_path, monkeypatch):
    files = {split: [Path(source[split]).parent / "sounds" / split / name for name, _ in rows]
             for split, rows in planted().items()}
    read = []
    real = module.fingerprint_of
    monkeypatch.setattr(module, "fingerprint_of", lambda row, *how: read.append(Path(row[0]).name) or real(row, *how))

    def search(names: int):
        found = Copies(True, workers=1, journal=tmp_path / "journal", show_progress=False)
        for split in ("test", "train"):
            wavs = Column([str(path) for path in files[split]][: names if split == "train" else None])
            read.clear()
            durations = np.array([len(read_) for read_ in map(_signal, wavs)])
            answer = found.search(split, wavs, wavs, np.zeros(len(wavs)), durations, keep=split == "test")
        return answer

    _signal = lambda wav: range(2)  # noqa: E731 (two seconds of each)
    search(4)
    assert read == ["mp3-copy.mp3", "quiet-copy.flac", "cut-copy.wav"], "the first has the same bytes"
    copies, broken = search(9)
    assert read == ["telephone-copy.wav", "louder-copy.opus", "voice.wav", "other.wav", "fourth.wav"]
    assert sorted(copies) == [0, 2, 3, 4] and not broken
