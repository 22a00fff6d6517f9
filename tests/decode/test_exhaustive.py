"""Beam searches of CTC and of a transducer find what adding up all paths finds, whatever a language model says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_joint import PIECES, Joint, drawn

from sbkit.decode import posteriors, transducer_beam
from sbkit.decode.beam import BeamSearch
from sbkit.decode.transducer_beam import TransducerBeam
from tests.decode import exhaustive

EVERYTHING = {"token_threshold": -1e4, "width": 1e4, "beam": 10_000, "token_beam": 100}
MOST = 2  # tokens in a frame of a transducer, so that all paths can be added up


class CTC:
    pieces = exhaustive.PIECES
    hot_word = "ab"
    most_frames, repeats = 4, 3

    def __init__(self, seed, *frames):
        rng = np.random.default_rng(seed)
        self.scores = [exhaustive.random_log_probs(rng, each, len(self.pieces)) for each in frames]

    def sequences(self):
        return exhaustive.token_sequences(self.scores[0])

    def search(self, **options):
        return BeamSearch(self.pieces, **options)


class Transducer:
    pieces = PIECES
    hot_word = "ca"
    most_frames, repeats = 2, 1

    def __init__(self, seed, *frames):
        self.joint, self.scores = Joint(seed), drawn(seed, *frames)

    def sequences(self):
        return exhaustive.transducer_sequences(self.joint, self.scores[0], MOST)

    def search(self, **options):
        search = TransducerBeam(self.pieces, **options)
        search.joint = self.joint
        return search


SENTENCES = {
    (CTC, "word"): exhaustive.SENTENCES, (CTC, "piece"): exhaustive.SPELLED,
    (Transducer, "word"): ["a ab c", "ca ab", "a a", "c bb", "a b ca"],
    (Transducer, "piece"): ["▁ a ▁ a b ▁c", "▁c a ▁ a b", "▁ a ▁c", "▁ b ▁c a"]}
KINDS = pytest.mark.parametrize("kind", [CTC, pytest.param(Transducer, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    return {(kind, unit): exhaustive.language_model(folder / f"{kind.__name__}-{unit}.arpa", sentences)
            for (kind, unit), sentences in SENTENCES.items()}


def cases(kind, seed, frames):
    """Utterances with random scores: several where it takes no time to add up all paths."""
    return [kind(seed + i, min(frames, kind.most_frames)) for i in range(kind.repeats)]


def find(case, **options):
    """What is found in an utterance, also in one in which the blank is the likeliest throughout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posteriors, "near_speech", np.ones_like)
        patch.setattr(transducer_beam, "MAX_TOKENS_PER_FRAME", MOST)
        [found] = case.search(**options, **EVERYTHING).decode(*exhaustive.batch(*case.scores))
    return found


def best_few(scores, count):
    return pytest.approx(sorted(scores.values(), reverse=True)[:count], abs=1e-3)


@KINDS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), frames=st.integers(0, 4))
@example(seed=230107, frames=1)  # the blank rounds to 1
def test_without_a_language_model_it_finds_the_most_likely_texts(kind, seed, frames):
    for case in cases(kind, seed, frames):
        expected = exhaustive.texts(case.sequences(), kind.pieces)
        found = find(case, word_score=0.0, nbest=5)
        assert [one.acoustic for one in found] == best_few(expected, 5)
        for one in found:
            assert one.acoustic == pytest.approx(expected[one.text], abs=1e-4)
            assert one.score == pytest.approx(one.acoustic, abs=1e-9)


@KINDS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), frames=st.integers(1, 4), hot=st.booleans())
@pytest.mark.slow
def test_with_a_language_model_over_words_it_finds_the_best_of_all_texts(kind, seed, frames, hot, models):
    (model, path), boosts = models[kind, "word"], {kind.hot_word: 1.5, "a b": 2.5} if hot else {}
    for case in cases(kind, seed, frames):
        expected = exhaustive.with_words(exhaustive.texts(case.sequences(), kind.pieces), model, boosts)
        found = find(case, lm=path, lm_weight=0.7, word_score=0.4, unknown_score=-3.0, hot_words=boosts, nbest=4)
        assert [one.score for one in found] == best_few(expected, 4)
        for one in found:
            assert one.score == pytest.approx(expected[one.text], abs=1e-3)


@KINDS
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), frames=st.integers(1, 4))
def test_with_a_language_model_over_pieces_it_finds_the_best_of_all_spellings(kind, seed, frames, models):
    model, path = models[kind, "piece"]
    for case in cases(kind, seed, frames):
        best = exhaustive.with_pieces(case.sequences(), model, kind.pieces)
        found = find(case, lm=path, lm_weight=0.7, word_score=0.4, nbest=3)
        assert found[0].score == pytest.approx(max(best.values()), abs=1e-3)
        assert found[0].score == pytest.approx(best[found[0].text], abs=1e-3)
        assert len({one.text for one in found}) == len(found)


@KINDS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 100), lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6), with_model=st.booleans())
@pytest.mark.slow
def test_an_utterance_is_transcribed_alike_alone_and_in_any_company(kind, seed, lengths, with_model, models):
    case = kind(seed, *lengths)
    search = case.search(beam=8, nbest=3, lm=models[kind, "word"][1] if with_model else None)
    for together, one in zip(search.decode(*exhaustive.batch(*case.scores)), case.scores, strict=True):
        [alone] = search.decode(*exhaustive.batch(one))
        assert [each.text for each in alone] == [each.text for each in together]
        assert [each.score for each in alone] == pytest.approx([each.score for each in together], abs=1e-6)
