"""Folders whose layout says what they are: LibriSpeech, VoxCeleb, VoiceBank-DEMAND, and recordings alone."""

import corpora
import pytest
from refusals import refused

from sbkit.data.columns import LabelColumn, SignalColumn
from sbkit.data.corpus import Corpus
from sbkit.data.sources import open_source

KNOWN = [f"id{10000 + number}" for number in range(1, 12)]


def folder(home, *names):
    for i, name in enumerate(names):
        corpora.recording(home / name, 0.5 + 0.1 * i, seed=i)
    return home


def voxceleb(home, *speakers, below="wav", videos=("5r0dWxy17C8", "x6uYqmx31kE")):
    for speaker in speakers:
        for number, video in enumerate(videos):
            path = home / below / speaker / video / f"{number + 1:05}.wav"
            corpora.recording(path, 0.5, hash((speaker, video)) % 1000)
    return home


def prepared(source, where, declared=None, **options):
    corpus = Corpus(source, folder=where, **options)
    return corpus, corpus.prepare(show_progress=False, needs_text=False, columns=declared)


def by_speaker(source, where):
    return prepared(source, where, {"speaker": LabelColumn()})[1]


def with_clean(source, where, name="clean_wav"):
    return prepared(source, where, {"clean": SignalColumn(or_recording=True)}, columns={"clean": name})


@pytest.mark.parametrize("clip", ["/etc/passwd", "19/198-0000", "a\0b", "a\x1b]0;b"])
def test_an_id_of_librispeech_that_can_name_no_recording_is_left_out(tmp_path, clip):
    chapter = tmp_path / "train-clean-100" / "19" / "198"
    corpora.recording(chapter / "19-198-0000.flac", 0.5, 0)
    (chapter / "19-198.trans.txt").write_text(f"19-198-0000 GOOD\n{clip} BAD\n")
    rows = open_source(tmp_path, cache=tmp_path / "cache").read("train", False)
    assert list(rows.ids) == ["19-198-0000"]
    [(line, reason)] = rows.malformed
    assert line == "19-198.trans.txt line 2" and "can't name a recording" in reason and repr(clip) in reason


@pytest.mark.parametrize("inside", ["", "LibriSpeech"])
def test_librispeech_is_read_by_its_lists_with_all_parts_of_train(tmp_path, inside):
    parts = ("train-clean-100", "train-other-500", "dev-clean", "dev-other", "test-clean", "test-other")
    for part, speaker in zip(parts, ("19", "20", "30", "31", "40", "41"), strict=True):
        chapter = tmp_path / inside / part / speaker / "198"
        said = {f"{speaker}-198-{number:04}": f"SENTENCE {speaker} {number}" for number in range(3)}
        for number, name in enumerate(said):
            corpora.recording(chapter / f"{name}.flac", 0.5, int(speaker) + number)
        text = "".join(f"{name} {words}\n" for name, words in said.items())
        (chapter / f"{speaker}-198.trans.txt").write_bytes(text.encode() + b"\xff\xfe x\n" * (speaker == "19"))
    (chapter.parents[2] / "SPEAKERS.TXT").write_text("19 | F | train-clean-100\n")
    corpus = Corpus(tmp_path, folder=tmp_path / "made", language="und")
    found = corpus.prepare(show_progress=False)
    assert {split: sorted(set(rows.speakers)) for split, rows in found.items()} == {
        "train": ["19", "20"], "dev": ["30"], "test": ["40"]}
    assert len(found["train"]) == 6 and found["dev"].texts[0].casefold() == "sentence 30 0"
    assert "19-198.trans.txt line 4" in (tmp_path / "made" / "left_out.csv").read_text()
    other = Corpus(tmp_path, folder=tmp_path / "other", language="und", splits={"test": "test-other"})
    assert set(other.prepare(show_progress=False)["test"].speakers) == {"41"}
    assert corpus.report["source"]["kind"] == "LibriSpeech"


@pytest.mark.parametrize("make", [
    lambda home: folder(home, "train/1.wav", "dev/1.wav", "test/1.wav"),
    lambda home: voxceleb(home, *KNOWN, "id10270"),
    corpora.voicebank], ids=["alone", "VoxCeleb", "VoiceBank"])
def test_where_texts_are_needed_it_is_said_that_there_are_none(tmp_path, make):
    corpus = Corpus(make(tmp_path / "c"), folder=tmp_path / "m")
    for act in (lambda: corpus.prepare(show_progress=False), lambda: corpus.check_source(True, {})):
        with refused("missing-text"):
            act()
    corpus.check_source(False, {})


@pytest.mark.parametrize(("make", "add", "split"), [
    (lambda home: folder(home, "a/1.wav", "b/1.wav"), lambda home: folder(home, "b/2.wav"), "train"),
    (lambda home: voxceleb(home, *KNOWN, "id10270"), lambda home: voxceleb(home, "id10270", videos=("third",)),
     "test")], ids=["alone", "VoxCeleb"])
def test_a_recording_that_comes_is_noticed(tmp_path, make, add, split):
    counts = [len(prepared(each(tmp_path / "c"), tmp_path / "m", only=[split])[1][split]) for each in (make, add)]
    assert counts == [2, 3]


# ---------------------------------------------------------------- recordings alone


def test_all_below_a_folder_is_one_split_and_paths_are_ids(tmp_path):
    source = folder(tmp_path / "c", "anna/1.wav", "anna/2.WAV", "ben/1.wav", "ben/1.flac", "notes/readme.txt")
    found = prepared(source, tmp_path / "m", only=["train"])[1]["train"]
    assert list(found.ids) == ["anna/1", "anna/2", "ben/1.flac", "ben/1.wav"]
    assert found.durations.tolist() == pytest.approx([0.5, 0.6, 0.8, 0.7], abs=0.01)
    assert set(found.texts) == {""} and found.wavs[0] == str(source / "anna" / "1.wav")


def test_folders_named_after_splits_are_splits(tmp_path):
    source = folder(tmp_path / "c", "train/1.wav", "train/ben/2.wav", "validation/1.wav", "Test/3.wav", "aside/4.wav")
    (source / "eval").mkdir()
    found = prepared(source, tmp_path / "m")[1]
    assert {split: list(rows.ids) for split, rows in found.items()} == {
        "train": ["1", "ben/2"], "dev": ["1"], "test": ["3"]}


# ---------------------------------------------------------------- VoxCeleb


def test_a_recordings_id_is_its_name_in_lists_of_trials_and_each_has_its_speaker(tmp_path):
    found = by_speaker(voxceleb(tmp_path / "vox", *KNOWN, "id10270"), tmp_path / "m")
    assert list(found["test"].ids) == ["id10270/5r0dWxy17C8/00001", "id10270/x6uYqmx31kE/00002"]
    assert all(name.startswith(speaker) for rows in found.values()
               for name, speaker in zip(rows.ids, rows.speakers, strict=True))


def test_dev_and_test_have_speakers_that_training_does_not_have_wherever_their_folders_are(tmp_path):
    source = voxceleb(tmp_path / "vox", *KNOWN, "id10309", below="one/wav")
    voxceleb(source, *KNOWN, below="two/wav", videos=("another",))
    voxceleb(source, "id00017", below="test/aac")
    found = by_speaker(source, tmp_path / "m")
    speakers = {split: set(rows.speakers) for split, rows in found.items()}
    assert speakers["test"] == {"id10309", "id00017"} and len(speakers["dev"]) == 2
    assert speakers["train"] | speakers["dev"] == set(KNOWN) and not speakers["train"] & speakers["dev"]
    assert len(found["train"]) + len(found["dev"]) == 3 * len(KNOWN)


# ---------------------------------------------------------------- VoiceBank-DEMAND


def test_pairs_are_found_by_their_names_and_all_training_sets_are_one(tmp_path):
    source = corpora.voicebank(tmp_path / "vb")
    for kind in ("noisy", "clean"):
        corpora.recording(source / f"{kind}_trainset_56spk_wav" / "p234_001.wav")
    corpus, found = with_clean(source, tmp_path / "m")
    assert corpus.report["source"]["kind"] == "VoiceBank-DEMAND"
    assert {name: sorted(set(rows.speakers)) for name, rows in found.items()} == {
        "train": ["p225", "p227", "p234"], "dev": ["p226"], "test": ["p232"]}
    assert sorted(found["test"].ids) == ["p232_001", "p232_002"]
    for name, kind in (("train", "trainset_"), ("test", "testset_wav/")):
        for wav, clean in zip(found[name].wavs, found[name].column("clean"), strict=True):
            assert wav.startswith(f"{source}/noisy_{kind}") and clean == wav.replace("/noisy_", "/clean_")


def test_a_pair_without_its_clean_half_is_left_out_and_named(tmp_path):
    source = corpora.voicebank(tmp_path / "vb")
    (source / "clean_testset_wav" / "p232_001.wav").unlink()
    corpus, found = with_clean(source, tmp_path / "m")
    assert list(found["test"].ids) == ["p232_002"]
    [example] = corpus.report["splits"]["test"]["left_out"]["missing clip"]["examples"]
    assert example == f"p232_001: clean: {source}/clean_testset_wav/p232_001.wav"


def test_a_clean_column_under_a_name_that_it_does_not_have_is_refused(tmp_path):
    with refused("missing-column"):
        with_clean(corpora.voicebank(tmp_path / "vb"), tmp_path / "m", "wet_wav")
