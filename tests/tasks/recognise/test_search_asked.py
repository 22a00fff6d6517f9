"""A search over a whole test set finds what it finds batch by batch, in as many processes as pay."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from letters import Letters
from refusals import refused
from speechbrain.core import Stage

from sbkit.decode import lm
from sbkit.decode.beam import BeamSearch
from sbkit.decode.greedy import greedy
from sbkit.decode.token_search import Hypothesis
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.tasks.ctc.decoding import CTCDecoding
from sbkit.tasks.recognise import search as search_asked
from sbkit.tasks.recognise.decoding import Decoding
from sbkit.tasks.recognise.transcriber import Transcriber
from sbkit.tasks.recognise.transcripts import TranscribedUtterance
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
    keys = SimpleNamespace(decoder=search, tokenizer=PIECES, blank_index=0)
    transcriber = Transcriber(SimpleNamespace(), keys, CTCDecoding(SimpleNamespace(), keys))
    transcriber.spelling = search.spelling(0.04)
    rows = []
    with transcriber.searching_at_the_end() as finish:
        for log_probs, lengths in batches:
            rows += [TranscribedUtterance("id", "a", several[0].text)
                     for several in transcriber.search.decode(log_probs, lengths)]
    rows = finish(rows)
    assert transcriber.search is search
    assert [row.hypothesis for row in rows] == [several[0].text for several in expected]
    assert [[(one.text, one.score) for one in row.nbest] for row in rows] == [
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


class BestTokens(Decoding):
    """The decoding of a loss that has no search, and no attention decoder."""

    def scores(self, encoded):
        return encoded

    def search_input(self, scores):
        return scores

    def greedy(self, scores, frames):
        return greedy(scores, frames)


@pytest.mark.parametrize("options, key", [
    ({"beam": 4}, "beam"), ({"hot_words": ["ab"]}, "hot-word"), ({"joint": True}, "joint")])
def test_a_loss_without_a_search_refuses_one(options, key, tmp_path):
    keys = SimpleNamespace(decoder=None, tokenizer=PIECES, blank_index=0, corpus=SimpleNamespace(text=str))
    transcriber = Transcriber(SimpleNamespace(), keys, BestTokens())
    with refused("no-such-search", key=key):
        transcriber.use_search(EvaluateRequest(tmp_path, **options))


class Smoothed:
    """A search of a recipe's own."""

    tokenizer = None

    def decode(self, scores, frames):
        return [[Hypothesis(self.tokenizer.decode([1]), 0.0, 0.0, spans)] for spans in greedy(scores, frames)]


def test_a_loss_needs_no_more_than_its_scores_for_a_search_of_the_recipe():
    keys = SimpleNamespace(decoder=Smoothed(), tokenizer=PIECES, blank_index=0)
    transcriber = Transcriber(SimpleNamespace(), keys, BestTokens())
    batch = SimpleNamespace(weight=1.0, ids=["one"], texts=["a"])
    (row,) = transcriber.rows(torch.randn(1, 5, 5).log_softmax(-1), torch.tensor([5]), batch, Stage.TEST)
    assert row.hypothesis == "a"


def test_a_decoding_that_lacks_something_is_refused_when_it_is_made():
    class Incomplete(Decoding):
        def scores(self, encoded):
            return encoded

    with pytest.raises(TypeError, match=r"greedy.*search_input"):
        Incomplete()


class OtherSearch(BeamSearch):
    """A search of the user's own."""


def test_the_facts_of_a_search_name_a_class_of_the_users_own():
    facts = []
    for search in (OtherSearch(PIECES), BeamSearch(PIECES)):
        keys = SimpleNamespace(decoder=search, tokenizer=PIECES, blank_index=0)
        facts.append(Transcriber(SimpleNamespace(), keys, CTCDecoding(SimpleNamespace(), keys)).search_facts())
    assert facts[0] == {"class": "OtherSearch", **facts[1]}
    assert "class" not in facts[1]
