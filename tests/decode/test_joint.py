"""The joint search finds what scoring every sequence of tokens finds, alone and in any company."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.decode import joint
from sbkit.decode.joint import JointSearch
from tests.decode import exhaustive

BLANK, BOS, EOS, LABELS = 0, 1, 2, 5


class Tokens:
    """Just enough of a tokenizer."""

    def decode(self, ids):
        return " ".join(map(str, ids))


def decoder(seed):
    """A stand-in for an attention decoder: what follows depends on the utterance and on all tokens before."""
    draw = torch.Generator().manual_seed(seed)
    embedding = torch.randn(LABELS, 8, generator=draw)
    mix, out = torch.randn(8, 8, generator=draw) / 2, torch.randn(8, LABELS, generator=draw)

    def step(tokens, rows):
        state = torch.sin(rows[:, None] + torch.arange(8.0))
        for token in tokens.T:
            state = torch.tanh(state @ mix + embedding[token])
        return (2 * state @ out).log_softmax(-1)

    return step


def random_batch(seed, *frames):
    rng = np.random.default_rng(seed)
    whole = torch.full((len(frames), max(frames), LABELS), -1.0)
    for row, size in zip(whole, frames, strict=True):
        row[:size] = torch.from_numpy(exhaustive.random_log_probs(rng, size, LABELS))
    return whole, torch.tensor(frames)


def every_score(log_probs, step, row, weight, bonus):
    """The joint score of every sequence that the frames [T, V] can say."""
    found = {}
    for tokens, ctc in exhaustive.token_sequences(log_probs.numpy()).items():
        if {BOS, EOS} & set(tokens):
            continue
        attention = 0.0
        for i, token in enumerate([*tokens, EOS]):
            attention += float(step(torch.tensor([[BOS, *tokens[:i]]]), torch.tensor([row]))[0, token])
        found[tokens] = weight * ctc + (1 - weight) * attention + bonus * len(tokens)
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), frames=st.integers(1, 4), weight=st.sampled_from([0.1, 0.4, 1.0]),
       bonus=st.sampled_from([0.0, 0.7, -0.5]))
def test_the_best_of_all_sequences_are_found(seed, frames, weight, bonus):
    step, (log_probs, lengths) = decoder(seed), random_batch(seed, frames)
    expected = every_score(log_probs[0], step, 0, weight, bonus)
    search = JointSearch(Tokens(), beam=60, ctc_weight=weight, nbest=4, token_score=bonus)
    with pytest.MonkeyPatch.context() as patch:  # also in frames in which nobody speaks
        patch.setattr(joint, "near_speech", np.ones_like)
        [found] = search.decode(log_probs, lengths, step)
    best = sorted(expected.items(), key=lambda each: -each[1])[:4]
    assert [one.score for one in found] == pytest.approx([score for _, score in best], abs=1e-4)
    for one in found:
        tokens = tuple(one.spans.ids.tolist())
        assert one.text == " ".join(map(str, tokens))
        assert one.score == pytest.approx(expected[tokens], abs=1e-4)
        assert one.acoustic == pytest.approx(exhaustive.token_sequences(log_probs[0].numpy())[tokens], abs=1e-4)


def test_an_utterance_is_transcribed_alike_alone_and_in_company():
    step, (log_probs, lengths) = decoder(3), random_batch(3, 9, 1, 30, 12)
    search = JointSearch(Tokens(), beam=6, nbest=3)
    together = search.decode(log_probs, lengths, step)
    for i, several in enumerate(together):
        [alone] = search.decode(log_probs[i:i + 1, :lengths[i]], lengths[i:i + 1], lambda tokens, rows, i=i:
                                step(tokens, rows + i))
        assert [one.text for one in alone] == [one.text for one in several]
        assert [one.score for one in alone] == pytest.approx([one.score for one in several], abs=1e-5)


def test_long_sure_utterances_are_said_as_they_are():
    said = list(itertools.islice(itertools.cycle([3, 4, 4, 3]), 60))
    frames = np.full((240, LABELS), 1e-6)
    frames[np.arange(240), [token for each in said for token in (each, each, 0, 0)]] = 1
    log_probs = torch.from_numpy(np.log(frames / frames.sum(-1, keepdims=True))).float()[None]

    def step(tokens, rows):
        following = torch.full((len(tokens), LABELS), -8.0)
        size = tokens.shape[1] - 1
        following[:, said[size] if size < len(said) else EOS] = 0.0
        return following.log_softmax(-1)

    [[one]] = JointSearch(Tokens(), beam=4).decode(log_probs, torch.tensor([240]), step)
    assert one.spans.ids.tolist() == said
    assert one.spans.starts.tolist() == list(range(0, 240, 4))


def test_a_decoder_that_invents_words_is_not_believed_where_nobody_speaks():
    frames = torch.full((2, 120, LABELS), 0.05)
    frames[..., BLANK] = 0.8
    frames[1, 60, 3], frames[1, 60, BLANK] = 0.8, 0.05

    def step(tokens, rows):
        following = torch.full((len(tokens), LABELS), -12.0)
        following[:, 4 if tokens.shape[1] < 4 else EOS] = 0.0
        return following.log_softmax(-1)

    [silent], [spoken] = JointSearch(Tokens(), ctc_weight=0.1).decode(frames.log(), torch.tensor([120, 120]), step)
    assert silent.text == "" and spoken.text
    assert abs(spoken.spans.starts - 60).max() <= 8


def test_a_batch_of_nothing():
    search = JointSearch(Tokens())
    assert search.decode(torch.zeros(0, 4, LABELS), torch.zeros(0, dtype=torch.int64), decoder(0)) == []
    log_probs = torch.full((1, 3, LABELS), -30.0)
    log_probs[..., BLANK] = 0.0

    def ends(tokens, rows):
        return torch.tensor([-9.0, -9.0, 0.0, -9.0, -9.0]).expand(len(tokens), -1)

    [[one]] = search.decode(log_probs, torch.tensor([3]), ends)
    assert one.text == "" and len(one.spans) == 0


def test_what_is_not_a_number_is_named():
    log_probs, lengths = random_batch(1, 4, 3, 4)
    log_probs[1, 3] = torch.nan  # beyond its end
    JointSearch(Tokens()).decode(log_probs, lengths, decoder(1))
    log_probs[2, 3] = torch.nan
    with refused("nan-output"):
        JointSearch(Tokens()).decode(log_probs, lengths, decoder(1))


@pytest.mark.parametrize("options", [{"beam": 0}, {"nbest": 0}, {"ctc_weight": 0.0}, {"ctc_weight": 1.5}])
def test_options_out_of_range_are_named(options):
    with refused("bad-value"):
        JointSearch(Tokens(), **options)
