"""A stream through the Python API: words as they come, the same however they come, in memory that doesn't grow."""

from __future__ import annotations

import gc
import pathlib
import sys
import time
import types

import bundles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import sbkit.infer
from sbkit.infer.samples import Resampler

SAID = "she sells sea shells by the sea shore"


@pytest.fixture(scope="module")
def model(bundle):
    with sbkit.infer.load(bundle, device="cpu", threads=1) as loaded:
        yield loaded


def settled(results):
    return [word for each in results for word in each.settled]


def texts(results):
    return " ".join(word.text for word in settled(results))


def cut(signal, cuts):
    return np.split(signal, sorted(min(at, len(signal)) for at in cuts))


@pytest.mark.slow
def test_words_come_before_the_stream_ends(model):
    with refused("bad-value"):
        model.stream([bundles.say("ab cd")])
    stream = model.stream(chunk=160)
    shown = [(stream.text(result.settled), stream.text(result.partial), round(result.seconds, 2))
             for result in stream([bundles.say("ab cd"), np.zeros(16_000, np.float32)])]
    assert shown[:5] == [("", "", 0.16), ("", "ab", 0.32), ("ab", "", 0.48), ("", "c", 0.64), ("", "cd", 0.8)]
    assert [each for each in shown if each[0]] == [("ab", "", 0.48), ("cd", "", 1.44)]


def test_words_have_their_times_and_confidence(model):
    """Those of the recording, one frame later: so says this model."""
    signal = bundles.say("ab cd", hold=3)
    whole, results = model.transcribe(signal).words, settled(model.stream()(signal))
    assert [word.text for word in results] == [word.text for word in whole] == ["ab", "cd"]
    for one, other in zip(results, whole, strict=True):
        assert (one.start, one.end) == pytest.approx((other.start + 0.04, other.end + 0.04))
        assert one.confidence == pytest.approx(other.confidence, abs=1e-6)


def test_a_pause_ends_a_line_and_so_does_the_end(model):
    pause = np.zeros(2 * bundles.RATE, np.float32)
    results = list(model.stream(chunk=160)([bundles.say("one two"), pause, bundles.say("three")]))
    lines = [(sum(len(each.settled) for each in results[: i + 1]), each.seconds)
             for i, each in enumerate(results) if each.endpoint]
    spoken = settled(results)
    assert [count for count, _ in lines] == [2, 3] and [word.text for word in spoken] == ["one", "two", "three"]
    assert 0.7 <= lines[0][1] - spoken[1].end <= 0.74


@pytest.mark.slow
def test_results_do_not_depend_on_the_pieces(model):
    signal = bundles.say(SAID)[: 16 * 4 * bundles.FRAME + 77]
    stream = model.stream(chunk=160, beam=8)  # the next test has a greedy one
    whole = list(stream(signal))
    assert len(whole) > 10 and texts(whole).split()[0] == "she"
    assert list(stream(signal[i : i + 1] for i in range(len(signal)))) == whole
    assert list(stream(np.array_split(signal, 7))) == whole
    rng = np.random.default_rng(1)
    assert list(stream(cut(signal, rng.integers(0, len(signal), 40)))) == whole


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 80_000), max_size=20), chunk=st.sampled_from([160, 320, 640]),
       samples=st.integers(0, 80_000))
def test_streams_of_any_length_and_pieces(model, cuts, chunk, samples):
    signal = bundles.say(SAID)[:samples]
    stream = model.stream(chunk=chunk)
    assert list(stream(cut(signal, cuts))) == list(stream(signal))


def test_sample_types_give_the_same_words(model, bundle):
    signal = bundles.say("a bird sat")
    said = texts(model.stream()(signal))
    for same in (signal.astype(np.float64), np.round(signal * 32768).astype(np.int16)):
        assert texts(model.stream()(same)) == said == "a bird sat"
    with sbkit.infer.load(bundle, model="torch", device="cpu", threads=1) as torch_model:
        assert texts(torch_model.stream()(signal)) == said


def test_another_rate_is_resampled(model):
    signal = np.repeat(bundles.say("abc abc", hold=6), 3)  # 48 kHz
    signal = np.concatenate([np.zeros(960, np.float32), signal])  # a filter rings where levels change: not at a frame
    stream = model.stream(rate=48_000)
    whole = list(stream(signal))
    assert texts(whole) == "abc abc" and whole[-1].seconds == pytest.approx(len(signal) / 48_000, abs=0.05)
    pieces = list(stream(np.array_split(signal, 333)))
    assert texts(pieces) == "abc abc" and pieces[-1].seconds == whole[-1].seconds


@pytest.mark.parametrize("given, rate, code", [
    (np.array([0.1, np.nan], np.float32), None, "bad-samples"), (np.array([0.1, -np.inf]), None, "bad-samples"),
    *((given, None, "not-samples") for given in (
        np.zeros((160, 2), np.float32), b"\0\0", bytearray(2), memoryview(bytes(2)), "x.wav", pathlib.Path("x.wav"),
        None, [[0.5], [0.5, 0.5]], 0.5, np.zeros(160, np.int32), np.zeros(160, bool), np.full(160, 12_000.0))),
    (np.zeros(160, np.float32), 8_000, "not-samples"),
])
def test_invalid_samples_leave_the_stream_unchanged(model, given, rate, code):
    signal = bundles.say("abc def")
    stream = model.stream(chunk=160)
    results = stream.feed(signal[:9_000])
    with refused(code):
        stream.feed(given, rate)
    late = np.concatenate([np.zeros(200_000, np.float32), np.array([np.nan], np.float32)])
    with refused("bad-samples"):  # a piece is checked before it is decoded
        stream.feed(late)
    results += stream.feed(signal[9_000:], 16_000) + stream.finish()
    assert results == list(stream(signal))


@pytest.mark.parametrize("given", [b"\0\0", "x.wav", None])
def test_an_invalid_argument_is_reported(model, given):
    with refused("not-samples"):
        list(model.stream()(given))


@pytest.mark.parametrize(("rate", "samples"), [(16_000, 5_460), (16_000, 100), (48_000, 16_380)])
@pytest.mark.parametrize("search", [{}, {"beam": 8}], ids=["greedy", "beam"])
def test_nothing_is_transcribed_after_the_end_of_the_audio(model, search, rate, samples):
    """A frame of 40 ms reaches beyond it."""
    signal = bundles.voiced([bundles.PIECES.index("a")] * 9).repeat(rate // bundles.RATE)[:samples]
    results = list(model.stream(rate=rate, **search)(signal))
    ends = [each.seconds for each in results] + [word.end for each in results for word in each.settled + each.partial]
    assert max(ends) == results[-1].seconds == pytest.approx(samples / rate, abs=1e-4)


def test_samples_after_the_end_are_refused_until_reset(model):
    stream = model.stream()
    stream.feed(bundles.say("abc"))
    assert texts(stream.finish()) == "abc"
    for call in (lambda: stream.feed(np.zeros(1, np.float32)), stream.finish):
        with refused("stream-ended"):
            call()
    stream.reset()
    assert stream.finish()[-1].seconds == 0


def test_reset_begins_a_new_stream(model):
    stream = model.stream(chunk=160, rate=48_000)
    signal = np.repeat(bundles.say("abc abc", hold=6), 3)
    fresh = list(stream(signal))
    for count in (1, 5_000, 50_000):
        stream.reset()
        stream.feed(signal[:count])
        stream.reset()
        assert stream.feed(signal) + stream.finish() == fresh


def test_a_chunk_that_was_not_trained_is_refused(model):
    with refused("bad-value"):
        model.stream(chunk=200)
    assert model.stream().chunk_seconds == model.stream(chunk=320.0).chunk_seconds == pytest.approx(0.32)
    for chunk in ("640", 320.5, True, [640], float("nan"), float("inf")):
        with refused("bad-value"):
            model.stream(chunk=chunk)


@pytest.mark.parametrize("rate", [0, 1_000, 16_000.5, "16000", True, 10**400])
def test_invalid_rates_are_refused(model, rate):
    with refused("bad-value"):
        model.stream(rate=rate)


def test_a_bundle_without_the_graph_says_how_to_get_one(tmp_path):
    with sbkit.infer.load(bundles.make(tmp_path / "b"), device="cpu") as model:
        with refused("no-streaming-graph"):
            model.stream()
        assert model.transcribe(bundles.say("abc")).text == "abc"


def test_a_language_model_is_read_once_for_all_streams_of_a_search(model, tmp_path):
    (tmp_path / "lm.arpa").write_text(
        "\\data\\\nngram 1=4\n\n\\1-grams:\n-1 <s>\n-1 </s>\n-1 <unk>\n-0.1 abc\n\n\\end\\\n")
    options = {"lm": tmp_path / "lm.arpa", "lm_weight": 0.1, "hot_words": ["abc"], "beam": 8}
    one, other = model.stream(**options), model.stream(**options)
    assert one._decoder is other._decoder is not model.stream()._decoder
    assert texts(one(bundles.say("abc abc"))) == texts(other(bundles.say("abc abc"))) == "abc abc"
    with refused("no-such-path"):
        model.stream(lm="nowhere.arpa")
    with refused("conflicting-options"):
        model.stream(lm_weight=0.6)


def test_hot_words_must_be_a_list(model):
    with refused("bad-hot-word"):
        model.stream(hot_words="candle")
    assert texts(model.stream(hot_words=("abc",))(bundles.say("abc"))) == "abc"


def test_closing_the_model_ends_its_streams(bundle):
    with sbkit.infer.load(bundle, device="cpu") as model:
        stream = model.stream()
    for _ in range(2):
        with refused("model-closed"):
            stream.feed(np.zeros(100_000, np.float32))
        with refused("model-closed"):
            stream.reset()
        with refused("model-closed"):
            model.stream()


def test_a_closed_model_opens_no_stream(bundle):
    with sbkit.infer.load(bundle, device="cpu") as model:
        pass
    with refused("model-closed"):
        model.stream()


def size_of(*things):
    """Bytes of all that can be reached from here."""
    seen, total = set(), 0
    while things:
        things = [each for each in things if id(each) not in seen and not isinstance(each, (type, types.ModuleType))]
        seen |= set(map(id, things))
        total += sum(each.nbytes if isinstance(each, np.ndarray) else sys.getsizeof(each) for each in things)
        things = gc.get_referents(*{id(each): each for each in things}.values())
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "minutes"), [pytest.param(16_000, 60, marks=pytest.mark.long), (48_000, 12)])
def test_an_hour_takes_the_memory_and_the_time_per_chunk_of_a_minute(model, rate, minutes):
    minute = np.concatenate([bundles.say(SAID), np.zeros(10 * bundles.RATE, np.float32), bundles.say(SAID * 3)])
    minute = np.resize(minute, 60 * bundles.RATE).repeat(rate // bundles.RATE)
    stream, sizes, words = model.stream(chunk=640, rate=rate), [], []
    for _ in range(minutes):
        words.append(sum(len(result.settled) for result in stream.feed(minute)))
        session = stream._session
        sizes.append(size_of(session.state, session.search, session._windows, session._waiting, session._results))
    assert max(words) - min(words) < 5 and min(words) > 50
    assert max(sizes[-6:]) < 1.1 * max(sizes[:6]) < 100_000, sizes

    def seconds(stream):
        began = time.process_time()
        stream.feed(minute)
        return time.process_time() - began

    fresh = model.stream(chunk=640, rate=rate)
    # In turn, because a machine is faster at one time than at another.
    times = np.array([(seconds(stream), seconds(fresh)) for _ in range(6)])
    assert times[:, 0].min() < 2 * times[:, 1].min(), times


def test_a_resampled_stream_has_the_same_samples_in_any_pieces():
    signal = np.random.default_rng(0).normal(size=100_000).astype(np.float32) / 4
    for rate in (8_000, 44_100, 48_000):
        whole, pieces = Resampler(rate, 16_000), Resampler(rate, 16_000)
        found = np.concatenate([pieces(part) for part in np.array_split(signal, 777)] + [pieces(signal[:0], last=True)])
        assert np.array_equal(found, np.concatenate([whole(signal), whole(signal[:0], last=True)]))
        assert len(found) == pytest.approx(len(signal) * 16_000 / rate, abs=2)
