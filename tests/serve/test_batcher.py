"""Micro-batches: full where there is company, at once where there is none, and nobody gets another's answer."""

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import bundles
import numpy as np
import pytest
import serving
from refusals import refused

from sbkit.infer.engine import Engine
from sbkit.serve.backlog import Work
from sbkit.serve.batcher import Batcher
from sbkit.serve.errors import ApiError


@pytest.fixture
def engine(bundle):
    with Engine(bundle, device="cpu", threads=1) as engine:
        yield engine


def labels(future):
    return future.result(10).argmax(-1).tolist()


def held(engine):
    """The model's thread is busy until the event is set."""
    go = threading.Event()
    engine.worker.submit(go.wait, 10)
    return go


def test_each_of_many_threads_gets_its_own_answer_and_batches_are_shared(engine):
    rows = []
    batcher = Batcher(engine, log=rows.append)

    def ask(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            ids = rng.integers(0, len(bundles.PIECES), rng.integers(1, 30)).tolist()
            assert labels(batcher.submit(bundles.voiced(ids))) == [*ids, 0]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    assert sum(rows) == 320
    assert max(rows) > 1, "those that came while a batch ran share the next"


def test_what_comes_while_a_batch_runs_shares_the_next_one_in_its_budget(engine):
    rows = []
    batcher = Batcher(engine, seconds=10, log=rows.append)
    go = held(engine)
    first = batcher.submit(bundles.voiced([5]))
    others = [batcher.submit(bundles.voiced([6] * 25)) for _ in range(25)]  # of one second each
    go.set()
    assert labels(first)[0] == 5 and all(labels(each)[0] == 6 for each in others)
    assert rows == [1, 10, 10, 5]


def test_those_of_like_length_go_together_and_the_oldest_goes_first(engine, monkeypatch):
    shapes = []
    run = Engine.run_batch
    monkeypatch.setattr(Engine, "run_batch", lambda self, signals: (shapes.append([*map(len, signals)]),
                                                                 run(self, signals))[1])
    batcher = Batcher(engine, seconds=8)
    go = held(engine)
    batcher.submit(bundles.voiced([5]))
    futures = [batcher.submit(bundles.voiced([6] * count)) for count in (50, 100, 51, 25, 52)]
    go.set()
    for each in futures:
        each.result(10)
    assert [len(each) for each in shapes] == [1, 3, 2]
    assert [length // bundles.FRAME for length in shapes[1]] == [50, 51, 52]


def test_clients_have_their_turns_and_each_its_oldest_first(engine):
    ran = []
    batcher = Batcher(engine, batching=False)
    go = held(engine)
    for client, label in ("a", 5), ("a", 6), ("a", 7), ("b", 8), ("b", 9), (None, 10):
        batcher.submit(bundles.voiced([label]), client).add_done_callback(lambda done: ran.append(labels(done)[0]))
    last = batcher.submit(bundles.voiced([11]), "a")
    go.set()
    assert labels(last)[0] == 11 and ran == [5, 8, 10, 6, 9, 7]


def test_recordings_run_by_their_deadlines_and_what_has_none_goes_first(engine):
    ran = []
    batcher = Batcher(engine, batching=False)
    go = held(engine)
    batcher.submit(bundles.voiced([5]))
    works = [Work(batcher.backlog, None, 0.5, 100.0, time.monotonic() + left) for left in (90.0, 80.0)]
    for work in works:
        work.grow(1.0)
    futures = [batcher.submit(bundles.voiced([label]), None, work)
               for label, work in ((6, works[0]), (7, works[1]), (8, works[0]), (9, works[1]), (10, None))]
    for future in futures:
        future.add_done_callback(lambda done: ran.append(labels(done)[0]))
    go.set()
    for future in futures:
        future.result(10)
    serving.until(lambda: len(ran) == 5)
    assert ran == [10, 7, 9, 6, 8]


def test_what_can_no_longer_finish_in_time_is_dropped_before_it_runs(engine):
    rows = []
    batcher = Batcher(engine, log=rows.append)
    batcher.backlog.record_batch(100.0, 1.0)
    go = held(engine)
    first = batcher.submit(bundles.voiced([5]))
    works = [Work(batcher.backlog, None, 0.5, 30.0, time.monotonic() + 30.0) for _ in range(2)]
    for work in works:
        work.grow(1000.0)
    futures = [batcher.submit(bundles.voiced([label]), None, work) for label, work in zip((6, 7), works, strict=True)]
    batcher.backlog.record_batch(2000.0, 50.0)
    go.set()
    assert labels(first)[0] == 5 and labels(futures[0])[0] == 6
    with refused("rate_limit_exceeded", kind=ApiError, wording=False) as error:
        futures[1].result(10)
    assert error.value.status == 429 and rows == [1, 1]


def test_the_cancelled_are_not_run(engine):
    rows = []
    batcher = Batcher(engine, log=rows.append)
    go = held(engine)
    first, second, third = (batcher.submit(bundles.voiced([i])) for i in (3, 4, 5))
    assert second.cancel() and batcher.waiting == 2
    go.set()
    assert (labels(first)[0], labels(third)[0], rows) == (3, 5, [1, 1])
    with pytest.raises(CancelledError):
        second.result()


def test_one_that_fails_does_not_fail_its_neighbours(engine):
    real = engine.backend

    def picky(signals, lengths):
        if np.round(signals[:, 0] * bundles.LEVELS).astype(int).tolist().count(7):
            raise RuntimeError("no sevens")
        return real(signals, lengths)

    batcher = Batcher(engine)
    engine.backend = picky
    go = held(engine)
    futures = [batcher.submit(bundles.voiced([i])) for i in (5, 6, 7, 8)]
    go.set()
    assert [labels(futures[i])[0] for i in (0, 1, 3)] == [5, 6, 8]
    with refused("model-failed"):
        futures[2].result(10)
    engine.backend = real
    assert labels(batcher.submit(bundles.voiced([9])))[0] == 9


def test_a_closed_engine_fails_what_waits_instead_of_holding_it(engine):
    batcher = Batcher(engine)
    engine.close()
    with refused("model-closed"):
        batcher.submit(bundles.voiced([5])).result(10)


@pytest.mark.parametrize("leaks", [True, False])
def test_without_batching_and_with_a_model_whose_batches_leak_each_runs_alone(tmp_path, leaks):
    with Engine(bundles.make(tmp_path / "b", batching=not leaks), device="cpu", threads=1) as engine:
        rows = []
        batcher = Batcher(engine, batching=leaks, log=rows.append)
        go = held(engine)
        futures = [batcher.submit(bundles.voiced([i])) for i in (3, 4, 5)]
        go.set()
        assert [labels(each)[0] for each in futures] == [3, 4, 5] and rows == [1, 1, 1]
