"""A corpus: prepared once, honestly, whatever it is, and again only when something changed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from corpora import SECONDS, clip, common_voice, prepared
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from sounds import real_data

from sbkit.data import corpus as module
from sbkit.data import exclusions, measure
from sbkit.data.corpus import Corpus
from sbkit.data.lock import locked
from sbkit.data.manifest import Manifest
from sbkit.data.text import TextRules

SENTENCES = ["One sentence here.", "Another one, longer!", "Yes."]


@pytest.fixture
def release(tmp_path) -> Path:
    return common_voice(tmp_path / "release", train=SENTENCES, dev=["Dev sentence one."],
                        test=["No.", "Test two."])


def test_manifests_report_and_table(release, tmp_path):
    corpus, manifests = prepared(release, tmp_path / "m")
    assert list(manifests) == ["train", "dev", "test"]
    row = manifests["train"].row(1)
    assert (row.id, row.text, row.speaker) == ("common_voice_en_train1", "another one longer", "speaker1")
    assert row.duration == pytest.approx(SECONDS)
    assert row.meta == {"accent": "Scottish", "age": "twenties", "gender": "female_feminine",
                        "language": "en"}
    assert Path(row.wav).is_file() and Path(row.wav).is_absolute()
    assert corpus.left_out("test") is None
    report = json.loads((tmp_path / "m" / "prepare_report.json").read_text())
    assert report["splits"]["train"]["rows"] == 3 == report["splits"]["train"]["kept"]
    assert corpus.summary().splitlines()[3].split() == ["train", "3", "3", "0.00"]
    loaded = Corpus(release, folder=tmp_path / "m").load()
    assert all(loaded[split].ids == manifests[split].ids for split in manifests)


def test_what_splits_share_is_told_when_they_are_prepared_and_not_again(release, tmp_path):
    told = [part in prepared(release, tmp_path / "m", **options)[0].summary()
            for options in ({}, {}, {"min_duration": 0.1}) for part in ("speakers, such as ", "train")]
    assert told == [True, True, False, True, True, True], "and the rows each time"


def test_a_large_corpus_is_mapped_and_prepared_again_when_its_csv_changes(release, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sbkit.data.manifest.MAPPED_ROWS", 3)
    _, first = prepared(release, tmp_path / "m")
    corpus, again = prepared(release, tmp_path / "m")
    assert again["train"].mapped and not again["test"].mapped, "that has two rows"
    assert all(again[split].digest() == first[split].digest() for split in first)
    assert corpus.load()["train"].mapped and not (tmp_path / "m" / "test.arrow").exists()
    path = corpus.manifest_path("train")
    path.write_text(path.read_text().replace("yes", "no"))
    assert list(prepared(release, tmp_path / "m")[1]["train"].texts) == list(first["train"].texts)
    assert "has changed since it was prepared" in caplog.text
    monkeypatch.setattr("sbkit.data.manifest.MAPPED_ROWS", 4)
    prepared(release, tmp_path / "m", min_duration=0.1)
    assert not (tmp_path / "m" / "train.arrow").exists(), "what an earlier preparation left is gone"


def test_a_mapped_corpus_with_urls_is_opened_only_where_these_are_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("sbkit.data.manifest.MAPPED_ROWS", 0)
    rows = Manifest(ids=["a"], durations=[1.0], wavs=["https://somewhere/a.wav"], texts=["a"], has_urls=None)
    rows.write_prepared(tmp_path / "train.csv")
    assert Corpus(None, folder=tmp_path, schemes=["https"]).manifest("train").mapped
    with refused("url-not-allowed"):
        Corpus(None, folder=tmp_path).manifest("train")


def test_the_constructor_touches_no_file(tmp_path):
    Corpus("/nowhere/at/all", folder=tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_dev_and_test_keep_everything_unless_asked(release, tmp_path):
    options = {"max_duration": SECONDS + 0.5, "text": {"alphabet": "abcdefghijklmnopqrstuvwxz"}}  # no y
    (release / "clips" / "common_voice_en_test0.mp3").write_bytes(clip(2.0))
    (release / "clips" / "common_voice_en_train0.mp3").write_bytes(clip(2.0))
    corpus, manifests = prepared(release, tmp_path / "m", **options)
    assert [len(m) for m in manifests.values()] == [1, 1, 2]
    assert set(corpus.report["splits"]["train"]["left_out"]) == {"too long", "alphabet"}
    _, manifests = prepared(release, tmp_path / "m", limit_splits=["train", "test"], **options)
    assert [len(m) for m in manifests.values()] == [1, 1, 1]


def test_a_split_of_which_nothing_is_left_is_an_error_that_says_why(release, tmp_path):
    with refused("all-rows-left-out"):
        prepared(release, tmp_path / "m", min_duration=SECONDS + 0.5)
    assert [path.name for path in (tmp_path / "m").glob("*.csv")] == [exclusions.NAME], "and no manifest"


def test_rows_that_are_all_too_long_are_listed_with_their_limit_and_what_to_do(release, tmp_path):
    folder = tmp_path / "m"
    with refused("all-rows-left-out") as caught:
        prepared(release, folder, max_duration=SECONDS - 0.5)
    assert caught.value.message.endswith(f": 3 too long: above corpus.max_duration, {SECONDS - 0.5:g} s")
    assert "raise corpus.max_duration" in caught.value.hint and str(folder / exclusions.NAME) in caught.value.hint
    found = exclusions.read(folder)
    assert found["reason"].to_pylist() == ["too long"] * 3 and found["split"].to_pylist() == ["train"] * 3
    assert all(float(detail.removesuffix(" s")) == pytest.approx(SECONDS, abs=0.1)
               for detail in found["detail"].to_pylist())


def test_a_refused_preparation_leaves_the_list_of_a_prepared_corpus(release, tmp_path):
    prepared(release, tmp_path / "m")
    before = (tmp_path / "m" / exclusions.NAME).read_bytes()
    with refused("all-rows-left-out") as caught:
        prepared(release, tmp_path / "m", max_duration=SECONDS - 0.5)
    assert (tmp_path / "m" / exclusions.NAME).read_bytes() == before and exclusions.NAME not in caught.value.hint


def test_the_table_names_the_limit_of_many_rows_that_are_too_long(release, tmp_path):
    (release / "clips" / "common_voice_en_train0.mp3").write_bytes(clip(2 * SECONDS))
    corpus, _ = prepared(release, tmp_path / "m", max_duration=1.5 * SECONDS)
    assert (f"train: 1 of 3 rows are left out (too long: above corpus.max_duration, {1.5 * SECONDS:g} s), such as "
            in corpus.summary()) and "raise corpus.max_duration" in corpus.summary()


def test_the_three_word_filter_is_per_split(release, tmp_path):
    corpus, manifests = prepared(release, tmp_path / "m", skip_short_texts=["train"])
    assert [len(m) for m in manifests.values()] == [2, 1, 2]
    assert corpus.report["splits"]["train"]["left_out"]["few words"]["examples"] == ["common_voice_en_train2"]
    assert "few words" in corpus.summary()


@pytest.fixture
def spied(monkeypatch):
    """How often a split was really prepared."""
    calls, real = [], module.prepare_split
    monkeypatch.setattr(
        module, "prepare_split", lambda split, *a, **k: calls.append(split) or real(split, *a, **k))
    return calls


def add_line(path):
    path.write_text(path.read_text() + "\n")


@pytest.mark.parametrize(("change", "options"), [
    (lambda release, folder: add_line(release / "train.tsv"), {}),
    (lambda release, folder: (release / "clips" / "new.mp3").write_bytes(b""), {}),
    (lambda release, folder: (release / "clip_durations.tsv").unlink(), {}),
    (lambda release, folder: None, {"text": TextRules(case="upper")}),
    (lambda release, folder: None, {"max_duration": 10.0}), (lambda release, folder: None, {"language": "en"}),
    (lambda release, folder: add_line(folder / "dev.csv"), {}),
    (lambda release, folder: (folder / "dev.csv").unlink(), {}),
    (lambda release, folder: (folder / "prepare_report.json").write_text('{"splits"'), {}),
], ids=["row", "clip", "durations", "text", "limit", "language", "manifest edited", "manifest gone", "report damaged"])
def test_it_is_prepared_again_when_anything_it_depends_on_changed(release, tmp_path, spied, change, options):
    folder = tmp_path / "m"
    prepared(release, folder)
    change(release, folder)
    prepared(release, folder, **options)
    assert len(spied) == 6


@pytest.fixture(params=["csv", "jsonl", "tsv"])
def half_there(request, tmp_path) -> Path:
    """A corpus of three clips a split, of which one is missing and one damaged."""
    clips = tmp_path / "in" / "clips"
    clips.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        names = [f"{split}{i}" for i in range(3)]
        (clips / f"{names[0]}.mp3").write_bytes(clip())
        (clips / f"{names[1]}.mp3").write_bytes(b"cut off while it was copied")
        lines = {"csv": ["ID,wav,wrd", *(f"{name},clips/{name}.mp3,a text" for name in names)],
                 "jsonl": [json.dumps({"audio": f"clips/{name}.mp3", "text": "a text"}) for name in names],
                 "tsv": ["path\tsentence", *(f"{name}.mp3\ta text" for name in names)]}[request.param]
        (tmp_path / "in" / f"{split}.{request.param}").write_text("\n".join(lines) + "\n")
    return tmp_path / "in"


@pytest.mark.parametrize("change", ["a missing one came", "a damaged one was mended", "nothing"])
def test_clips_that_were_left_out_are_looked_at_again(half_there, tmp_path, spied, change):
    _, manifests = prepared(half_there, tmp_path / "m")
    assert [len(m) for m in manifests.values()] == [1, 1, 1]
    before = (half_there / "clips").stat()
    if change == "a missing one came":
        (half_there / "clips" / "train2.mp3").write_bytes(clip())
    elif change == "a damaged one was mended":
        (half_there / "clips" / "train1.mp3").write_bytes(clip())
    os.utime(half_there / "clips", ns=(before.st_atime_ns, before.st_mtime_ns))  # as object stores have it
    _, manifests = prepared(half_there, tmp_path / "m")
    assert len(manifests["train"]) == (1 if change == "nothing" else 2)
    assert len(spied) == (3 if change == "nothing" else 6)
    prepared(half_there, tmp_path / "m")
    assert len(spied) == (3 if change == "nothing" else 6)


def test_every_row_left_out_is_listed(half_there, tmp_path):
    corpus, _ = prepared(half_there, tmp_path / "m")
    with open(tmp_path / "m" / "left_out.csv", newline="") as file:
        listed = [(row["split"], row["ID"], row["reason"], row["detail"], row["code"]) for row in csv.DictReader(file)]
    assert sorted(listed)[:2] == [
        ("dev", "dev1", "undecodable", "cannot be decoded: Format not recognised", "unknown-audio-format"),
        ("dev", "dev2", "missing clip", "", "missing-audio")]
    left_out = corpus.report["splits"]["test"]["left_out"]
    assert {reason: entry["codes"] for reason, entry in left_out.items()} == {
        "missing clip": {"missing-audio": 1}, "undecodable": {"unknown-audio-format": 1}}
    assert corpus.left_out("test") == (
        "2 of 3 test rows were left out in preparation: 1 missing clip, 1 undecodable")
    assert "test: 1 of 3 rows are left out (undecodable), such as " in corpus.summary()
    assert len(listed) == sum(entry["rows"] - entry["kept"] for entry in corpus.report["splits"].values())


@given(st.lists(st.text(st.sampled_from("=+-@'\t\ra,\"1"), max_size=4), min_size=1, max_size=5))
def test_no_row_left_out_is_a_spreadsheets_formula_and_each_is_read_back(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("m")
    exclusions.write(folder, [exclusions.rows("=split", "+reason", names, names, names)])
    with open(folder / "left_out.csv", newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    found = exclusions.read(folder)
    assert found["ID"].to_pylist() == found["wav"].to_pylist() == found["detail"].to_pylist() == names
    assert found["split"][0].as_py() == "=split" and found["reason"][0].as_py() == "+reason"


@pytest.mark.parametrize("gone", [["dev"], ["train", "dev"]])
def test_a_split_that_is_needed_is_reported_before_audio_is_read(release, tmp_path, monkeypatch, gone):
    for split in gone:
        (release / f"{split}.tsv").unlink()
    corpus, needed = Corpus(release, folder=tmp_path / "m"), ["train", "dev", "test"]
    with monkeypatch.context() as patch, refused("missing-split", value=gone[0]):
        patch.setattr("sbkit.data.corpus.prepare_split", lambda *_, **__: pytest.fail("audio was read"))
        corpus.prepare(show_progress=False, needed=needed)
    corpus.prepare(show_progress=False)
    with refused("missing-split", value=gone[0]):
        corpus.prepare(show_progress=False, needed=needed)


def test_splits_can_be_named_and_joined(release, tmp_path):
    (release / "other.tsv").write_text((release / "train.tsv").read_text().replace("train0", "test0"))
    _, manifests = prepared(release, tmp_path / "m", splits={"train": ["train", "other"], "dev": "test"})
    assert len(manifests["train"]) == 3  # other's first clip is in test, its others are in train already
    assert manifests["dev"].ids == manifests["test"].ids


def test_a_split_that_is_gone_leaves_no_manifest_behind(release, tmp_path):
    prepared(release, tmp_path / "m")
    (release / "dev.tsv").unlink()
    _, manifests = prepared(release, tmp_path / "m")
    assert list(manifests) == ["train", "test"] and not (tmp_path / "m" / "dev.csv").exists()


@pytest.mark.parametrize(("options", "code"), [
    ({"splits": {"valid": "dev"}}, "bad-value"), ({"limit_splits": ["all"]}, "bad-value"),
    ({"check_audio": "none"}, "bad-value"), ({"text": {"upper": True}}, "unknown-key"),
    ({"text": "upper"}, "bad-value"), ({"splits": ["train"]}, "bad-value"), ({"splits": {"train": 3}}, "bad-value"),
    ({"only": "tests"}, "bad-value"), ({"only": []}, "bad-value"), ({"max_duration": "20 s"}, "bad-value"),
    ({"short_text": 2.5}, "bad-value"), ({"workers": 0}, "bad-value"), ({"columns": "x"}, "bad-value")])
def test_wrong_options_are_named_at_once(options, code):
    with refused(code):
        Corpus("/nowhere", **options)


def test_a_role_that_the_task_does_not_declare_is_refused(release, tmp_path):
    for act in (lambda corpus: corpus.prepare(), lambda corpus: corpus.check_source(True, {})):
        with refused("unknown-key"):
            act(Corpus(release, folder=tmp_path / "m", columns={"sound": "x"}))


@pytest.mark.parametrize("source", [["a.csv"], {"train": 3}, {"train": []}, {"train": ["a.csv", None]}])
def test_wrong_sources_are_named(tmp_path, source):
    with refused("bad-value"):
        prepared(source, tmp_path / "m")


def test_one_split_may_be_named_without_a_list(release, tmp_path):
    _, manifests = prepared(release, tmp_path / "m", only="test", limit_splits="test", max_duration=99)
    assert list(manifests) == ["test"]


def test_empty_splits_and_unprepared_folders(release, tmp_path, monkeypatch):
    with refused("not-prepared"):
        Corpus(release, folder=tmp_path / "m").load()
    (release / "dev.tsv").write_text((release / "dev.tsv").read_text().splitlines()[0] + "\n")
    monkeypatch.setattr("sbkit.data.corpus.prepare_split", lambda *_, **__: pytest.fail("audio was read"))
    with refused("no-utterances"):
        prepared(release, tmp_path / "m")
    assert not list((tmp_path / "m").glob("*.csv"))


def test_nothing_is_a_corpus_of_our_own(tmp_path, monkeypatch):
    made = []

    def make(out, **options):
        made.append((Path(out), options))
        if not Path(out).exists():
            common_voice(Path(out), train=SENTENCES, dev=SENTENCES, test=SENTENCES)
        return Path(out) / "en"

    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sbkit.data.demo.make_demo_corpus", make)
    _, manifests = prepared(None, tmp_path / "m", demo_hours=0.5)
    _, again = prepared("", tmp_path / "m2", demo_hours=0.5)
    assert made[0][0].parent == tmp_path / "cache" and made[0][0].name.startswith("demo-en-0.5h")
    assert made[0][1]["hours"] == 0.5 and made[0][0] == made[1][0]
    assert len(manifests["train"]) == len(again["train"]) == 3
    prepared(None, tmp_path / "m3", demo_voices=["en-us+f2", "en-gb-scotland"])
    assert made[2][0].name.startswith("demo-en-en-us+f2-en-gb-scotland-1h")
    assert made[2][1]["voices"] == ["en-us+f2", "en-gb-scotland"] and not made[0][1]["voices"]
    with refused("unknown-voice"):
        Corpus(demo_voices=["../x"])


def test_two_preparations_of_one_folder_take_turns(release, tmp_path, caplog):
    with ThreadPoolExecutor(1) as pool, locked(tmp_path / "m" / ".lock"):
        other = pool.submit(prepared, release, tmp_path / "m")
        while "another process is working there" not in caplog.text:
            assert not other.done()
            time.sleep(0.01)
        assert not list((tmp_path / "m").glob("*.csv"))
    assert len(other.result()[1]["train"]) == 3


@pytest.mark.slow
def test_a_killed_preparation_goes_on_where_it_was(tmp_path, monkeypatch):
    n = 5000
    home = common_voice(tmp_path / "release", durations=None, train=["a sentence"] * 3, test=["one more"])
    sound = home / "clips" / "common_voice_en_train0.mp3"
    lines = ["client_id\tpath\tsentence"]
    for i in range(n):
        os.link(sound, home / "clips" / f"x{i}.mp3")
        lines.append(f"s\tx{i}.mp3\tsentence {i}")
    (home / "train.tsv").write_text("\n".join(lines) + "\n")
    code = ("import sys; from sbkit.data.corpus import Corpus\n"
            "Corpus(sys.argv[1], folder=sys.argv[2], workers=1).prepare(show_progress=False)")
    run = subprocess.Popen([sys.executable, "-c", code, str(home), str(tmp_path / "m")],
                           cwd=Path(__file__).resolve().parents[2])
    journal = None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (journal is None or journal.stat().st_size < 20_000):
        time.sleep(0.01)
        journal = next((tmp_path / "m").glob(".durations-*"), None) if (tmp_path / "m").exists() else None
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not list((tmp_path / "m").glob("*.csv"))
    known = sum(1 for line in journal.read_text().splitlines() if line.startswith("["))
    measured, real = [], measure.measure_one
    monkeypatch.setattr(measure, "measure_one", lambda wav, *how: measured.append(wav) or real(wav, *how))
    _, manifests = prepared(home, tmp_path / "m", workers=1)
    assert len(manifests["train"]) == n and 0 < known < n
    assert n - known <= len(measured) <= n - known + 2
    assert not list((tmp_path / "m").glob(".durations-*"))


def test_real_voices_in_common_voice_layout(tmp_path):
    corpus, manifests = prepared(real_data("yesno"), tmp_path / "m", language="en")
    assert [len(m) for m in manifests.values()] == [30, 10, 20]
    assert set(" ".join(manifests["test"].texts).split()) == {"yes", "no"}
    checked = corpus.report["splits"]["train"]["durations"]
    assert checked == {"listed": 30, "measured": 0, "checked": 30, "disagree": 0}


def test_real_voices_in_speechbrains_csvs(tmp_path):
    _, manifests = prepared(real_data("an4"), tmp_path / "m")
    assert list(manifests) == ["train", "test"] and len(manifests["test"]) == 10
    assert manifests["train"].row(0).text == "stop" and manifests["train"].row(0).speaker == "mmap"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_without_a_text_are_kept_where_no_text_is_needed(tmp_path, kind):
    for split in ("train", "dev", "test"):
        rows = ["ID,wav"] if kind == "csv" else []
        for name in (f"{split}{i}" for i in range(3)):
            (tmp_path / f"{name}.wav").write_bytes(clip())
            rows.append(f"{name},{name}.wav" if kind == "csv" else json.dumps({"audio_filepath": f"{name}.wav"}))
        (tmp_path / f"{split}.{kind}").write_text("\n".join(rows))
    corpus = Corpus(tmp_path, folder=tmp_path / "m")
    with refused("missing-column"):
        corpus.prepare(show_progress=False)
    manifests = corpus.prepare(show_progress=False, needs_text=False)
    assert [len(manifests[split]) for split in ("dev", "test")] == [3, 3] and list(manifests["test"].texts) == [""] * 3
    assert Corpus(tmp_path, folder=tmp_path / "m").load()["test"].ids == manifests["test"].ids


def test_a_task_that_needs_texts_after_one_that_needs_none_prepares_again(release, tmp_path):
    rows = release / "train.tsv"
    rows.write_text(rows.read_text().replace("One sentence here.", ""))
    corpus = Corpus(release, folder=tmp_path / "m")
    assert len(corpus.prepare(show_progress=False, needs_text=False)["train"]) == 3
    assert len(corpus.prepare(show_progress=False)["train"]) == 2


def test_a_replacement_is_not_made_again_in_manifests_that_the_same_rules_wrote(release, tmp_path):
    doubled, home = {"replace": {"e": "ee"}}, tmp_path / "m"

    def texts(source, folder, text=doubled, **options):
        return list(prepared(source, tmp_path / folder, text=text, **options)[1]["train"].texts)

    first = texts(release, "m")
    assert first[0] == "onee seenteencee heeree"
    for source in (home, {split: home / f"{split}.csv" for split in ("train", "dev", "test")}):
        assert texts(source, "again") == first
    assert texts(home, "other", {"replace": {"ee": "i"}})[0] == "oni sintinci hiri", "other rules hold for them, too"
    assert texts(home, "column", columns={"text": "spk_id"})[0] == "speeakeer0", "and the same for another column"
    (home / "train.csv").write_text((home / "train.csv").read_text().replace("yees", "New!"))
    assert texts(home, "edited")[-1] == "neew"


@pytest.mark.parametrize("written", ["{away}/a.wav", "$data_root/a.wav", "clips/a.wav"])
@pytest.mark.parametrize("root", [None, "elsewhere"])
def test_says_how_to_set_data_root_when_recordings_are_missing(written, root, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for split in "train", "dev", "test":
        path = written.format(away=tmp_path / "away")
        (data / f"{split}.csv").write_text(f"ID,duration,wav,wrd\n{split},1.0,{path},words\n")
    corpus = Corpus(str(data), "en", tmp_path / "out", data_root=root and str(tmp_path / root))
    with refused("all-rows-left-out"):
        corpus.prepare(show_progress=False)


def test_says_how_to_set_data_root_when_another_row_is_malformed(tmp_path):
    lines = ["ID,duration,start,wav,wrd", "broken,1.0,-1,clips/a.wav,words", "gone,1.0,0,clips/b.wav,words"]
    for split in "train", "dev", "test":
        (tmp_path / f"{split}.csv").write_text("\n".join(lines) + "\n")
    with refused("all-rows-left-out") as error:
        Corpus(str(tmp_path), "en", tmp_path / "out").prepare(show_progress=False)
    assert "relative paths" in error.value.hint and "absolute paths" not in error.value.hint
