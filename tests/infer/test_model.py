"""Recordings to transcripts: any source, any length, batches, times, confidence."""

import io
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import bundles
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import sbkit.infer
from sbkit.data.audio import AudioError
from sbkit.decode.spans import Word
from sbkit.infer import Options, Recording
from sbkit.infer.transcript import FORMATS, Transcript, clock

WORDS = st.text(st.sampled_from("abcdefghijklm"), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with sbkit.infer.load(bundles.make(tmp_path_factory.mktemp("m") / "b", chunk_seconds=4.0), device="cpu") as loaded:
        yield loaded


def write(path, signal, rate=bundles.RATE, **options):
    soundfile.write(path, signal, rate, **options)
    return str(path)


def test_each_kind_of_source_gives_the_same_transcript(model, tmp_path):
    signal = bundles.say("she sells sea shells")
    path = write(tmp_path / "clip.wav", signal, subtype="FLOAT")
    data = (tmp_path / "clip.wav").read_bytes()
    for source in (path, tmp_path / "clip.wav", data, io.BytesIO(data), signal, Recording(path)):
        assert model.transcribe(source).text == "she sells sea shells"
    both = model.transcribe([path, bundles.say("more")])
    assert [each.text for each in both] == ["she sells sea shells", "more"]
    assert model.transcribe(path).id == "clip"
    assert model.transcribe_file(path) == "she sells sea shells"


def test_words_have_their_times_and_confidence(model):
    found = model.transcribe(bundles.say("ab cd", hold=3))
    assert [word.text for word in found.words] == ["ab", "cd"]
    # A character takes 3 frames and a blank, of 40 ms; the space before a word is a token of its own.
    spans = [(word.start, word.end) for word in found.words]
    assert spans == [pytest.approx((4 * 0.04, 11 * 0.04)), pytest.approx((16 * 0.04, 23 * 0.04))]
    assert all(word.confidence > 0.99 for word in found.words) and found.confidence > 0.99
    assert found.duration == pytest.approx(24 * 0.04) and found.language == "en"


@pytest.mark.parametrize("search", [None, {"beam": 8}])
def test_words_do_not_span_pauses(model, search):
    """Models that were trained on single sentences don't say that a word begins after another sentence."""
    glued = [i for i in bundles.spell("more") if bundles.PIECES[i] != "▁"]
    found = sbkit.infer.Model(model.engine, Options(search=search)).transcribe(
        bundles.voiced(bundles.spell("say no") + [0] * 18 + glued + [0] * 15 + glued))
    assert found.text == "say no moremore"
    assert [segment.text for segment in found.segments] == ["say no", "moremore"]


def test_silence_has_no_words(model):
    found = model.transcribe(np.zeros(30_000, np.float32))
    assert (found.text, found.words, found.confidence, found.segments) == ("", [], None, [])


@settings(max_examples=15, deadline=None)
@given(said=st.lists(WORDS, min_size=1, max_size=60), hold=st.integers(1, 4), pauses=st.lists(st.integers(0, 30)))
def test_cuts_do_not_change_the_words(model, said, hold, pauses):
    """Words cut through are put together again: the frames of both sides meet at the cut."""
    ids, frames = [], {}
    for i, word in enumerate(said):
        frames[i] = len(ids) + hold + 1  # behind the space
        ids += bundles.spell(word, hold) + [0] * (pauses[i % len(pauses)] if pauses else 0)
    found = model.transcribe(bundles.voiced(ids))
    assert found.text == " ".join(said)
    assert [word.start for word in found.words] == pytest.approx([frames[i] * 0.04 for i in range(len(said))])
    assert found.duration == pytest.approx(len(ids) * 0.04)


@pytest.mark.long
@pytest.mark.slow
def test_an_hour_is_transcribed_without_errors(model, tmp_path):
    """And in little memory: its samples alone are 230 MB."""
    said = "the brave teacher finds an old ladder near green river after dinner"
    minute = np.concatenate([bundles.say(said), np.zeros(60 * bundles.RATE, np.float32)])[: 60 * bundles.RATE]
    path = tmp_path / "hour.wav"
    with soundfile.SoundFile(path, "w", bundles.RATE, 1, subtype="PCM_16") as file:
        for _ in range(60):
            file.write(minute)
    tracemalloc.start()
    found = model.transcribe(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6, f"{peak / 1e6:.0f} MB"
    assert found.text == " ".join([said] * 60)
    assert found.words[-1].end == pytest.approx(59 * 60 + len(bundles.say(said)) / bundles.RATE, abs=0.05)


def test_other_rates_and_stereo_are_read(model, tmp_path):
    signal = np.repeat(bundles.say("abc abc", hold=6), 3)  # 48 kHz
    signal = np.concatenate([np.zeros(960, np.float32), signal])  # a filter rings where levels change: not at a frame
    found = model.transcribe(write(tmp_path / "a.flac", np.stack([signal, signal], 1), 48_000))
    assert found.text == "abc abc" and found.duration == pytest.approx(len(signal) / 48_000, abs=0.05)


def test_start_and_duration_select_a_part(model, tmp_path):
    signal = np.concatenate([bundles.say("one"), bundles.say("two")])
    path = write(tmp_path / "clip.wav", signal, subtype="FLOAT")
    half = len(bundles.say("one")) / bundles.RATE
    assert model.transcribe(Recording(path, start=half)).text == "two"
    assert model.transcribe(Recording(path, duration=half - 0.02)).text == "one"


def test_an_unreadable_recording_is_named(model, tmp_path):
    (tmp_path / "noise.wav").write_bytes(b"not audio at all")
    with refused("unknown-audio-format", kind=AudioError):
        model.transcribe([bundles.say("fine"), tmp_path / "noise.wav"])
    assert model.transcribe(bundles.say("fine")).text == "fine", "the model goes on"


@pytest.mark.slow
def test_results_are_in_order_with_any_batches(model):
    rng = np.random.default_rng(0)
    said = [" ".join(rng.choice(["ab", "cde", "f", "ghij"], rng.integers(1, 40))) for _ in range(30)]
    signals = [bundles.say(text) for text in said]
    for options in (Options(), Options(batch_seconds=1.0, readers=1), Options(batch_seconds=500.0, readers=5),
                    Options(chunk_seconds=2.0)):
        found = sbkit.infer.Model(model.engine, options).transcribe(signals)
        assert [each.text for each in found] == said


def test_readers_end_when_the_generator_is_closed(model, tmp_path):
    before = threading.active_count()
    path = write(tmp_path / "long.wav", np.tile(bundles.say("abc"), 400), subtype="FLOAT")
    results = model._pipeline.run([Recording(path) for _ in range(20)])
    next(results)
    results.close()
    assert threading.active_count() == before


def test_hot_words_change_similar_words(tmp_path):
    """The level between two letters is either; a hot word decides, in long recordings and short ones."""
    ids = bundles.spell("ab")
    unsure = bundles.voiced(ids)
    between = (bundles.PIECES.index("b") + bundles.PIECES.index("c")) / 2 - 0.04
    unsure[unsure == np.float32(bundles.PIECES.index("b") / bundles.LEVELS)] = between / bundles.LEVELS
    bundle = bundles.make(tmp_path / "b", chunk_seconds=3.0)
    said = np.concatenate([bundles.say("one"), unsure, np.zeros(8_000, np.float32), unsure])
    long = np.concatenate([said, np.zeros(16_000, np.float32)] * 6)
    with sbkit.infer.load(bundle, device="cpu") as plain:
        assert plain.transcribe(said).text == "one ab ab"
        greedy = plain.transcribe(long)
        search = sbkit.infer.Model(plain.engine, Options(search={"hot_words": {"ac": 6.0}}))
        assert search.transcribe(said).text == "one ac ac"
        found = search.transcribe(long)
        assert found.text == " ".join(["one ac ac"] * 6)
        assert [word.start for word in found.words] == pytest.approx([word.start for word in greedy.words], abs=0.041)
        many = search.transcribe([said] * 70)
        assert {each.text for each in many} == {"one ac ac"} and len(many) == 70


def test_a_search_decodes_clear_speech_as_greedy_does(model):
    rng = np.random.default_rng(1)
    signals = [bundles.say(" ".join(rng.choice(["ab", "cde", "f"], rng.integers(1, 40)))) for _ in range(10)]
    search = sbkit.infer.Model(model.engine, Options(search={"beam": 8}))
    for mine, theirs in zip(search.transcribe(signals), model.transcribe(signals), strict=True):
        assert mine.text == theirs.text
        assert [word.start for word in mine.words] == pytest.approx([word.start for word in theirs.words])


def test_threads_search_in_parallel_with_their_own_words(model, monkeypatch):
    search = sbkit.infer.Model(model.engine, Options(search={"beam": 4}))
    inside, most, real = [], [], search._pipeline.decoder._search.search

    def watched(*given):
        inside.append(1)
        time.sleep(0.02)
        most.append(len(inside))
        try:
            return real(*given)
        finally:
            inside.pop()

    monkeypatch.setattr(search._pipeline.decoder._search, "search", watched)
    texts = [f"say {letter}" for letter in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        assert [each.text for each in pool.map(lambda text: search.transcribe(bundles.say(text)), texts)] == texts
    assert max(most) > 1, "none waits for another"


def test_options_of_the_search_that_do_not_exist_are_reported(model):
    with refused("unknown-argument"):
        sbkit.infer.Model(model.engine, Options(search={"magic": 1}))


def test_segments_end_at_pauses_and_fit_subtitles(model):
    signal = np.concatenate([bundles.say("ab cd"), np.zeros(16_000, np.float32), bundles.say("ef " * 40)])
    segments = model.transcribe(signal).segments
    assert segments[0].text == "ab cd"
    assert all(each.end - each.start <= 7.0 and len(each.text) <= 84 for each in segments)
    assert " ".join(each.text for each in segments) == "ab cd " + " ".join(["ef"] * 40)


def test_transcripts_in_each_format(model):
    found = model.transcribe(np.concatenate([bundles.say("a"), np.zeros(16_000, np.float32), bundles.say("cd")]))
    found.id = "my clip"
    texts = {name: write(found) for name, write in FORMATS.items()}
    assert texts["txt"] == "a cd\n"
    assert texts["srt"].startswith("1\n00:00:00,120 --> 00:00:00,200\na\n\n2\n00:00:01,360 --> ")
    assert texts["vtt"].startswith("WEBVTT\n\n00:00:00.120 --> 00:00:00.200\na\n\n00:00:01.360 --> ")
    odd = FORMATS["vtt"](Transcript("", "", [Word("<v>&'", 0.0, 1.0, 1.0)]))
    assert odd.endswith("\n&lt;v&gt;&amp;'\n"), "they are no markup"
    assert texts["ctm"].splitlines()[0] == "my_clip 1 0.12 0.08 a 1.000"
    facts = json.loads(texts["json"])
    assert [word["text"] for word in facts["words"]] == ["a", "cd"] and facts["segments"][1]["text"] == "cd"


@given(st.floats(0, 400_000))
def test_clock_rounds_across_minutes_and_hours(seconds):
    hours, minutes, rest = clock(seconds, ".").split(":")
    assert int(minutes) < 60 and float(rest) < 60
    assert int(hours) * 3600 + int(minutes) * 60 + float(rest) == pytest.approx(seconds, abs=0.00051)


def test_a_transcript_without_spaces_is_joined_without_them():
    words = [Word("東", 0.0, 0.1, 1.0), Word("京", 0.1, 0.2, 1.0)]
    assert Transcript("x", "東京", words, spaced=False).segments[0].text == "東京"


def test_confidence_is_the_mean_of_the_words():
    assert Transcript("", "", [Word("a", 0, 1, 0.5), Word("b", 1, 2, 1.0)]).confidence == 0.75


def test_errors_in_python_name_python_arguments(tmp_path):
    bundles.make(tmp_path / "bundle")
    with refused("bad-value"):
        sbkit.infer.load(tmp_path / "bundle", options={"beam": 5})
    with refused("unknown-argument"):
        sbkit.infer.load(tmp_path / "bundle", options=Options(search={"nbest": 5}))
    with sbkit.infer.load(tmp_path / "bundle") as model, refused("bad-value"):
        model.transcribe(np.zeros(400, np.float32), sample_rate="16000")
