"""VoxCeleb's folders: who speaks, which split they are in, and ids as lists of trials name them."""

import pytest
from sounds import encoded, speechlike

from sbkit.data.columns import LabelColumn
from sbkit.data.corpus import Corpus
from sbkit.errors import SbkitError

KNOWN = [f"id{10000 + number}" for number in range(1, 12)]


def voxceleb(home, *speakers, folder="wav", videos=("5r0dWxy17C8", "x6uYqmx31kE")):
    for speaker in speakers:
        for number, video in enumerate(videos):
            path = home / folder / speaker / video / f"{number + 1:05}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(speechlike(0.5, seed=hash((speaker, video)) % 1000), 16_000))
    return home


def prepared(tmp_path, source):
    corpus = Corpus(source, folder=tmp_path / "manifests")
    return corpus.prepare(needs_text=False, columns={"speaker": LabelColumn()})


def test_a_recordings_id_is_its_name_in_lists_of_trials_and_each_has_its_speaker(tmp_path):
    found = prepared(tmp_path, voxceleb(tmp_path / "vox", *KNOWN, "id10270"))
    assert list(found["test"].ids) == ["id10270/5r0dWxy17C8/00001", "id10270/x6uYqmx31kE/00002"]
    assert set(found["test"].speakers) == {"id10270"} and found["test"].durations == pytest.approx([0.5, 0.5], abs=0.01)
    assert all(name.startswith(speaker) for rows in found.values()
               for name, speaker in zip(rows.ids, rows.speakers, strict=True))


def test_dev_and_test_have_speakers_that_training_does_not_hear(tmp_path):
    source = voxceleb(tmp_path / "vox", *KNOWN, "id10309")
    voxceleb(source, "id00017", folder="test/aac")
    speakers = {split: set(rows.speakers) for split, rows in prepared(tmp_path, source).items()}
    assert speakers["test"] == {"id10309", "id00017"} and len(speakers["dev"]) == 2
    assert speakers["train"] | speakers["dev"] == set(KNOWN) and not speakers["train"] & speakers["dev"]


def test_a_speaker_in_two_folders_is_in_one_split(tmp_path):
    source = voxceleb(tmp_path / "vox", *KNOWN, "id10270", folder="one/wav")
    voxceleb(source, *KNOWN, folder="two/wav", videos=("another",))
    found = prepared(tmp_path, source)
    assert not set(found["train"].speakers) & set(found["dev"].speakers)
    assert len(found["train"]) + len(found["dev"]) == 3 * len(KNOWN)


def test_a_recording_that_comes_is_noticed(tmp_path):
    source = voxceleb(tmp_path / "vox", *KNOWN, "id10270")
    assert len(prepared(tmp_path, source)["test"]) == 2
    voxceleb(source, "id10270", videos=("third",))
    assert len(prepared(tmp_path, source)["test"]) == 3


def test_who_needs_texts_is_told_that_there_are_none(tmp_path):
    source = voxceleb(tmp_path / "vox", *KNOWN, "id10270")
    with pytest.raises(SbkitError, match="VoxCeleb, which doesn't say what is said"):
        Corpus(source, folder=tmp_path / "manifests").prepare()
