"""LJSpeech's layout: a list without a header and without splits."""

import json
from collections import Counter

import pytest
from corpora import prepared
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data.corpus import Corpus

SOUND = encoded(speechlike(0.5), 16_000)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def folder(home, lines, suffix=".wav", missing=()):
    """A corpus of these lines, with the recordings of all ids but the ``missing``."""
    (home / "wavs").mkdir(parents=True)
    (home / "metadata.csv").write_bytes("\n".join(lines).encode() + b"\n")
    for line in lines:
        name = line.split("|")[0].removeprefix("wavs/").removesuffix(suffix)
        if name not in missing:
            (home / "wavs" / f"{name}{suffix}").write_bytes(SOUND)
    return home


def everything(found):
    """The texts of all splits by id."""
    return {id_: text for rows in found.values() for id_, text in zip(rows.ids, rows.texts, strict=True)}


def test_normalised_texts_are_taken_and_nothing_is_quoted(tmp_path):
    lines = [f'LJ-{i}|Dr. "{each}|Doctor "{each}' for i, each in enumerate(LETTERS)]
    lines[3] = "LJ-3|Only this.|"
    source = folder(tmp_path / "c", lines)
    corpus, found = prepared(source, tmp_path / "m")
    texts = everything(found)
    assert len(texts) == len(LETTERS) and texts["LJ-7"] == "doctor h" and texts["LJ-3"] == "only this"
    train = found["train"]
    assert train.wavs[0] == str(source / "wavs" / f"{train.ids[0]}.wav") and set(train.speakers) == {""}
    assert train.durations.tolist() == pytest.approx([0.5] * len(train))
    assert corpus.report["source"]["kind"] == "LJSpeech"


def test_paths_in_the_place_of_ids_and_two_fields(tmp_path):
    lines = [f"wavs/{each}.flac|This is {each}" for each in LETTERS]
    source = folder(tmp_path / "c", lines, suffix=".flac")
    _, found = prepared(source, tmp_path / "m")
    assert everything(found) == {each: f"this is {each}" for each in LETTERS}
    assert found["dev"].wavs[0] == str(source / "wavs" / f"{found['dev'].ids[0]}.flac")


def test_rows_that_are_unusable_are_reported_and_counted(tmp_path):
    lines = [f"{each}|Text {each}|Text {each}" for each in LETTERS]
    lines += ["x1|no third field", "one field", "a|Text a|Text a", "x2|Gone|Gone", "x3||", "|No id|No id", "",
              "x4|a|b|c"]
    source = folder(tmp_path / "c", lines, missing=("x2", "", "one field"))
    with open(source / "metadata.csv", "ab") as file:
        file.write(b"x5|caf\xe9|caf\xe9\n")
    corpus, found = prepared(source, tmp_path / "m")
    assert set(everything(found)) == set(LETTERS)
    splits = json.loads(corpus.report_path.read_text())["splits"]
    left_out = Counter()
    for entry in splits.values():
        left_out.update({reason: rows["count"] for reason, rows in entry["left_out"].items()})
    assert left_out == {"malformed row": 5, "repeated id": 1, "missing clip": 1, "no text": 1}
    assert sum(entry["rows"] for entry in splits.values()) == 26 + 8
    shown = splits["train"]["left_out"]["malformed row"]["examples"]
    assert set(shown) == {"metadata.csv line 27: 2 fields instead of 3", "metadata.csv line 28: 1 field instead of 3",
                         "metadata.csv line 32: no id", "metadata.csv line 34: 4 fields instead of 3",
                         "metadata.csv line 35: not UTF-8"}


def test_speakers_in_the_third_field_are_asked_about_and_taken_by_number(tmp_path):
    lines = [f"{each}|Text {each}|{'anna' if i % 2 else 'ben'}" for i, each in enumerate(LETTERS)]
    source = folder(tmp_path / "c", lines)
    with refused("ambiguous-columns") as caught:
        prepared(source, tmp_path / "m")
    assert "--corpus.columns '{text: 2, speaker: 3}'" in caught.value.hint
    _, found = prepared(source, tmp_path / "m", columns={"text": 2, "speaker": 3})
    assert set(found["train"].speakers) == {"anna", "ben"} and everything(found)["c"] == "text c"


@pytest.mark.parametrize("columns", [
    {"text": "raw"}, {"speaker": 0},
    {"speaker": 4}, {"duration": 2}], ids=str)
def test_fields_that_do_not_exist_are_refused(tmp_path, columns):
    source = folder(tmp_path / "c", [f"{each}|{each}|{each}" for each in LETTERS])
    with refused("bad-value"):
        prepared(source, tmp_path / "m", columns=columns)


def test_more_fields_than_ljspeech_has_are_asked_about(tmp_path):
    source = folder(tmp_path / "c", [f"{each}|{each}|{each}|anna" for each in LETTERS])
    with refused("ambiguous-columns"):
        prepared(source, tmp_path / "m")
    _, found = prepared(source, tmp_path / "m", columns={"text": 3, "speaker": 4})
    assert set(found["test"].speakers) == {"anna"}


def test_a_list_with_a_header_and_one_beside_train_csv_are_csvs(tmp_path):
    lines = ["ID,duration,wav,wrd", "a,0.5,wavs/a.wav,some text"]
    source = folder(tmp_path / "c", ["a|b|c"])
    (source / "metadata.csv").write_text("\n".join(lines))
    assert Corpus(source).names() == ["metadata"]
    folder(tmp_path / "d", ["a|b|c"])
    (tmp_path / "d" / "train.csv").write_text("\n".join(lines))
    assert Corpus(tmp_path / "d").names() == ["metadata", "train"]


def test_a_list_that_changes_is_noticed(tmp_path):
    source = folder(tmp_path / "c", [f"{each}|{each}" for each in LETTERS])
    corpus, _ = prepared(source, tmp_path / "m")
    (source / "metadata.csv").write_text("\n".join(f"{each}|the letter {each}" for each in LETTERS))
    assert everything(corpus.prepare())["k"] == "the letter k"
