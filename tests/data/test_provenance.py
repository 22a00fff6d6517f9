"""Whether a prepared corpus says that people or a synthesiser spoke, whatever kind of source it was read from."""

import csv
import json
import tarfile

import pytest
from corpora import common_voice, prepared, recording

from sbkit.data.corpus import Corpus
from sbkit.data.mixture import Mixture
from sbkit.data.provenance import describe

SPLITS = {"train": ["one sentence", "two sentences", "three"], "dev": ["a dev sentence"], "test": ["a test sentence"]}
PEOPLE = "recordings of people"
UNKNOWN = "it doesn't say whether people or a synthesiser spoke"
ESPEAK = "speech synthesised by espeak-ng (no recordings of people)"


@pytest.fixture
def release(tmp_path):
    return common_voice(tmp_path / "release", **SPLITS)


@pytest.fixture
def demo(tmp_path):
    """As ``sbkit demo-data`` leaves it."""
    folder = common_voice(tmp_path / "demo", **SPLITS)
    (folder / "demo.json").write_text(json.dumps({"format": 1, "synthetic": "espeak-ng"}))
    return folder


def as_csv(corpus, folder, kind="csv"):
    """Lists of a corpus's recordings."""
    folder.mkdir()
    for split, manifest in prepared(corpus, folder / "prepared")[1].items():
        rows = [{"ID": row.id, "wav": row.wav, "wrd": row.text} for row in map(manifest.row, range(len(manifest)))]
        with open(folder / f"{split}.{kind}", "w", newline="") as file:
            if kind == "csv":
                writer = csv.DictWriter(file, ["ID", "wav", "wrd"])
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.writelines(json.dumps({"audio_filepath": row["wav"], "text": row["wrd"]}) + "\n" for row in rows)
    return folder


def test_common_voice_is_people_and_names_how_many_spoke(release, tmp_path):
    report = prepared(release, tmp_path / "m")[0].prepared
    assert describe(report) == f"Common Voice: {PEOPLE}"
    assert report["splits"]["train"]["speakers"] == 3 and report["splits"]["dev"]["speakers"] == 1
    assert report["splits"]["train"]["synthesised"] == {}


def test_the_demo_corpus_is_speech_that_was_synthesised(demo, tmp_path):
    corpus = prepared(demo, tmp_path / "m")[0]
    assert describe(corpus.prepared) == f"{ESPEAK}, in the layout of Common Voice"
    assert corpus.summary().startswith(f"{ESPEAK}: {demo}\n")
    train = corpus.prepared["splits"]["train"]
    assert train["synthesised"] == {"espeak-ng": pytest.approx(train["hours"])} and train["hours"] > 0


@pytest.mark.parametrize(("kind", "name"), [("csv", "SpeechBrain CSV"), ("jsonl", "JSON lines")])
def test_lists_of_its_clips_are_synthesised_too_and_other_lists_do_not_say(demo, release, tmp_path, kind, name):
    spoken, people = as_csv(demo, tmp_path / "spoken", kind), as_csv(release, tmp_path / "people", kind)
    assert describe(prepared(spoken, tmp_path / "m1")[0].prepared) == f"{ESPEAK}, in the layout of {name}"
    assert describe(prepared(people, tmp_path / "m2")[0].prepared) == f"{name}: {UNKNOWN}"


def test_what_is_partly_synthesised_says_which_share(demo, release, tmp_path):
    spoken, people = as_csv(demo, tmp_path / "spoken"), as_csv(release, tmp_path / "people")
    both = {split: [str(spoken / f"{split}.csv"), str(people / f"{split}.csv")] for split in ("train", "dev")}
    report = prepared({**both, "test": str(people / "test.csv")}, tmp_path / "m")[0].prepared
    assert describe(report) == "SpeechBrain CSV: 44.4 % of the audio is speech synthesised by espeak-ng"


def test_an_archive_of_common_voice_is_people(release, tmp_path):
    packed = tmp_path / "cv-corpus.tar.gz"
    with tarfile.open(packed, "w:gz") as file:
        file.add(release, arcname="cv-corpus/en")
    assert describe(prepared(packed, tmp_path / "m", language="en")[0].prepared) == f"Common Voice: {PEOPLE}"


def test_a_folder_of_recordings_alone_does_not_say(tmp_path):
    for split in ("train", "dev", "test"):
        recording(tmp_path / "audio" / split / "a.wav", seed=len(split))
    corpus = Corpus(tmp_path / "audio", folder=tmp_path / "m")
    corpus.prepare(show_progress=False, needs_text=False)
    assert describe(corpus.prepared) == f"recordings: {UNKNOWN}"


def test_a_mixture_counts_what_its_parts_have(demo, release, tmp_path):
    mixture = Mixture({"spoken": Corpus(demo), "people": Corpus(release)}, folder=tmp_path / "m")
    mixture.prepare(show_progress=False)
    assert describe(mixture.prepared) == "mixture: 50 % of the audio is speech synthesised by espeak-ng"
    assert mixture.prepared["splits"]["train"]["speakers"] == 6


def test_a_report_of_an_earlier_version_claims_nothing_but_knows_the_demo_by_its_record(demo, release, tmp_path):
    for corpus, expected in ((demo, f"{ESPEAK}, in the layout of Common Voice"), (release, "Common Voice")):
        report = prepared(corpus, tmp_path / corpus.parent.name / "m")[0].prepared
        del report["source"]["recorded"]
        for split in report["splits"].values():
            del split["speakers"], split["synthesised"]
        assert describe(report) == expected
