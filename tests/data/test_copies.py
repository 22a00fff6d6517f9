"""Copies are found by their sound, whatever was done to them, and left out of training; what is no copy stays."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpora import prepared
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import encoded, real_data

from sbkit.data import copies as module
from sbkit.data.audio import read_audio, resample
from sbkit.data.copies import RATE, STRIDE, Copies, Index, fingerprint
from sbkit.data.demo_voice import speak
from sbkit.data.manifest import Column

pytest.importorskip("espeakng_loader")

WORDS = ("old farmer opens the window", "nine students look for candles", "brother never closes that door",
         "teacher carries two yellow chairs", "doctor paints the garden fence")
VOICES = ("en-us+f2", "en-us+m3", "en-gb-scotland+m1", "en-us+croak")


@functools.cache
def spoken(sentence: int, voice: int = 0) -> np.ndarray:
    signal, rate = speak(f"the {WORDS[sentence]} before breakfast", VOICES[voice])
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
            ("voice.wav", wav(spoken(0, 1))), ("other.wav", wav(spoken(3))), ("fourth.wav", wav(spoken(4))),
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


def left_out(folder: Path) -> dict[str, tuple[str, str]]:
    with open(folder / "left_out.csv", newline="") as file:
        return {row["ID"]: (row["reason"], row["detail"]) for row in csv.DictReader(file)}


def test_without_asking_nothing_is_compared(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "block_hash", lambda *_: pytest.fail("a file was read"))
    _, manifests = prepared(source, tmp_path / "m")
    assert len(manifests["train"]) == 11


def test_the_same_bytes_under_another_name_are_left_out_of_training(source, tmp_path):
    corpus, manifests = prepared(source, tmp_path / "m", check_audio="all")
    assert left_out(tmp_path / "m") == {"bytes-copy.wav": ("also in dev or test", "is test: a.wav")}
    assert len(manifests["train"]) == 10
    assert not [each for each in corpus.report["leaks"] if each["what"] == "copies"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [False, True])
def test_copies_by_sound_are_left_out_of_training_and_named_in_dev(source, tmp_path, processes, monkeypatch):
    if processes:
        monkeypatch.setattr(module, "WORTH_PROCESSES", 1)
        monkeypatch.setattr(module, "CHUNK", 2)
    corpus, manifests = prepared(source, tmp_path / "m", check_audio="decode", workers=2 if processes else 1)
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
    assert "copies, such as d.wav = test: a.wav: the same audio twice" in said
    assert "not an error" in said, "they all say the same"
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
            starts, durations = np.zeros(len(wavs)), np.full(len(wavs), 2)
            answer = found.search(split, wavs, wavs, starts, durations, keep=split == "test")
        return answer

    search(4)
    assert read == ["mp3-copy.mp3", "quiet-copy.flac", "cut-copy.wav"], "the first has the same bytes"
    copies, broken = search(9)
    assert read == ["telephone-copy.wav", "louder-copy.opus", "voice.wav", "other.wav", "fourth.wav"]
    assert sorted(copies) == [0, 2, 3, 4] and not broken


# ---------------------------------------------------------------- by sound


def fingerprinted(signal: np.ndarray, stride: int = 1) -> np.ndarray:
    return fingerprint(resample(signal, 16_000, RATE), stride)


def index_of(*signals: np.ndarray) -> Index:
    found = Index()
    for signal in signals:
        found.add(fingerprinted(signal))
    return found


@functools.cache
def index() -> Index:
    """All sentences of the first two voices, by number: 0 to 5."""
    return index_of(*(spoken(sentence, voice) for voice in (0, 1) for sentence in range(3)))


def find(signal: np.ndarray, among: Index | None = None) -> int | None:
    return (among or index()).find(fingerprinted(signal, STRIDE))


def decoded(signal: np.ndarray, kind: str, **options) -> np.ndarray:
    return read_audio(encoded(signal, 16_000, kind, **options))


def noisy(signal: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(len(signal)) * signal.std()
    return (signal + 0.3 * noise).astype(np.float32)


@pytest.mark.parametrize("change", [
    lambda x: x, lambda x: decoded(x, "mp3"), lambda x: decoded(x, "mp3", compression_level=0.99),
    lambda x: decoded(x, "opus", compression_level=0.9), lambda x: decoded(x, "ogg", compression_level=0.99),
    lambda x: resample(resample(x, 16_000, 8_000), 8_000, 16_000), noisy, lambda x: np.clip(4 * x, -0.9, 0.9),
    lambda x: resample(x, 16_000, 16_100),
], ids=["itself", "mp3", "mp3 at its worst", "opus", "vorbis", "8 kHz", "noise", "clipped", "slower by 0.6 %"])
def test_a_copy_is_found(change):
    for sentence in range(3):
        assert find(change(spoken(sentence, 1))) == 3 + sentence


@settings(max_examples=60)
@given(st.integers(0, 5), st.integers(0, 16_000), st.integers(0, 12_000), st.floats(1e-4, 1.0), st.integers(0, 20_000))
def test_any_cut_of_at_least_half_at_any_loudness_is_found_with_silence_around_it(number, first, last, gain, quiet):
    signal = spoken(number % 3, number // 3)
    part = signal[min(first, len(signal) // 4) : len(signal) - min(last, len(signal) // 4)]
    assert find(np.pad(gain * part, (quiet, quiet)).astype(np.float32)) == number


def test_the_whole_of_which_a_part_is_searched_is_found():
    assert find(spoken(0), index_of(spoken(0)[8_000:32_000])) == 0


def test_other_voices_and_other_sentences_are_no_copies():
    assert [find(spoken(sentence, voice)) for sentence in range(3) for voice in (2, 3)] == [None] * 6
    assert [find(spoken(i), index_of(spoken(0))) for i in (1, 2)] == [None] * 2


def test_what_cannot_be_compared_is_no_copy():
    for signal in (np.zeros(0), np.zeros(48_000), np.zeros(100), spoken(0)[8_000:16_000]):
        found = fingerprinted(signal.astype(np.float32))
        assert Index().find(found[:, ::STRIDE]) is None
        index().add(found)
        assert index().find(found[:, ::STRIDE]) is None
    assert find(spoken(2, 1)) == 5, "others are found as before"


@pytest.mark.slow
def test_a_sound_that_many_recordings_have_is_still_found():
    assert find(spoken(0), index_of(*[spoken(0)] * 200)) is not None


def test_one_speaker_who_says_two_words_again_and_again_makes_no_copies():
    files = sorted((real_data("yesno") / "en" / "clips").iterdir())
    own = Index()
    for file in files:
        found = fingerprint(read_audio(file, sample_rate=RATE))
        assert own.find(found[:, ::STRIDE]) is None
        own.add(found)
