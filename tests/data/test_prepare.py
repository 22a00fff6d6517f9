"""Preparation: every row is kept or left out for a reason that is counted and named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import contained, encoded, speechlike

from sbkit.data.manifest import Column
from sbkit.data.prepare import REASONS, RowLimits, prepare_split, recording_keys, summarize
from sbkit.data.presence import existing
from sbkit.data.sources.base import Rows, unique_ids
from sbkit.data.text import TextRules

RULES = TextRules(alphabet="abcdefghijklmnopqrstuvwxyz'")


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """good.wav lasts a second, long.wav three; bad.wav is damaged."""
    folder = tmp_path_factory.mktemp("clips")
    (folder / "good.wav").write_bytes(encoded(speechlike(1.0), 16000))
    (folder / "long.wav").write_bytes(encoded(speechlike(3.0), 16000))
    (folder / "bad.wav").write_bytes(b"no audio at all")
    (folder / "empty.wav").write_bytes(b"")
    return folder


def rows(clips: Path, *entries: tuple[str, str], durations=None, starts=None, malformed=()) -> Rows:
    durations, starts = (None if column is None else np.array(column, float) for column in (durations, starts))
    return Rows("x.tsv", [f"u{i}" for i in range(len(entries))], [f"{clips}/{name}" for name, _ in entries],
                [text for _, text in entries], durations=durations, starts=starts, malformed=malformed)


def prepare(rows, limits=None, rules=RULES, **options):
    return prepare_split("train", rows, rules, limits or RowLimits(), show_progress=False, **options)


def counts(report) -> dict[str, int]:
    return {reason: entry["count"] for reason, entry in report.left_out.items()}


def test_each_reason_is_counted_and_named(clips):
    source = rows(
        clips, ("good.wav", "Kept, this one!"), ("gone.wav", "x"), ("bad.wav", "x"), ("empty.wav", "x"),
        ("good.wav", "?!"), ("long.wav", "x y z"), ("good.wav", "naïve text here"), ("good.wav", "two words"),
        malformed=[("x.tsv line 9", "3 fields instead of 13")])
    manifest, report = prepare(source, RowLimits(max_duration=2.0, alphabet=True, min_words=3))
    assert list(manifest.texts) == ["kept this one"] and manifest.durations[0] == pytest.approx(1.0)
    assert counts(report) == {"malformed row": 1, "missing clip": 1, "no text": 1, "undecodable": 2,
                              "too long": 1, "alphabet": 1, "few words": 1}
    assert report.rows == 9 == report.kept + sum(counts(report).values())
    assert report.left_out["malformed row"]["examples"] == ["x.tsv line 9: 3 fields instead of 13"]
    assert report.left_out["undecodable"]["examples"][1] == "u3: is empty (0 bytes)"
    assert report.left_out["alphabet"]["examples"] == ["u6: ï"]
    assert report.left_out["too long"]["hours"] == pytest.approx(3 / 3600, abs=1e-3)
    assert report.outside_alphabet == {"ï": 1}


@settings(max_examples=50, deadline=None)
@given(data=st.lists(st.tuples(st.sampled_from(["good.wav", "long.wav", "bad.wav", "gone.wav"]),
                               st.sampled_from(["fine text here", "short", "?", "ünïcode and more"]),
                               st.sampled_from([np.nan, 1.0, 3.0])), max_size=12),
       limits=st.builds(RowLimits, st.sampled_from([None, 0.5, 2.0]), st.sampled_from([None, 2.0]),
                        st.booleans(), st.sampled_from([0, 3])),
       malformed=st.integers(0, 2))
def test_rows_read_are_rows_kept_and_rows_left_out(clips, data, limits, malformed):
    source = rows(clips, *[entry[:2] for entry in data], durations=[entry[2] for entry in data],
                  malformed=[("line", "bad")] * malformed)
    manifest, report = prepare(source, limits)
    assert report.rows == len(data) + malformed == len(manifest) + report.missing
    assert set(report.left_out) <= set(REASONS)


def test_without_limits_nothing_usable_is_left_out(clips):
    source = rows(clips, ("good.wav", "one"), ("long.wav", "ünïcode"))
    manifest, report = prepare(source)
    assert len(manifest) == 2 and report.left_out == {}
    assert report.outside_alphabet == {"ü": 1, "ï": 1}  # named nevertheless


def test_recordings_that_share_an_id_are_numbered_and_kept(clips):
    source = rows(clips, ("good.wav", "a"), ("long.wav", "b"), ("good.wav", "c"))
    source.ids = Column(["same", "same", "same"])
    manifest, report = prepare(source)
    assert list(manifest.ids) == ["same", "same-2"] and list(manifest.texts) == ["a", "b"]
    assert counts(report) == {"repeated id": 1}
    assert report.left_out["repeated id"]["examples"] == ["same"]  # as the source calls it


@given(st.lists(st.sampled_from(["a", "a-2", "a-3", "a-2-2", "b"]), max_size=12))
def test_numbered_ids_are_unique_and_the_first_keeps_its_name(ids):
    numbered = unique_ids(ids)
    assert len(set(numbered)) == len(ids)
    assert all(numbered[ids.index(i)] == i for i in ids)


def test_texts_that_nobody_speaks_as_they_are_written_are_counted(clips):
    source = rows(clips, ("good.wav", "Marque [risas] 1"), ("good.wav", "(dos) dos"), ("good.wav", "tres, cuatro!"),
                  ("gone.wav", "7"))
    _, report = prepare(source)
    assert report.unspoken == {"count": 2, "example": ["Marque [risas] 1", "marque risas 1"]}
    assert prepare(source, limits=RowLimits(text=False))[1].unspoken == {}
    facts = {"splits": {"train": report.facts()}, "source": {"kind": "", "where": "", "splits": {"train": ["train"]}}}
    assert ("train: 2 texts with digits or brackets, such as 'Marque [risas] 1', now 'marque risas 1': write what is "
            "spoken, or leave such texts out by an alphabet") in summarize(facts)
    assert "digits" not in summarize(facts, fresh=False), "each start would repeat it"


def test_recordings_of_dev_and_test_stay_out_of_train(clips):
    test = rows(clips, ("good.wav", "a"))
    manifest, report = prepare(rows(clips, ("good.wav", "a"), ("long.wav", "b")),
                               held_out=[recording_keys(test.wavs, test.starts)])
    assert list(manifest.texts) == ["b"] and counts(report) == {"also in dev or test": 1}


def test_a_listed_duration_that_is_wrong_is_corrected(clips):
    source = rows(clips, ("good.wav", "a"), ("long.wav", "b"), ("bad.wav", "c"), durations=[1.0, 1.0, 1.0])
    manifest, report = prepare(source)
    np.testing.assert_allclose(manifest.durations, [1.0, 3.0])
    assert report.durations == {"listed": 3, "measured": 0, "checked": 3, "disagree": 1}
    assert counts(report) == {"undecodable": 1}


@pytest.mark.parametrize("names, seconds, wrong, left_out", [
    (["long.wav"] * 10, [3.0] * 10, 10, {}), (["bad.wav", "good.wav"] * 5, [1.0] * 5, 0, {"undecodable": 5})],
    ids=["wrong durations", "damaged"])
def test_where_the_sample_is_mostly_wrong_or_damaged_all_are_measured(clips, monkeypatch, caplog, names, seconds,
                                                                      wrong, left_out):
    monkeypatch.setattr("sbkit.data.prepare.SAMPLE", 3)
    manifest, report = prepare(rows(clips, *[(name, "a") for name in names], durations=[1.0] * 10))
    np.testing.assert_allclose(manifest.durations, seconds)
    assert report.durations == {"listed": 10, "measured": 0, "checked": 10, "disagree": wrong}
    assert "measuring them all" in caplog.text and counts(report) == left_out


@pytest.mark.parametrize("durations", [None, [1.0, 3.0, 3.0]], ids=["measured", "listed"])
def test_a_clip_that_was_cut_off_is_left_out_and_one_that_goes_on_is_told(clips, tmp_path, durations):
    data = (clips / "long.wav").read_bytes()
    (tmp_path / "half.wav").write_bytes(data[: len(data) // 2])
    (tmp_path / "more.wav").write_bytes(data[:40] + (32_000).to_bytes(4, "little") + data[44:])
    source = rows(tmp_path, (f"{clips}/good.wav", "one"), ("half.wav", "two"), ("more.wav", "three"),
                  durations=durations)
    source.wavs = Column([f"{clips}/good.wav", *list(source.wavs)[1:]])
    manifest, report = prepare(source)
    assert list(manifest.texts) == ["one", "three"] and counts(report) == {"undecodable": 1}
    np.testing.assert_allclose(manifest.durations, [1.0, 1.0])
    assert report.left_out["undecodable"]["examples"] == ["u1: cut off: 1.50 of 3.00 s can be read"]
    assert report.notices == ["1 recording longer than the header says, such as u2: its header says 1.00 s, but it "
                              "goes on to 3.00 s: the rest isn't read"]


def test_a_recording_that_goes_on_is_told_with_its_cause_also_if_its_text_is_outside_the_alphabet(clips, tmp_path):
    data = (clips / "long.wav").read_bytes()
    (tmp_path / "more.wav").write_bytes(data[:40] + (32_000).to_bytes(4, "little") + data[44:])
    manifest, report = prepare(rows(tmp_path, ("more.wav", "naïve")))
    assert len(manifest) == 1 and report.outside_alphabet == {"ï": 1}
    assert report.notices == ["1 recording longer than the header says, such as u0: its header says 1.00 s, but it "
                              "goes on to 3.00 s: the rest isn't read"]


def test_a_detail_is_one_of_the_reason_for_which_a_row_is_left_out(clips, tmp_path):
    """Characters outside the alphabet, and audio behind what the header says, are no details of too few words."""
    data = (clips / "long.wav").read_bytes()
    (tmp_path / "more.wav").write_bytes(data[:40] + (32_000).to_bytes(4, "little") + data[44:])
    _, report = prepare(rows(tmp_path, ("more.wav", "naïve"), ("more.wav", "three words here")), RowLimits(min_words=3))
    assert report.left_out["few words"]["examples"] == ["u0"]
    assert report.tables[0]["detail"].to_pylist() == [""] and report.outside_alphabet == {"ï": 1}


def test_texts_that_are_probably_wrong_are_told_with_a_row(clips):
    source = rows(clips, ("good.wav", "one word"), ("good.wav", "two words"), ("long.wav", "g\u043eod"),
                  ("long.wav", "g\u043eod."), ("gone.wav", "x"))
    _, report = prepare(source, rules=TextRules())
    expected = [f"1 recording with more than one text, such as {clips}/good.wav: 'one word' (u0) and 'two words' (u1)",
                "2 texts with letters of two scripts in a word, such as u2: 'g\u043eod' has LATIN SMALL LETTER G "
                "beside CYRILLIC SMALL LETTER O"]
    assert report.notices == expected
    facts = {"splits": {"train": report.facts()}, "source": {"kind": "", "where": "", "splits": {"train": ["train"]}}}
    assert all(f"train: {notice}" in summarize(facts).splitlines() for notice in expected)
    source.ids = Column(["u\x1b[2J", "u1", "u2", "u3", "u4"])
    facts["splits"]["train"] = prepare(source, rules=TextRules())[1].facts()
    assert r"(u\x1b[2J)" in summarize(facts) and "\x1b" not in summarize(facts)
    source.ids = Column(["same"] * 5)
    assert prepare(source, rules=TextRules())[1].notices[0].endswith("'one word' (same) and 'two words' (same)")
    apart = rows(clips, ("long.wav", "one two"), ("long.wav", "one"), durations=[2.0, 1.0], starts=[0.5, 0.5])
    assert prepare(apart)[1].notices == [], "segments that begin together"


@pytest.mark.parametrize("texts, foreign", [
    (["one two"] * 19 + ["\u0434\u0430", "7", ""],
     "1 text wholly or in part in another script than the rest, such as u19: '\u0434\u0430'"),
    (["one two"] * 19 + ["b 1", "\u0434\u0430 yes"],
     "1 text wholly or in part in another script than the rest, such as u20: '\u0434\u0430 yes'"),
    (["\u6771\u4eac", "\u3072\u3089", "\u30b3\u30fc\u30d2\u30fc", "CD\u3092\u8cb7\u3046"] * 4, None),
    (["\u0434\u0430 iPhone", "\u0434\u0430"] * 4, None), (["one", "\u0434\u0430"] * 3, None),
    (["7", ""], None)])
def test_texts_in_another_script_than_the_rest_are_told(clips, texts, foreign):
    source = rows(clips, *[("good.wav", text) for text in texts])
    source.ids, source.wavs = Column([f"u{i}" for i in range(len(texts))]), Column([f"{clips}/good.wav"] * len(texts))
    notices = [each for each in prepare(source, rules=TextRules())[1].notices if "another script" in each]
    assert notices == ([] if foreign is None else [foreign])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ao\u043e\u03bf\u00aa\u1d6c\u1d78\u0301\u0488 -", max_size=6), max_size=4))
def test_scripts_beside_each_other_are_found_in_any_text(clips, texts):
    _, report = prepare(rows(clips, *[("good.wav", text) for text in texts]), rules=TextRules())
    told = any("two scripts" in notice for notice in report.notices)
    assert told or not any(re.search("[ao][\u043e\u03bf]|\u043e\u03bf|\u03bf\u043e", text) for text in texts)


def test_segments_before_the_cut_of_their_recording_are_kept(clips, tmp_path):
    data = (clips / "long.wav").read_bytes()
    (tmp_path / "half.wav").write_bytes(data[: len(data) // 2])
    source = rows(tmp_path, ("half.wav", "one"), ("half.wav", "two"), durations=[1.0, 1.0], starts=[0.2, 1.6])
    manifest, report = prepare(source)
    assert list(manifest.texts) == ["one"] and counts(report) == {"undecodable": 1}


def test_a_duration_of_nothing_is_one_that_nobody_measured(clips, monkeypatch):
    monkeypatch.setattr("sbkit.data.prepare.SAMPLE", 2)
    manifest, report = prepare(rows(clips, *[("good.wav", "a")] * 5, durations=[1, 0, 1, 0, 1]))
    np.testing.assert_allclose(manifest.durations, [1.0] * 5)
    assert report.durations["measured"] == 2


def test_a_sample_is_enough_where_it_agrees_and_all_are_opened_on_request(clips, monkeypatch):
    monkeypatch.setattr("sbkit.data.prepare.SAMPLE", 3)
    source = rows(clips, *[("good.wav", "a")] * 10, durations=[1.0] * 10)
    assert prepare(source)[1].durations["checked"] == 3
    assert prepare(source, check_audio="all")[1].durations["checked"] == 10


def test_segments_may_end_before_their_recording_but_not_after_it(clips):
    source = rows(clips, *[("long.wav", text) for text in "abcde"], starts=[0, 1, 2.5, 3.5, 3],
                  durations=[1, 1, 2, 1, 1])
    manifest, report = prepare(source)
    np.testing.assert_allclose(manifest.durations, [1, 1, 0.5])
    assert report.left_out["undecodable"]["examples"] == ["u3: it ends before its start at 3.50 s",
                                                          "u4: it ends before its start at 3.00 s"]


def test_a_segment_without_a_duration_lasts_to_the_end(clips):
    manifest, _ = prepare(rows(clips, ("long.wav", "a"), starts=[1.0]))
    assert manifest.durations[0] == pytest.approx(2.0)


@pytest.mark.parametrize("listing", [1, 2, 1000])
def test_what_exists(clips, tmp_path, monkeypatch, listing):
    monkeypatch.setattr("sbkit.data.presence.WORTH_LISTING", listing)
    shard = tmp_path / "s.tar"
    shard.write_bytes(bytes(2000))
    wavs = Column([f"{clips}/good.wav", f"{clips}/gone.wav", "/nowhere/a.wav",
                   f"{shard}?offset=512&size=1488", f"{shard}?offset=512&size=1489",
                   f"{tmp_path}/t.tar?offset=0&size=1", "s3://bucket/a.wav",
                   f"{tmp_path}/link.wav", f"{tmp_path}/lost.wav"])
    (tmp_path / "link.wav").symlink_to(clips / "good.wav")
    (tmp_path / "lost.wav").symlink_to(clips / "gone.wav")
    assert existing(wavs).tolist() == [True, False, False, True, False, False, True, True, False]


def test_training_rows_in_which_nobody_speaks_are_kept_and_counted(clips):
    source = rows(clips, ("good.wav", "one two three"), ("long.wav", " "), ("good.wav", "?!"), ("long.wav", "two"))
    manifest, report = prepare(source, RowLimits(silence=True, min_words=2))
    assert list(manifest.texts) == ["one two three", ""]
    assert counts(report) == {"no text": 1, "few words": 1}, "a text of which the rules leave nothing was spoken"
    assert report.notices[0] == "1 row without a text, trained on as silence (nonspeech), such as u1"
    assert list(prepare(source)[0].texts) == ["one two three", "two"]


def test_recordings_of_phones_and_browsers_are_rows_like_others(tmp_path):
    for suffix in ("m4a", "mp4", "webm", "aac"):
        (tmp_path / f"clip.{suffix}").write_bytes(contained(speechlike(1.0, 48000), 48000, suffix))
    for suffix in ("m4a", "webm"):
        data = contained(speechlike(4.0, 48000), 48000, suffix)
        (tmp_path / f"cut.{suffix}").write_bytes(data[: len(data) // 2])
    (tmp_path / "bomb.m4a").write_bytes(contained(np.zeros(48000 * 60, np.float32), 48000, "m4a"))
    names = ("clip.m4a", "clip.mp4", "clip.webm", "clip.aac", "cut.m4a", "cut.webm", "bomb.m4a")
    manifest, report = prepare(rows(tmp_path, *((name, "some words") for name in names)), RowLimits(max_duration=20.0))
    assert manifest.durations == pytest.approx([1.0] * 4, abs=0.1)
    assert counts(report) == {"undecodable": 2, "too long": 1}
    assert [re.sub(r"[\d.]+ of", "", each) for each in report.left_out["undecodable"]["examples"]] == [
        "u4: cannot be decoded: damaged or cut off (Invalid data found when processing input)",
        "u5: cut off:  4.01 s can be read"]
