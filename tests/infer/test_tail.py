"""A model for whole recordings hears live speech: the end whose words may change is decoded again and again."""

import bundles
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbkit.decode.spans import Word
from sbkit.infer.decoding import decoder
from sbkit.infer.engine import Engine
from sbkit.infer.tail import Tail, TailStream

RATE, FRAME = bundles.RATE, bundles.FRAME


@given(st.data())
def test_a_tail_has_the_words_of_the_recording(data):
    """Through the tail alone, with a model that hears exactly: no word is lost, doubled or changed."""
    names = data.draw(st.lists(st.text("abcdefgh", min_size=1, max_size=6), min_size=1, max_size=40))
    gaps = data.draw(st.lists(st.sampled_from([0.08, 0.2, 0.5, 0.8, 3.0, 9.0]), min_size=len(names),
                              max_size=len(names)))
    spoken, at = [], 0.4
    for name, gap in zip(names, gaps, strict=True):
        length = FRAME * max(1, round(0.1 * len(name) * RATE / FRAME)) / RATE
        begin = round(at * RATE / FRAME) * FRAME / RATE
        spoken.append(Word(name, begin, begin + length, 1.0))
        at = begin + length + gap
    total = int(at * RATE)
    longest = data.draw(st.sampled_from([4.0, 8.0, 20.0]))
    tail, found, most = Tail(RATE, FRAME, longest), [], 0

    def look(end=False):
        signal, skip = tail.window()
        last = end and not tail.undecoded_seconds
        first, until = tail.start / RATE, (tail.start + len(signal)) / RATE
        from_ = first + skip * FRAME / RATE
        heard = [Word(word.text, max(word.start, from_) - from_, min(word.end, until) - from_, 1.0)
                 for word in spoken if word.end > from_ + 1e-6 and word.start < until - 1e-6]
        found.extend(tail.finalise(heard, len(signal), skip, last)[0])
        return last

    came = 0
    while came < total:
        step = min(data.draw(st.sampled_from([160, 1600, 5000, 16000])), total - came)
        tail.add(np.zeros(step, dtype=np.float32))
        came += step
        if tail.due:
            look()
        most = max(most, tail.length)
    while not look(end=True):
        pass
    whole = [(word.text, round(word.start, 3), round(word.end, 3)) for word in found]
    assert whole == [(word.text, round(word.start, 3), round(word.end, 3)) for word in spoken]
    assert most <= (longest + 3) * RATE


def test_memory_is_bounded_without_pauses():
    """A tail never grows beyond what the model hears at once, with or without pauses, with or without words."""
    def endless(until):
        return [Word("a", 0.1 * i, 0.1 * i + 0.05, 1.0) for i in range(int(until * 10))]

    for words in (lambda until: [], endless):
        tail, heard = Tail(RATE, FRAME, 20.0), 0
        for _ in range(6_000):  # ten minutes in tenths of a second, thirty times what is heard at once
            tail.add(np.zeros(1600, dtype=np.float32))
            if tail.due:
                signal, skip = tail.window()
                heard += len(signal)
                tail.finalise(words(len(signal) / RATE - skip * FRAME / RATE), len(signal), skip)
            assert tail.length <= 23 * RATE
        assert heard <= 12 * 600 * RATE, "what is looked at again and again has a bounded cost"


@pytest.fixture(scope="module", params=[bundles.make, bundles.make_transducer])
def engine(request, tmp_path_factory):
    folder = request.param(tmp_path_factory.mktemp("whole") / "bundle")
    with Engine(folder, device="cpu", threads=1) as engine:
        yield engine


@pytest.mark.parametrize("piece", [100, 1_600, 1_000_000])
def test_a_stream_without_a_streaming_graph_has_the_words_of_the_recording(engine, piece):
    silence = np.zeros(RATE, np.float32)
    signal = np.concatenate([part for line in ("she sings", "sea ships") for part in (bundles.say(line), silence)])
    signal = np.concatenate([signal, bundles.say("no pause")])
    stream = TailStream(engine, decoder(engine.vocabulary, None))
    lines = [line for at in range(0, len(signal), piece) for line in stream.feed(signal[at:at + piece])]
    lines += stream.finish()
    complete = [line.settled for line in lines if line.complete]
    assert [[word.text for word in words] for words in complete] == [["she", "sings"], ["sea", "ships"],
                                                                    ["no", "pause"]]
    partial = [word.text for word in lines[0].words]
    assert piece > len(signal) or (partial and not lines[0].complete), "words come while the line is spoken"
    assert complete[1][0].start == pytest.approx(len(bundles.say("she sings")) / RATE + 1.12, abs=0.2)
    assert stream.seconds == len(signal) / RATE


@pytest.mark.parametrize("samples", [0, 1, FRAME - 1, FRAME + 1, 3 * FRAME])
def test_a_stream_of_a_few_samples_ends(engine, samples):
    stream = TailStream(engine, decoder(engine.vocabulary, None))
    stream.feed(np.zeros(samples, np.float32))
    assert not any(line.words for line in stream.finish())


def test_a_slow_model_is_run_less_often(engine, monkeypatch):
    """It would come later and later behind somebody who speaks."""
    real, clock, runs = engine.run, [0.0], []

    def slow(signals):
        clock[0] += 1.5
        runs.append(len(signals[0]))
        return real(signals)

    monkeypatch.setattr("sbkit.infer.tail.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(engine, "run", slow)
    stream = TailStream(engine, decoder(engine.vocabulary, None))
    for _ in range(120):  # 12 s
        stream.feed(np.zeros(RATE // 10, np.float32))
    assert 3 <= len(runs) <= 5, "each 3 s after the first 0.3 s"
