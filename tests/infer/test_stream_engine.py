"""Many streams in one batch: each hears its own words, whatever the others do, fail at or wait for."""

import asyncio
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import bundles
import numpy as np
import pytest
from refusals import refused

from sbkit.decode.greedy_stream import GreedyStream
from sbkit.errors import SbkitError
from sbkit.export.windows import Window
from sbkit.infer import stream_engine
from sbkit.infer.decoding import decoder
from sbkit.infer.device import OutOfMemory
from sbkit.infer.stream_engine import StreamEngine


@pytest.fixture(scope="module", params=["onnx", "torch"])
def engine(request, bundle):
    with StreamEngine(bundle, model=request.param, device="cpu", threads=1) as made:
        yield made


def greedy(engine):
    return GreedyStream(engine.vocabulary.spelling)


def said(engine, text, chunk=160, search=None, **options):
    """A stream that says a text, to its end."""
    session = engine.open(search or greedy(engine), chunk, **options)
    session.feed(bundles.say(text))
    session.finish()
    return session


def words(session):
    results = []
    while session.busy:
        results += session.take(10)
    return " ".join(word.text for each in results for word in each.settled)


class Held:
    """Keeps an engine's steps waiting until it is let go."""

    def __init__(self, engine, monkeypatch):
        self.go, self.inside, self.batches = threading.Event(), threading.Event(), []
        step = engine.step

        def waiting(windows, states):
            self.batches.append(len(windows))
            self.inside.set()
            self.go.wait(20)
            return step(windows, states)

        monkeypatch.setattr(engine, "step", waiting)


class Slow:
    """A search that takes its time, in the thread for those."""

    quick = False

    def __init__(self, search):
        self.search, self.go, self.threads = search, threading.Event(), set()

    def feed(self, log_probs):
        self.threads.add(threading.current_thread().name)
        self.go.wait(20)
        return self.search.feed(log_probs)

    def finish(self):
        return self.search.finish()


@pytest.mark.slow
def test_streams_at_different_positions_keep_their_words(engine):
    rng = np.random.default_rng(0)
    texts = [" ".join("".join(rng.choice(list("abcdefg"), rng.integers(1, 6))) for _ in range(20)) for _ in range(12)]
    rngs = rng.spawn(len(texts))

    def hear(number):
        session = engine.open(greedy(engine), [160, 320, 640][number % 3])
        signal, rng = bundles.say(texts[number]), rngs[number]
        while len(signal):
            size = int(rng.integers(1, 30_000))
            session.feed(signal[:size])
            signal = signal[size:]
            time.sleep(rng.random() / 500)
        session.finish()
        return words(session), session.finished

    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(hear, range(len(texts)))) == [(text, True) for text in texts]


def test_streams_that_wait_share_a_step(engine, monkeypatch):
    """Streams of one chunk size, up to ``max_streams``; the others come before those that were decoded already."""
    held = Held(engine, monkeypatch)
    monkeypatch.setattr(engine, "max_streams", 3)
    sessions = [engine.open(greedy(engine), 320)]
    sessions[0].feed(bundles.say("ab")[:12_000])
    assert held.inside.wait(10)
    sessions += [engine.open(greedy(engine), size) for size in (320, 640, 320, 320, 320)]
    for session in sessions[1:]:
        session.feed(bundles.say("abcdefg")[:12_000])
    held.go.set()
    for session in sessions:
        session.finish()
        words(session)
    assert held.batches[:4] == [1, 3, 1, 3]


def test_feed_does_not_wait_for_a_step(engine, monkeypatch):
    held = Held(engine, monkeypatch)
    session = engine.open(greedy(engine), 160)
    began = time.monotonic()
    for _ in range(20):
        session.feed(np.zeros(2560, np.float32))
    session.finish()
    assert time.monotonic() - began < 5 and held.inside.wait(10)
    assert 2.5 < session.waiting_seconds < 3.2 and session.take(0.01) == [] and session.busy
    held.go.set()
    words(session)
    assert session.finished and not session.waiting_seconds and session.seconds == pytest.approx(3.2)


def test_closing_a_stream_in_a_step_disturbs_no_other(engine, monkeypatch):
    held = Held(engine, monkeypatch)
    calls = []
    gone = engine.open(greedy(engine), 160, on_result=lambda: calls.append(1))
    stays = engine.open(greedy(engine), 160)
    for session in (gone, stays):
        session.feed(bundles.say("abc def"))
    assert held.inside.wait(10)
    gone.close()
    stays.finish()
    held.go.set()
    assert words(stays) == "abc def" and not calls
    with refused("stream-ended"):
        gone.take(10)
    with refused("stream-ended"):
        gone.feed(np.zeros(10, np.float32))


def test_an_error_of_one_search_ends_that_stream_alone(engine):
    class Broken(GreedyStream):
        def feed(self, log_probs):
            raise SbkitError("model-failed", "it broke")

    broken = engine.open(Broken(engine.vocabulary.spelling), 160)
    broken.feed(bundles.say("abc def"))
    assert words(said(engine, "abc def")) == "abc def"
    for _ in range(2):
        with refused("model-failed"):
            broken.take(10)
    with refused("model-failed"):
        broken.feed(np.zeros(1, np.float32))


def test_a_step_that_fails_is_raised_in_its_streams_and_the_next_ones_go_on(engine, monkeypatch):
    step = engine.step
    session = engine.open(greedy(engine), 160)
    monkeypatch.setattr(engine, "step", lambda *_: 1 / 0)
    session.feed(bundles.say("abc"))
    with pytest.raises(ZeroDivisionError):
        session.take(10)
    monkeypatch.setattr(engine, "step", step)
    assert words(said(engine, "abc")) == "abc"


def test_a_step_out_of_memory_is_run_one_by_one(engine, monkeypatch):
    step, tried = engine.step, []

    def small(windows, states):
        tried.append(len(windows))
        if len(windows) > 1:
            raise OutOfMemory("out-of-memory", "out of memory on cuda:0")
        return step(windows, states)

    monkeypatch.setattr(engine, "step", small)
    go = threading.Event()
    engine.worker.submit(go.wait, 10)
    sessions = [said(engine, text) for text in ("abc", "def", "abc def")]
    go.set()
    assert [words(session) for session in sessions] == ["abc", "def", "abc def"] and max(tried) == 3


def test_a_long_search_delays_no_other_streams_chunk(engine):
    slow = Slow(greedy(engine))
    long = engine.open(slow, 160)
    long.feed(bundles.say("abc def"))
    for _ in range(3):
        assert words(said(engine, "xyz")) == "xyz"
    assert long.take(0) == []
    slow.go.set()
    long.finish()
    assert words(long) == "abc def" and slow.threads == {"sbkit-search"}


def test_a_beam_search_with_hot_words_shares_steps_with_the_others(engine):
    search = decoder(engine.vocabulary, {"beam": 8, "hot_words": {"abd": 40.0}}).stream()
    beam, plain = said(engine, "abc abc", search=search), said(engine, "abc abc")
    assert words(plain) == "abc abc"
    assert set(words(beam).split()) <= {"abc", "abd"}


def test_on_result_is_called_for_results(engine):
    async def listen():
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        session, results = said(engine, "abc def", on_result=lambda: loop.call_soon_threadsafe(news.set)), []
        while not session.finished or session.busy:
            await asyncio.wait_for(news.wait(), 10)
            news.clear()
            results += session.take(0)
        return " ".join(word.text for each in results for word in each.settled)

    assert asyncio.run(listen()) == "abc def"


def test_an_error_in_on_result_ends_that_stream_only(engine):
    def gone():
        raise RuntimeError("Event loop is closed")

    session = engine.open(greedy(engine), 160, on_result=gone)
    session.feed(bundles.say("abc"))
    assert words(said(engine, "abc")) == "abc"
    with pytest.raises(RuntimeError, match="loop is closed"):
        words(session)


def test_finished_is_true_once_all_results_are_taken(engine):
    settled = threading.Event()
    session = engine.open(greedy(engine), on_result=lambda: session._finished and settled.set())
    session.feed(bundles.say("abc"))
    session.finish()
    assert settled.wait(10) and not session.finished and session.busy
    assert words(session) == "abc" and session.finished


def test_feed_after_finish_raises(engine):
    session = engine.open(greedy(engine))
    session.finish()
    assert words(session) == "" and session.finished
    for call in (lambda: session.feed(np.zeros(1, np.float32)), session.finish):
        with refused("stream-ended"):
            call()


def test_a_graph_of_another_vocabulary_is_refused(engine, monkeypatch):
    state, width = engine.state(), engine.config.width
    found = [np.zeros((1, 2, width + 1), np.float32), np.array([2]), *(part[None] for part in state)]
    monkeypatch.setattr(engine, "compute", lambda *_: found)
    with refused("mismatched-bundle"):
        engine.step([Window(np.zeros(engine.config.window(4), np.float32), 0)], [state])


def test_closing_the_engine_wakes_waiting_streams(bundle, monkeypatch):
    engine = StreamEngine(bundle, device="cpu")
    thread = engine.worker.submit(threading.current_thread).result()
    held = Held(engine, monkeypatch)
    session = engine.open(greedy(engine), 160)
    session.feed(bundles.say("abc"))
    assert held.inside.wait(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(session.take)
        closing = threading.Thread(target=engine.close)
        closing.start()
        with refused("model-closed"):
            waiting.result(10)
        held.go.set()
        closing.join(10)
    assert not thread.is_alive()


def test_closing_the_engine_releases_the_graph(bundle):
    """Whoever keeps the closed engine keeps none of the model's memory."""
    engine = StreamEngine(bundle, device="cpu")
    session = said(engine, "abc")
    assert words(session) == "abc"
    graph = weakref.ref(engine.backend)
    engine.close()
    assert graph() is None
    with refused("model-closed"):
        engine.open(greedy(engine))


def test_a_stream_queued_while_closing_gets_an_error(bundle, monkeypatch):
    engine = StreamEngine(bundle, device="cpu")
    session = engine.open(greedy(engine), 160)
    monkeypatch.setattr(session, "_enqueue", lambda this: (engine.close(), engine.enqueue(this)))
    session.feed(bundles.say("abc"))
    with refused("model-closed"):
        session.take(5)


def test_on_step_is_called_with_the_number_of_streams(bundle):
    steps = []
    with StreamEngine(bundle, device="cpu", on_step=steps.append) as engine:
        session = engine.open(greedy(engine), 640)
        session.feed(np.zeros(3 * 16 * bundles.FRAME, np.float32))
        session.finish()
        words(session)
    assert steps == [1, 1, 1]


def test_a_missing_format_is_refused(bundle):
    with refused("missing-format"):
        StreamEngine(bundle, model="int8")


def test_a_graph_of_another_export_is_named(tmp_path):
    made = bundles.make(tmp_path / "b", streams=True)
    config = stream_engine.Config.read(made)
    config.streaming.state["other"] = config.streaming.state.pop("level")
    (made / "config.json").write_text(config.to_json())
    with refused("mismatched-bundle"):
        StreamEngine(made)
