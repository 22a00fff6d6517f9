"""The demo corpus: a true Common Voice layout, honest splits, the same bytes every time."""

from __future__ import annotations

import collections
import random
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpora import NEW_COLUMNS
from refusals import refused

from sbkit.data import demo, demo_voice
from sbkit.data.demo import GRAMMARS, expand

pytest.importorskip("espeakng_loader")

def words(grammar):
    """All words in lower case; for Chinese, which has no spaces, all phrases."""
    texts = " ".join(text for alternatives in grammar.values() for text in alternatives)
    return set(re.findall(r"[^\s.,?¿؟।。？]+", re.sub(r"\{\w+\}", " ", texts).lower()))


def read(path: Path) -> list[dict[str, str]]:
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"), strict=True)) for line in lines]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return demo.make_demo_corpus(tmp_path_factory.mktemp("demo"), hours=0.03, workers=2, show_progress=False)


@pytest.mark.slow
def test_has_the_files_and_columns_of_a_release(corpus):
    assert corpus.name == "en"
    for name in ("train", "dev", "test", "validated", "invalidated", "other"):
        rows = read(corpus / f"{name}.tsv")
        assert rows and tuple(rows[0]) == NEW_COLUMNS
        assert all((corpus / "clips" / row["path"]).is_file() for row in rows)
    splits = [row["path"] for name in ("train", "dev", "test") for row in read(corpus / f"{name}.tsv")]
    assert sorted(splits) == sorted(row["path"] for row in read(corpus / "validated.tsv"))
    invalid = read(corpus / "invalidated.tsv")
    assert all(int(row["down_votes"]) > int(row["up_votes"]) for row in invalid)


@pytest.mark.slow
def test_clips_are_what_clip_durations_says(corpus):
    durations = read(corpus / "clip_durations.tsv")
    assert {row["clip"] for row in durations} == {path.name for path in (corpus / "clips").iterdir()}
    for row in durations[::7]:
        samples, rate = soundfile.read(corpus / "clips" / row["clip"])
        assert rate == 16_000 and samples.ndim == 1
        assert len(samples) / rate == pytest.approx(int(row["duration[ms]"]) / 1000, abs=0.002)
        assert 1.5 <= len(samples) / rate <= 8
        assert 0.2 < np.abs(samples).max() <= 1.0
        assert 0 < np.abs(samples[:1000]).max() < 0.05  # a quiet start, though not digital silence
    hours = sum(int(row["duration[ms]"]) for row in durations) / 3.6e6
    assert hours == pytest.approx(0.03, rel=0.25)


@pytest.mark.slow
def test_voices_and_sentences_of_dev_and_test_are_never_in_training(corpus):
    splits = {name: read(corpus / f"{name}.tsv") for name in ("train", "dev", "test", "other", "invalidated")}
    for field in ("client_id", "sentence"):
        seen = {name: {row[field] for row in rows} for name, rows in splits.items()}
        seen["train"] |= seen["other"] | seen["invalidated"]
        assert not seen["train"] & seen["dev"]
        assert not seen["train"] & seen["test"]
        assert not seen["dev"] & seen["test"]


def test_timbres_of_dev_and_test_are_never_in_training():
    for language in ("en", "de", "fr", "sw"):
        voices = demo.draw_voices(language, seed=1)
        timbres = {split: {s.voice.partition("+")[2] for s in speakers} for split, speakers in voices.items()}
        assert not timbres["train"] & (timbres["dev"] | timbres["test"])
        everyone = [speaker for speakers in voices.values() for speaker in speakers]
        assert len(everyone) == 28
        assert len({(s.voice, s.pitch, s.words_per_minute) for s in everyone}) == 28


def test_one_hour_is_varied_and_covers_its_words():
    plan = demo.plan_clips(1250, GRAMMARS["en"], demo.draw_voices("en", 7), seed=7)
    counts = collections.Counter(clip.split for clip in plan)
    assert 100 <= counts["dev"] <= 200 and 100 <= counts["test"] <= 200
    assert len({clip.spoken for clip in plan}) == len(plan)
    said = collections.Counter(
        word.strip(".,?").lower() for clip in plan if clip.split == "train" for word in clip.spoken.split())
    assert set(said) == words(GRAMMARS["en"]) | {"an"}
    assert len(said) >= 110 and min(said.values()) >= 8


@pytest.mark.slow
def test_a_grammar_that_is_used_up_repeats_only_within_a_split():
    grammar = {"sentence": ("{n}, {n}, {n}.", "{n}, {n}, {n}, {n}."), "n": ("0", "1", "2")}
    plan = demo.plan_clips(400, grammar, demo.draw_voices("nl", 7), seed=7)
    by_split = collections.defaultdict(set)
    for clip in plan:
        by_split[clip.split].add(clip.spoken)
    assert len(plan) > len({clip.spoken for clip in plan})
    assert not by_split["train"] & (by_split["dev"] | by_split["test"])
    assert not by_split["dev"] & by_split["test"]


@pytest.mark.parametrize("language", sorted(GRAMMARS))
def test_no_two_words_of_a_language_sound_the_same(language):
    vocabulary = sorted(words(GRAMMARS[language]))
    assert len(vocabulary) >= (100 if language != "cmn" else 60)
    for dialect in demo.DIALECTS.get(language, {language: ""}):
        sounds = collections.defaultdict(list)
        for word, sound in zip(vocabulary, demo_voice.pronounce(vocabulary, dialect), strict=True):
            sounds[sound.replace("ˈ", "").replace("ˌ", "")].append(word)
        assert "" not in sounds
        assert [same for same in sounds.values() if len(same) > 1] == []


def test_expand_capitalises_and_says_an():
    texts = [expand(GRAMMARS["en"], random.Random(i)) for i in range(500)]
    assert all(text[0].isupper() and text[-1] in ".?" and "{" not in text for text in texts)
    assert not any(f" a {vowel}" in f" {text.lower()}" for text in texts for vowel in "aeiou")
    assert any(" an " in text for text in texts)


@pytest.mark.slow
def test_same_seed_same_bytes_with_any_number_of_workers(corpus, tmp_path):
    alone = demo.make_demo_corpus(tmp_path, hours=0.03, workers=1, show_progress=False)
    files = sorted(path.relative_to(corpus) for path in corpus.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(alone) for path in alone.rglob("*") if path.is_file())
    assert [name for name in files if (corpus / name).read_bytes() != (alone / name).read_bytes()] == []


def test_a_voice_does_not_depend_on_what_was_said_before():
    text = "The old farmer carries a basket."
    first, rate = demo_voice.speak(text, "en-us+m3")
    demo_voice.speak("Something else entirely, with another voice!", "fr+f2", pitch=80, words_per_minute=250)
    again, _ = demo_voice.speak(text, "en-us+m3")
    assert rate == 22_050
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("voice", ["xx", "en+nobody", "en-gb"])
def test_an_unknown_voice_is_refused_not_replaced(voice):
    with refused("unknown-voice"):
        demo_voice.speak("hello", voice)


def test_the_takes_of_an_ordinary_corpus_are_drawn_as_they_always_were(monkeypatch):
    said = []

    def speak(text, voice, **how):
        said.append((text, voice, how))
        return np.full(44_100, 0.5, np.float32), 22_050

    monkeypatch.setattr(demo_voice, "speak", speak)
    speaker = demo.Speaker("id", "en-us+m3", words_per_minute=160, pitch=40, age="", gender="", accent="")
    for seed in range(5):
        sound = demo.speak_clip(demo.DemoClip(0, "train", speaker, "Hello.", "Hello.", seed))
        rng = np.random.default_rng(seed)
        rate, pitch, spread = (int(rng.integers(*each)) for each in ((-8, 9), (-5, 6), (40, 61)))
        assert said[-1] == ("Hello.", "en-us+m3", {"seed": seed, "words_per_minute": 160 + rate, "pitch": 40 + pitch,
                                                   "pitch_range": spread})
        silence = rng.uniform(0.1, 0.35, size=2)
        assert np.abs(sound).max() == pytest.approx(10 ** (rng.uniform(-9, -1) / 20), abs=0.02)
        assert len(sound) == pytest.approx(16_000 * (2 + silence.sum()), abs=5)


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    return demo.make_demo_corpus(tmp_path_factory.mktemp("studio"), hours=0.02, workers=1, show_progress=False,
                                 voices=["en-us+f2", "en-us"])


@pytest.mark.slow
def test_ones_own_voices_speak_all_splits_steadily(studio):
    rows = {name: read(studio / f"{name}.tsv") for name in ("train", "dev", "test")}
    assert {row["client_id"] for row in rows["train"]} == {"en-us+f2", "en-us"}
    assert all({row["client_id"] for row in split} <= {"en-us+f2", "en-us"} for split in rows.values())
    sentences = [{row["sentence"] for row in split} for split in rows.values()]
    assert not sentences[0] & sentences[1] and not sentences[0] & sentences[2]
    loudest = [np.abs(soundfile.read(studio / "clips" / row["path"])[0]).max() for row in rows["train"][:12]]
    assert min(loudest) > 0.9 * max(loudest), "one level, as in a studio"


@pytest.mark.slow
def test_a_corpus_of_other_voices_is_another(studio):
    for voices in ([], ["en-us"]):
        with refused("output-exists"):
            demo.make_demo_corpus(studio.parent, hours=0.02, workers=1, show_progress=False, voices=voices)


def test_an_existing_corpus_is_used_again_and_a_foreign_folder_is_left_alone(corpus):
    stamps = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    assert demo.make_demo_corpus(corpus.parent, hours=0.03, show_progress=False) == corpus
    assert stamps == {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    with refused("output-exists"):
        demo.make_demo_corpus(corpus.parent, hours=0.03, seed=2)


@pytest.mark.slow
def test_a_language_without_a_grammar_counts_and_its_transcripts_are_digits(tmp_path):
    folder = demo.make_demo_corpus(tmp_path, hours=0.01, language="nl", workers=1, show_progress=False)
    rows = read(folder / "train.tsv")
    assert rows and all(row["locale"] == "nl" for row in rows)
    assert all(number.isdigit() for row in rows for number in row["sentence"].rstrip(".").split(", "))


@pytest.mark.parametrize("options, code", [
    ({"language": "rw"}, "unknown-language"), ({"language": "fo"}, "unknown-language"),
    ({"voices": ["en+nobody"]}, "unknown-voice"), ({"hours": 0}, "bad-value"), ({"hours": float("nan")}, "bad-value"),
    ({"workers": 0}, "bad-value")])
def test_what_cannot_be_spoken_is_named_and_nothing_stays(tmp_path, options, code):
    with refused(code):
        demo.make_demo_corpus(tmp_path / "out", **{"hours": 0.01, "workers": 1, "show_progress": False, **options})
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("code, name", [("zh-CN", "cmn"), ("zh-HK", "yue"), ("sv-SE", "sv"), ("en", "en"),
                                        ("ga-IE", "ga"), ("nn-NO", "nb"), ("en-US", "en-us")])
def test_common_voice_codes_find_their_espeak_language(code, name):
    assert demo.espeak_name(code) == name


def test_an_unwritable_folder_is_a_plain_error(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("not-writable"):
        demo.make_demo_corpus(tmp_path / "file" / "out", hours=0.01, workers=1, show_progress=False)
