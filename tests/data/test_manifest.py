"""Manifests: what is written is what is read, by us, by Python's csv and by SpeechBrain."""

from __future__ import annotations

import csv
import os
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from speechbrain.dataio.dataio import load_data_csv

from sbkit.data import manifest as module
from sbkit.data.manifest import Column, Manifest, mapped_file

# All that a file can hold: no NUL (Python's csv reads none before 3.11), no halves of surrogate pairs.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)


def make(n: int = 4, **columns) -> Manifest:
    own = {"ids": [f"u{i}" for i in range(n)], "durations": [0.5 + i for i in range(n)],
           "wavs": [f"/clips/{i}.mp3" for i in range(n)], "texts": [f"text {i}" for i in range(n)],
           "speakers": [f"s{i % 2}" for i in range(n)]}
    return Manifest(**{**own, **columns})


def same(a: Manifest, b: Manifest) -> bool:
    return (a.ids == b.ids and a.wavs == b.wavs and a.texts == b.texts and a.speakers == b.speakers
            and np.array_equal(a.durations, b.durations) and np.array_equal(a.starts, b.starts)
            and a.meta == b.meta)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT, st.floats(0, 1e4, width=32), st.floats(0, 1e5)), min_size=1,
                max_size=5))
def test_any_text_survives_the_disk_and_other_readers_agree(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("m") / "train.csv"
    manifest = make(len(rows), texts=[r[0] for r in rows], durations=[r[2] for r in rows],
                    starts=[r[3] for r in rows], meta={"accent": [r[1] for r in rows]})
    manifest.write(path)
    assert same(Manifest.read(path), manifest)
    with open(path, encoding="utf-8", newline="") as file:
        assert [row["wrd"] for row in csv.DictReader(file)] == list(manifest.texts)


@settings(max_examples=50)
@given(st.lists(st.tuples(TEXT, TEXT, st.floats(0, 1e4, width=32), st.floats(0, 1e5), TEXT), max_size=5))
def test_what_is_mapped_is_what_the_csv_says(tmp_path_factory, all_mapped, rows):
    path = tmp_path_factory.mktemp("m") / "train.csv"
    make(len(rows), texts=[r[0] for r in rows], durations=[r[2] for r in rows], starts=[r[3] for r in rows],
         wavs=[f"/clips/{r[4]}" for r in rows], meta={"accent": [r[1] for r in rows]}).write_prepared(path)
    mapped, read = Manifest.open_prepared(path), Manifest.read(path)
    assert mapped.mapped and not read.mapped
    assert same(mapped, read) and mapped.has_urls == read.has_urls and mapped.digest() == read.digest()
    assert same(mapped.select([0]), read.select([0])) if rows else len(mapped) == 0


@pytest.fixture(scope="module")
def all_mapped():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAPPED_ROWS", 0)
        yield


@pytest.mark.parametrize("harm", [
    lambda csv_, arrow: csv_.write_text(csv_.read_text().replace("text 1", "text one")),
    lambda csv_, arrow: os.utime(csv_), lambda csv_, arrow: arrow.unlink(),
    lambda csv_, arrow: arrow.write_bytes(arrow.read_bytes()[:-50]), lambda csv_, arrow: arrow.write_bytes(b""),
], ids=["edited", "touched", "gone", "cut off", "empty"])
def test_a_mapped_file_that_is_not_the_csv_s_is_not_believed(tmp_path, all_mapped, harm):
    path = tmp_path / "train.csv"
    make().write_prepared(path)
    harm(path, mapped_file(path))
    found = Manifest.open_prepared(path)
    assert not found.mapped and same(found, Manifest.read(path))


def test_a_small_manifest_and_one_with_a_root_that_moves_are_not_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAPPED_ROWS", 5)
    make().write_prepared(tmp_path / "train.csv")
    assert not Manifest.open_prepared(tmp_path / "train.csv").mapped
    monkeypatch.setattr(module, "MAPPED_ROWS", 4)
    make().write_prepared(tmp_path / "train.csv")
    assert Manifest.open_prepared(tmp_path / "train.csv").mapped
    make(wavs=["$data_root/a.wav"] * 4).write_prepared(tmp_path / "train.csv")
    assert not mapped_file(tmp_path / "train.csv").exists()
    assert Manifest.open_prepared(tmp_path / "train.csv").wavs[0] == f"{tmp_path}/a.wav"


def test_speechbrain_reads_it(tmp_path):
    make(texts=['say "no", please', "a,b", " blank", "plain"]).write(tmp_path / "m.csv")
    data = load_data_csv(tmp_path / "m.csv")
    assert data["u0"] == {"duration": 0.5, "wav": "/clips/0.mp3", "spk_id": "s0", "wrd": 'say "no", please'}
    assert (tmp_path / "m.csv").read_text().startswith("ID,duration,wav,spk_id,wrd\n")


@pytest.mark.parametrize("root", ["/data", "/a b/$x", "C:\\data\\1", "/back\\1slash"])
def test_data_root_is_replaced_in_paths_and_a_dollar_elsewhere_is_a_character(tmp_path, root):
    path = tmp_path / "train.csv"
    path.write_text("ID,duration,wav,spk_id,wrd\na,1,$data_root/a.wav,s,costs $word and $data_root\n"
                    "b,1,${data_root}/b.wav,s,x\nc,1,/other/$data_root/c.wav,s,x\nd,1,$data_folder/d.wav,s,x\n")
    manifest = Manifest.read(path, data_root=root)
    assert list(manifest.wavs) == [f"{root}/a.wav", f"{root}/b.wav", "/other/$data_root/c.wav", f"{root}/d.wav"]
    assert manifest.texts[0] == "costs $word and $data_root"
    assert Manifest.read(path).wavs[0] == f"{tmp_path}/a.wav"


def test_rows_selection_and_workers(tmp_path):
    manifest = make(starts=[0, 36000.123, 0, 0], meta={"age": ["", "teens", "", ""]})
    row = manifest.select([3, 1]).row(1)
    assert (row.id, row.start, row.duration, row.speaker) == ("u1", 36000.123, 1.5, "s1")
    assert row.meta == {"age": "teens"}
    assert list(manifest.select(manifest.durations > 2).ids) == ["u2", "u3"]
    assert same(pickle.loads(pickle.dumps(manifest)), manifest)
    assert manifest.hours == pytest.approx((0.5 + 1.5 + 2.5 + 3.5) / 3600)
    assert list(manifest.replace(wavs=["x"] * 4).wavs) == ["x"] * 4
    assert len(make(0).select([])) == 0
    with pytest.raises(ValueError, match="texts has 1 entries for 4 ids"):
        make(texts=["one"])


def test_columns_behave_like_lists():
    column = Column(["a", "b", "c"])
    assert column[-1] == "c" and list(column[1:]) == ["b", "c"]
    assert "b" in column and column == ["a", "b", "c"]
    with pytest.raises(IndexError):
        column[3]


@pytest.mark.parametrize(("content", "code", "line", "key", "value"), [
    ("ID,duration,wav\na,1,b\n", "missing-column", None, "wrd", None),
    ("ID,duration,wav,wrd\na,1,b\n", "malformed-row", 2, None, None),
    ("ID,duration,wav,wrd\na,1,b,c\nd,long,e,f\n", "malformed-row", None, "duration", "long"),
    ("ID,duration,wav,wrd\na,-1,b,c\n", "malformed-row", None, "duration", "-1"),
    ("ID,duration,wav,wrd\na,nan,b,c\n", "malformed-row", None, "duration", "nan"),
    ("ID,duration,wav,wrd\na,1e308,b,c\n", "malformed-row", None, "duration", "1e308"),
    ("ID,duration,wav,wrd,start\na,1,b,c,x\n", "malformed-row", None, "start", "x"),
    ("ID,ID,wav,wrd\na,1,b,c\n", "duplicate-column", 1, "ID", None),
    ("", "no-utterances", None, None, None), ("\n\n", "no-utterances", None, None, None),
    (b"ID,duration,wav,wrd\na,1,b,c\nd,1,e,\xe9t\xe9\n", "not-utf8", 3, "wrd", None),
    (b"ID,duration,wav,wrd\na,1,b.wav,c\nd,\xff,e.wav\n", "not-utf8", 3, "duration", None),  # and too short
])
def test_what_is_wrong_is_named_with_file_and_row(tmp_path, content, code, line, key, value):
    path = tmp_path / "m.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with refused(code, file=path, line=line, key=key, value=value):
        Manifest.read(path)


@pytest.mark.parametrize("content", [
    "\ufeffID,duration,wav,wrd\r\na,1.5,/x.wav,c d\r\n",
    "ID, duration, wav, wrd\na, 1.5, /x.wav, \"c d\"\n",
    "\nID,duration,wav,wrd\n\na,1.5,/x.wav,c d\n\n",
    "ID,duration,wav,wrd\na,1.5,/x.wav,c d",
])
def test_byte_order_marks_windows_lines_blanks_after_commas_and_blank_lines(tmp_path, content):
    (tmp_path / "m.csv").write_bytes(content.encode())
    row = Manifest.read(tmp_path / "m.csv").row(0)
    assert (row.id, row.duration, row.wav, row.text, row.speaker) == ("a", 1.5, "/x.wav", "c d", "")


@pytest.mark.parametrize("separator", [",", ", "])
@pytest.mark.parametrize("rest", ["", "y", "y" * 200_000])
@pytest.mark.parametrize("at", [2, 3])
def test_a_quotation_mark_that_is_never_closed_swallows_no_rows(tmp_path, separator, rest, at):
    rows = [["ID", "duration", "wav", "wrd"], ["a", "1.0", "a.wav", '"x\ny"'], ["b", "1.0", "b.wav", "x"],
            ["c", "1.0", "c.wav", rest]]
    rows[2][at] = '"' + rows[2][at]
    path = tmp_path / "x.csv"
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    with refused("malformed-list"):
        Manifest.read(path)
    rows[2][at] += '"'
    rows[3][3] = "z"
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    assert list(Manifest.read(path).texts) == ["x\ny", "x", "z"]


@pytest.mark.parametrize("separator", [",", ", "])
def test_a_file_that_goes_on_without_an_end_of_line_is_refused(tmp_path, separator):
    path = tmp_path / "x.csv"
    path.write_text(separator.join(["ID", "duration", "wav", "wrd"]) + "\n")
    os.truncate(path, 40 << 20)  # takes no room on the disk
    with refused("malformed-list"):
        Manifest.read(path)


@pytest.mark.slow
def test_half_a_million_rows_take_a_second(tmp_path):
    n = 500_000
    numbers = np.arange(n).astype(str).tolist()
    manifest = make(n, ids=numbers, wavs=numbers, texts=numbers, speakers=numbers, durations=np.ones(n))
    started = time.process_time()
    manifest.write(tmp_path / "m.csv")
    written = time.process_time()
    assert len(Manifest.read(tmp_path / "m.csv")) == n
    # Less than a second each on an idle laptop; loops over rows would take a quarter of a minute.
    assert written - started < 5 and time.process_time() - written < 5


@pytest.mark.parametrize("header, code", [
    (",".join(f"c{i}" for i in range(100_000)), "malformed-list"),
    ("x" * (2 << 20), "malformed-list"), ("ID\rwav," + "x" * 10, "malformed-list"),
    ("ID,wav," + ",".join("x" * 5000 for _ in range(2)), "duplicate-column"),
])
def test_a_header_of_no_table_is_refused_at_once_and_in_a_short_line(tmp_path, header, code):
    path = tmp_path / "m.csv"
    path.write_bytes(header.encode() + b"\na,b\n")
    began = time.perf_counter()
    # Python's words about a line end within a header vary.
    with refused(code, wording="\r" not in header, file=path, line=1) as error:
        Manifest.read(path)
    assert time.perf_counter() - began < 5 and len(str(error.value)) < 1000


def test_refuses_missing_files_and_pipes_at_once(tmp_path):
    os.mkfifo(tmp_path / "m.csv")
    for name, code in (("m.csv", "not-readable"), ("nope.csv", "no-such-path")):
        with refused(code, file=tmp_path / name):
            Manifest.read(tmp_path / name)
