"""A search over a whole test set finds what it finds batch by batch, in as many processes as pay."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from letters import Letters

from sbkit.decode import lm
from sbkit.decode.beam import BeamSearch
from sbkit.decode.greedy import greedy
from sbkit.tasks.asr import TranscribedUtterance
from sbkit.tasks.recognise import search as search_asked
from tests.decode import exhaustive

PIECES = Letters(["<unk>", "▁a", "b", "▁ab", "▁"])


@pytest.fixture
def arpa(tmp_path):
    lm.build(["a ab a", "ab ab", "a a"], tmp_path / "lm.arpa")
    return tmp_path / "lm.arpa"


def test_what_is_searched_at_the_end_is_what_each_batch_would_have_given(arpa):
    rng = np.random.default_rng(2)
    batches = [(torch.from_numpy(np.stack([exhaustive.random_log_probs(rng, 9, len(PIECES)) for _ in range(size)])),
                torch.full((size,), 9)) for size in (2, 1, 3)]
    search = BeamSearch(PIECES, lm=arpa, nbest=2)
    expected = [several for batch in batches for several in search.decode(*batch)]
    brain = SimpleNamespace(decoder=search, rows=[], greedy=greedy, live=None, prepare_search=lambda search: search,
                            spelling=search.spelling(0.04))
    with search_asked.SearchingTask.searching(brain):
        for log_probs, lengths in batches:
            brain.rows += [TranscribedUtterance("id", "a", several[0].text)
                           for several in brain.decoder.decode(log_probs, lengths)]
    assert brain.decoder is search
    assert [row.hypothesis for row in brain.rows] == [several[0].text for several in expected]
    assert [[(one.text, one.score) for one in row.nbest] for row in brain.rows] == [
        [(one.text, pytest.approx(one.score)) for one in several] for several in expected]


@pytest.mark.parametrize("cores, utterances, large, expected", [
    (8, 900, False, 0), (8, 2500, False, 1), (4, 90_000, False, 3), (4, 90_000, True, 0)])
def test_processes_begin_where_there_is_work_and_room_for_them(arpa, monkeypatch, cores, utterances, large, expected):
    monkeypatch.setattr(search_asked, "usable_cores", lambda: cores)
    monkeypatch.setattr(search_asked, "LARGE", 1 if large else 1e9)
    search = BeamSearch(PIECES, lm=arpa)
    with search_asked.search_processes(search, utterances):
        assert search.workers == expected
    assert search.workers == 0
