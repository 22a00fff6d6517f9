"""Weights of a language model, found on a dev set: on one rank and on several."""

from types import SimpleNamespace

import pytest
import torch
from letters import Letters
from processes import results
from refusals import refused

from sbkit.data.manifest import Manifest
from sbkit.decode.beam import BeamSearch
from sbkit.decode.fusion import FusionWeights
from sbkit.decode.greedy import greedy
from sbkit.decode.spans import Spelling
from sbkit.tasks.recognise import search as evaluation
from sbkit.tasks.recognise.transcripts import TranscribedUtterance

PIECES = Letters(["<unk>", "<s>", "</s>", "▁", "a", "b"])


class Search:
    """Hears the more words wrong the further its weights are from the right ones."""

    blank_id, weights, tokenizer, join = 0, FusionWeights(), PIECES, list

    def __init__(self, lm, word):
        self.right = lm, word

    def search(self, batch, weights):
        off = abs(weights.lm - self.right[0]) * 10 + abs(weights.word - self.right[1])
        words = ["x"] * min(20, round(off)) + ["a"] * (20 - min(20, round(off)))
        return [[SimpleNamespace(text=" ".join(words))]]


def tune(lm, word):
    rows = [TranscribedUtterance("u", " ".join("a" * 20), "b a")]
    return evaluation.best_weights(SimpleNamespace(search=Search(lm, word), batches=[]), rows)


@pytest.mark.parametrize("lm, word", [(0.6, 2.0), (0.3, 4.25), (0.0, -1.0), (1.65, 5.0), (0.9, 0.5)])
def test_the_best_weights_are_found_on_and_beyond_the_grid(lm, word):
    weights, rate, greedy = tune(lm, word)
    assert rate == pytest.approx(0.0, abs=5.1)
    assert abs(weights.lm - lm) < 0.2 and abs(weights.word - word) < 0.8
    assert weights.unknown == FusionWeights().unknown
    assert greedy == pytest.approx(95.0)


def test_an_utterance_without_a_reference_does_not_count():
    class Heard(Search):
        def search(self, batch, weights):
            return [[SimpleNamespace(text="uh " * 7)], *super().search(batch, weights), [SimpleNamespace(text="")]]

    rows = [TranscribedUtterance("t", "", "b b b"), TranscribedUtterance("u", " ".join("a" * 20), "b a"),
            TranscribedUtterance("v", " ", "b")]
    found = evaluation.best_weights(SimpleNamespace(search=Heard(0.6, 2.0), batches=[]), rows)
    assert found == tune(0.6, 2.0) and found[1] == 0.0


@pytest.mark.parametrize("rows", [[], [TranscribedUtterance("t", "", "b b b"), TranscribedUtterance("v", " ", "")]],
                         ids=len)
def test_without_a_reference_nothing_can_be_tuned(rows):
    with refused("no-transcripts"):
        evaluation.best_weights(SimpleNamespace(search=Search(0.6, 2.0), batches=[]), rows)


def tune_on_a_rank():
    from sbkit.train.distributed import ranks

    ranks.init(torch.device("cpu"))
    rows = [TranscribedUtterance("u", " ".join("a" * 20), "")] if ranks.rank() == 0 else []
    recorder = SimpleNamespace(search=Search(0.6, 2.0), batches=[])
    if ranks.rank() == 1:  # no utterance, but it has to answer like the others
        recorder.search.search = lambda batch, weights: []
    return evaluation.best_weights(recorder, rows)


@pytest.mark.slow
def test_ranks_agree_even_where_one_has_nothing():
    one, other = results(tune_on_a_rank)
    assert one == other and one[1:] == (0.0, 100.0)


def test_the_recorder_keeps_the_inputs_of_a_search_and_decodes_greedily():
    torch.manual_seed(0)
    log_probs, lengths = torch.randn(3, 12, len(PIECES)).mul(3).log_softmax(-1), torch.tensor([12, 9, 5])
    search = BeamSearch(PIECES, beam=8)
    recorder = evaluation.Recorder(search, greedy, Spelling(PIECES, 0.04).text)
    hypotheses = recorder.decode(log_probs, lengths)
    assert [[one.text for one in several] for several in hypotheses] == [
        [Spelling(PIECES, 0.04).text(spans)] for spans in greedy(log_probs, lengths)]
    recorder.decode(log_probs[:1], lengths[:1])
    found = search.search(search.join(recorder.batches))
    straight = [*search.decode(log_probs, lengths), *search.decode(log_probs[:1], lengths[:1])]
    assert [several[0].text for several in found] == [several[0].text for several in straight]


def test_a_large_dev_set_is_taken_evenly():
    count = 3 * evaluation.TUNING_UTTERANCES
    manifest = Manifest(ids=[str(i) for i in range(count)], durations=[1.0] * count, wavs=[""] * count,
                        texts=[""] * count)
    some = evaluation.tuning_subset(manifest)
    assert len(some) == evaluation.TUNING_UTTERANCES and some.ids[0] == "0" and some.ids[-1] == str(count - 1)
    assert evaluation.tuning_subset(some) is some
