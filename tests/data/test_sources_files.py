"""SpeechBrain's CSVs and JSON lines of every dialect."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import prepared, recording
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.sources import open_source


def read(path: Path, split: str = "train", **options):
    source = {split: path} if path.is_file() else path
    return open_source(source, cache=path.parent / "cache", **options).read(split, False)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- CSV


def test_speechbrains_csv(tmp_path):
    path = write(tmp_path / "train.csv", 'ID,duration,wav,spk_id,wrd,accent\n'
                 'a,1.5,$data_root/a.wav,s,"costs $word, or ""free""",x\nb,,sub/b.wav,s,text,\n')
    rows = read(tmp_path)
    assert list(rows.texts) == ['costs $word, or "free"', "text"]
    assert list(rows.wavs) == [f"{tmp_path}/a.wav", f"{tmp_path}/sub/b.wav"]
    np.testing.assert_array_equal(rows.durations, [1.5, np.nan])
    assert list(rows.meta["accent"]) == ["x", ""] and list(rows.speakers) == ["s", "s"]
    assert list(read(path, data_root="/data").wavs) == ["/data/a.wav", "/data/sub/b.wav"]


@pytest.mark.parametrize("rate", [1, 8000, 16000, 44100])
def test_starts_are_seconds_or_samples(tmp_path, rate):
    write(tmp_path / "train.csv", "ID,duration,wav,start,stop,wrd\n" + "".join(
        f"{i},2.0,a.wav,{i * rate},{(i + 2) * rate},x\n" for i in range(4)))
    rows = read(tmp_path)
    np.testing.assert_allclose(rows.starts, [0, 1, 2, 3])
    assert "stop" not in rows.meta


def test_a_stop_in_samples_says_how_long_a_row_without_a_duration_is(tmp_path):
    rows = read(write(tmp_path / "train.csv", "ID,duration,wav,start,stop,wrd\n"
                      "a,1.0,a.wav,16000,32000,x\nb,1.0,a.wav,0,16000,x\nc,,a.wav,32000,40000,x\n"))
    np.testing.assert_allclose(rows.starts, [1, 0, 2])
    np.testing.assert_allclose(rows.durations, [1, 1, 0.5])


def test_columns_with_our_names_that_are_not_used_stay_beside_ours(tmp_path):
    for name in "ab":
        recording(tmp_path / f"{name}.wav", 0.5)
    path = write(tmp_path / "train.csv", "ID,audio,wav,wrd,clean\nx,a.wav,b.wav,RAW,said\n")
    corpus, found = prepared({"train": path}, tmp_path / "m", columns={"text": "clean"})
    for manifest in found["train"], corpus.load()["train"]:
        row = manifest.row(0)
        assert (row.text, row.wav) == ("said", f"{tmp_path}/a.wav")
        assert row.meta == {"source_wav": "b.wav", "source_wrd": "RAW"}


def test_a_start_that_is_none_leaves_its_row_out_by_name(tmp_path):
    recording(tmp_path / "a.wav", 2.0)
    path = write(tmp_path / "train.csv", "ID,duration,wav,start,wrd\na,1.0,a.wav,-1,x\nb,1.0,a.wav,two,x\n"
                 "c,1.0,a.wav,,x\nd,1.0,a.wav,1.0,x\n")
    corpus, found = prepared({"train": path}, tmp_path / "m")
    assert list(found["train"].ids) == ["c", "d"]
    left_out = corpus.report["splits"]["train"]["left_out"]["malformed row"]
    assert left_out["count"] == 2 and left_out["examples"][0].startswith("a: its start")


@pytest.mark.parametrize("durations, rows", [(["1.0", "-1", "soon"], 2), (["2.0"] * 3, 0), ([""] * 3, 0)])
def test_rows_whose_duration_is_taken_from_the_audio_are_counted(tmp_path, durations, rows):
    lines = ["ID,duration,wav,wrd"]
    for i, duration in enumerate(durations):
        recording(tmp_path / f"{i}.wav", 1.0 + i)
        lines.append(f"{i},{duration},{i}.wav,x")
    corpus, found = prepared({"train": write(tmp_path / "train.csv", "\n".join(lines))}, tmp_path / "m")
    assert found["train"].durations.tolist() == [1.0, 2.0, 3.0]
    reported = f"train: the list has no duration above 0 for {rows} of 3 rows, so these were measured"
    assert (reported in corpus.summary()) == bool(rows) == ("measured" in corpus.summary())


def test_columns_under_other_names(tmp_path):
    path = write(tmp_path / "x.csv", "file,said\na.wav,hello\na.wav,twice\n")
    with refused("missing-column"):
        read(path)
    rows = read(path, columns={"text": "said"})
    assert list(rows.texts) == ["hello", "twice"] and list(rows.ids) == ["a", "a-2"]
    with refused("missing-column"):
        read(path, columns={"text": "gone"})


@pytest.mark.parametrize("separator", ["\t", "|"])
def test_a_csv_without_commas_is_suspected_of_another_separator(tmp_path, separator):
    path = write(tmp_path / "x.csv", separator.join(["ID", "wav", "wrd"]) + "\n")
    with refused("missing-column") as error:
        read(path)
    assert error.value.hint == f"its fields seem to be separated by {separator!r}: use commas, or tabs in a .tsv"


def test_semicolons_separate_what_a_spreadsheet_wrote(tmp_path):
    path = write(tmp_path / "x.csv", '\ufeff"ID";"wav";"wrd"\na;a.wav;"so, ""this"" too; yes"\nb;b.wav;"it""s"\n')
    assert list(read(path).texts) == ['so, "this" too; yes', 'it"s'] and list(read(path).ids) == ["a", "b"]
    [csv] = open_source({"train": path}, cache=tmp_path).parts["train"]
    assert csv.header(*csv.names()) == ["ID", "wav", "wrd"]
    write(path, "ID,wav,wrd,first;last\na,a.wav,one,two\n")
    assert list(read(path).meta) == ["first;last"]
    write(path, 'ID,"a;b;""c;d;e",wav,wrd\na,x,a.wav,one\n')
    assert list(read(path).meta) == ['a;b;"c;d;e']
    for said, more in ((";", "a,b,c,d,e"), (",", '"a;b;c;d;e"'), ("\t", "a;b,c")):
        rows = [f"\ufeffsep={said}\r\nID", "wav", "wrd", f"{more}\r\na", "a.wav", "one", "two\r\nb\r\n"]
        write(path, said.join(rows))
        assert list(read(path).texts) == ["one"] and list(read(path).meta) == [more.strip('"')]
        assert read(path).malformed == [("x.csv line 4", "1 fields instead of 4")]


def test_a_csv_without_a_header_is_told_so(tmp_path):
    with refused("missing-column") as error:
        read(write(tmp_path / "x.csv", "a/b.MP3,hello there\n"))
    assert error.value.hint == (
        "its first line seems to be a row: put one with the columns' names above it, such as ID,wav,wrd")


def test_a_named_tsv_has_tabs_and_no_quotation(tmp_path):
    source = open_source(write(tmp_path / "x.tsv", 'path\tsentence\na.wav\tso "this, too\n'), cache=tmp_path)
    [tsv] = source.parts["train"]
    assert source.names() == ["train"] and tsv.header(*tsv.names()) == ["path", "sentence"]
    assert list(source.read("train").texts) == ['so "this, too']


def test_paths_that_start_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "lists").mkdir()
    write(tmp_path / "data" / "a.wav", "x")
    path = write(tmp_path / "lists" / "train.csv", "ID,wav,wrd\na,data/a.wav,x\n")
    monkeypatch.chdir(tmp_path)
    assert list(read(path).wavs) == [f"{tmp_path}/data/a.wav"]


# ---------------------------------------------------------------- JSON lines

DIALECTS = {
    "nemo": {"audio_filepath": "a.wav", "duration": 2.5, "text": "hi", "offset": 1.0, "speaker": "s"},
    "espnet": {"utt_id": "u", "wav": "a.wav", "text": "hi", "spk": "s", "start": 1.0, "duration": 2.5},
    "hugging face": {"id": 7, "audio": "a.wav", "sentence": "hi", "speaker_id": "s", "offset": "1.0",
                     "duration": "2.5"},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects(tmp_path, dialect):
    write(tmp_path / "train.jsonl", json.dumps({**DIALECTS[dialect], "gender": "female", "age": None}) + "\n")
    rows = read(tmp_path)
    assert (rows.wavs[0], rows.texts[0], rows.speakers[0]) == (f"{tmp_path}/a.wav", "hi", "s")
    assert (rows.durations[0], rows.starts[0]) == (2.5, 1.0)
    assert rows.ids[0] == {"nemo": "a-1.00", "espnet": "u", "hugging face": "7"}[dialect]
    assert {name: list(column) for name, column in rows.meta.items()} == {"gender": ["female"]}


@pytest.mark.parametrize("whole", [
    {"u1": {"wav": "a.wav", "wrd": "x"}, "u2": {"wav": "b.wav", "wrd": "y"}},
    [{"id": "u1", "wav": "a.wav", "wrd": "x"}, {"id": "u2", "wav": "b.wav", "wrd": "y"}],
    {"u1": {"wav": "{data_root}/a.wav", "length": 1.0, "words": "x"},  # as SpeechBrain's templates write it
     "u2": {"wav": "{data_root}/b.wav", "length": 1.0, "words": "y"}}])
@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_or_array_of_all(tmp_path, whole, indent):
    write(tmp_path / "train.json", json.dumps(whole, indent=indent))
    rows = read(tmp_path)
    assert list(rows.ids) == ["u1", "u2"] and list(rows.texts) == ["x", "y"]
    assert list(rows.wavs) == [f"{tmp_path}/a.wav", f"{tmp_path}/b.wav"]


@pytest.mark.parametrize("words", [5, [{"word": "hi", "start": 0}]])
def test_words_that_are_no_text_are_none(tmp_path, words):
    write(tmp_path / "train.json", json.dumps({"u1": {"wav": "a.wav", "words": words}}))
    with refused("missing-column"):
        read(tmp_path)


def test_lines_that_cannot_be_used_are_named(tmp_path):
    path = write(tmp_path / "train.jsonl", "\n".join([
        '{"audio_filepath": "a.wav", "text": "x"}', "not json", "", '["no object"]', '{"text": "no path"}',
        '{"audio_filepath": "a.wav", "text": "x", "offset": "soon"}',
        '{"audio_filepath": "a.wav", "text": null, "duration": -1}',
        '{"audio_filepath": "a.wav", "text": null}']))
    rows = read(path)
    assert list(rows.texts) == ["x", ""] and list(rows.ids) == ["a", "a-2"]
    assert [where for where, _ in rows.malformed] == [f"train.jsonl line {i}" for i in (2, 4, 5, 6, 7)]
    assert rows.malformed[2][1] == "no audio path" and "not JSON" in rows.malformed[0][1]


def test_a_file_without_texts_or_paths_says_so_at_once(tmp_path):
    path = write(tmp_path / "train.jsonl", '{"audio_filepath": "a.wav", "said": "x"}\n')
    with refused("missing-column", file=path, key="text"):
        read(path)
    assert list(read(path, columns={"text": "said"}).texts) == ["x"]
    with refused("malformed-list", wording=False):
        read(write(tmp_path / "x.json", '{"a": {"wav": '))
    (tmp_path / "y.json").write_bytes(b'{"audio": "\xe9"}')
    with refused("malformed-list", wording=False):
        read(tmp_path / "y.json")


GOOD = json.dumps({"audio_filepath": "a.wav", "text": "x"}).encode()


@pytest.mark.parametrize("broken", [b'{"audio_filepath": "a.wav", "te', b"# made by hand", b"[]", b'"a text"', b"{}",
                                    b'{"audio_filepath": "\xe9.wav", "text": "x"}', b'{"a": {"b": 1}} rest',
                                    b'{"audio":' * 50_000, b"[" * 50_000,
                                    b'{"audio": "b.wav", "text": "x", "offset": ' + b"9" * 400 + b"}"],
                         ids=lambda broken: broken[:50].decode("latin-1"))
@pytest.mark.parametrize("at", [0, 1])
def test_a_broken_line_costs_itself_only_wherever_it_stands(tmp_path, broken, at):
    lines = [GOOD, GOOD]
    lines.insert(at, broken)
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    rows = read(path)
    assert len(rows) == 2 and [where for where, _ in rows.malformed] == [f"train.jsonl line {at + 1}"]


@pytest.mark.parametrize("content", [b"nothing\nof use\n", b'[\n{"wav": "a.wav", "text": "x"},\n{"wav": "b.wav"}\n',
                                     b'{"audio": "\xe9"}', b"\x00\x01\x02"])
def test_a_file_without_one_readable_line_is_refused(tmp_path, content):
    (tmp_path / "train.jsonl").write_bytes(content)
    with refused("malformed-list", wording=False):
        read(tmp_path / "train.jsonl")


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.dictionaries(
    st.sampled_from(["audio", "text", "duration", "offset", "id", "speaker", "age"]),
    st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)), max_size=5))
def test_every_line_is_a_row_or_malformed(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("j") / "train.jsonl"
    good = {"audio": "a.wav", "text": "x"}
    write(path, "".join(json.dumps(value) + "\n" for value in [good, *values]))
    rows = read(path)
    assert len(rows) + len(rows.malformed) == 1 + len(values)


# ---------------------------------------------------------------- which file is which


def test_a_split_may_be_several_files_of_any_kind(tmp_path):
    a = write(tmp_path / "a.csv", "ID,wav,wrd,accent\na,a.wav,x,north\n")
    b = write(tmp_path / "b.jsonl", '{"audio": "b.wav", "text": "y"}\nbroken\n')
    source = open_source({"train": [a, str(b)], "test": b}, cache=tmp_path)
    rows = source.read("train", False)
    assert source.names() == ["train", "test"] and source.kind == "SpeechBrain CSV + JSON lines"
    assert list(rows.texts) == ["x", "y"] and list(rows.meta["accent"]) == ["north", ""]
    assert [where for where, _ in rows.malformed] == ["b.jsonl line 2"]
    before = source.fingerprint()
    write(b, '{"audio": "b.wav", "text": "z"}\n')
    assert source.fingerprint() != before


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_shards_of_a_split_are_one_split_in_their_order(tmp_path, suffix, first):
    names = [f"train-{number:0{2 - first}}-of-11.{suffix}" for number in range(first, first + 11)]
    for i, name in enumerate(names):
        row = json.dumps({"audio": f"{i}.wav", "text": str(i)}) if suffix == "jsonl" else f"ID,wav,wrd\n{i},{i}.wav,{i}"
        write(tmp_path / name, row + "\n")
    write(tmp_path / f"dev.{suffix}", (tmp_path / names[0]).read_text())
    source = open_source(tmp_path, cache=tmp_path)
    assert sorted(source.names()) == ["dev", "train"] and source.where == str(tmp_path)
    assert list(source.read("train", False).texts) == [str(i) for i in range(11)]
    assert list(source.read("dev", False).texts) == ["0"]
    (tmp_path / names[3]).unlink()
    with refused("incomplete-corpus"):
        open_source(tmp_path, cache=tmp_path)


def test_shards_of_two_makings_are_not_one_split(tmp_path):
    for name in ("train-1-of-1", "train-1-of-2", "train-2-of-2"):
        write(tmp_path / f"{name}.jsonl", '{"audio": "a.wav", "text": "x"}\n')
    with refused("incomplete-corpus"):
        open_source(tmp_path, cache=tmp_path)


@pytest.mark.parametrize(("source", "code"), [
    ("x.docx", "unknown-corpus-format"), ({"train": "gone.csv"}, "no-such-path"),
    ({"train": "x.docx"}, "unknown-corpus-format"), ("gone/too", "no-such-path"),
])
def test_what_is_no_corpus_is_named(tmp_path, monkeypatch, source, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    write(tmp_path / "train.csv", "ID,wav,wrd\n")
    write(tmp_path / "x.docx", "")
    with refused(code):
        open_source(source, cache=tmp_path)


@pytest.mark.parametrize(("change", "reason"), [
    ({"text": "a\0b"}, "its text has a character that can't be printed"),
    ({"text": "a\x1b]0;b"}, "its text has a character that can't be printed"),
    ({"text": "a\ud800"}, "its text has a character that can't be printed"),
    ({"id": "a\x1b[2J"}, "its id has a character that can't be printed"),
    ({"audio_filepath": "a\0.wav"}, "its audio has a character that can't be printed"),
])
def test_json_with_characters_that_no_list_should_have_leaves_the_row_out_by_name(tmp_path, change, reason):
    row = {"id": "first", "audio_filepath": "a.wav", "duration": 1.0, "text": "two\nlines"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | change)}\n")
    rows = open_source({"train": tmp_path / "train.jsonl"}, cache=tmp_path).read("train", False)
    assert list(rows.texts) == ["two\nlines"]
    [(line, message)] = rows.malformed
    assert line == "train.jsonl line 2" and reason in message and message.isprintable()
