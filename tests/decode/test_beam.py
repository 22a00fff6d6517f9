"""The beam search of CTC: any input, times and words, a lexicon and hot words, and what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from refusals import refused

from sbkit.decode.beam import BeamSearch
from sbkit.decode.greedy import greedy
from tests.decode import exhaustive
from tests.decode.exhaustive import PIECES, batch


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return exhaustive.language_model(tmp_path_factory.mktemp("lm") / "words.arpa", exhaustive.SENTENCES)[1]


def decode(search, *utterances):
    return search.decode(*batch(*utterances))


def peaked(tokens, labels=5, sure=0.98):
    """Log-probabilities [T, V] of one token per frame."""
    frames = np.full((len(tokens), labels), (1 - sure) / (labels - 1))
    frames[np.arange(len(tokens)), tokens] = sure
    return np.log(frames).astype(np.float32)


# ------------------------------------------------------------ the batch


def test_tensors_arrays_a_copy_through_pickle_and_processes_say_the_same(lm):
    rng = np.random.default_rng(6)
    log_probs, lengths = batch(*(exhaustive.random_log_probs(rng, frames, len(PIECES)) for frames in (12, 30, 9, 22)))
    search = BeamSearch(PIECES, lm=lm)
    expected = [(one.text, one.score) for one, in search.decode(log_probs, lengths)]
    copy = pickle.loads(pickle.dumps(search))
    for result in (search.decode(torch.from_numpy(log_probs), torch.from_numpy(lengths)),
                   copy.decode(log_probs, lengths),
                   search.decode(torch.from_numpy(log_probs).double(), lengths)):
        assert [(one.text, pytest.approx(one.score, abs=1e-5)) for one, in result] == expected
    parallel = BeamSearch(PIECES, lm=lm, workers=1)
    try:
        found = [(one.text, pytest.approx(one.score, abs=1e-9)) for one, in parallel.decode(log_probs, lengths)]
        assert found == expected
    finally:
        parallel.close()


def test_more_utterances_than_are_searched_at_once_keep_their_order():
    tokens = [[1, 0, 2], [3, 0, 1], [1, 1, 0], [0, 0, 0]]
    texts = ["ab", "ab a", "a", ""]
    found = decode(BeamSearch(PIECES), *(peaked(tokens[i % 4]) for i in range(600)))
    assert [one.text for one, in found] == [texts[i % 4] for i in range(600)]


@pytest.mark.parametrize("shape, lengths", [((0, 4, 5), []), ((2, 0, 5), [0, 0]), ((2, 3, 5), [0, 3])])
def test_batches_of_nothing(shape, lengths, lm):
    log_probs = np.log(np.full(shape, 0.2, np.float32))
    log_probs[..., 1:] -= 20
    for search in (BeamSearch(PIECES), BeamSearch(PIECES, lm=lm)):
        assert [one.text for one, in search.decode(log_probs, np.array(lengths, int))] == [""] * shape[0]


@pytest.mark.filterwarnings("error")
def test_what_is_impossible_is_no_reason_to_warn(lm):
    log_probs = peaked([1, 2, 1, 3])
    log_probs[:, 0] = -np.inf  # no blank anywhere: nothing can stay as it is
    log_probs[2, 2:] = -1000.0
    for search in (BeamSearch(PIECES), BeamSearch(PIECES, lm=lm)):
        assert decode(search, log_probs)[0][0].text == "ab a ab"


# -------------------------------------------------------- times and words


def test_where_all_is_clear_tokens_lie_where_greedy_decoding_puts_them():
    log_probs, lengths = batch(peaked([0, 1, 1, 0, 2, 0, 0, 3, 4, 1]), peaked([1, 0, 1, 1, 1]))
    expected = greedy(torch.from_numpy(log_probs), torch.from_numpy(lengths))
    search = BeamSearch(PIECES)
    for (one,), spans in zip(search.decode(log_probs, lengths), expected, strict=True):
        assert one.spans.ids.tolist() == spans.ids.tolist()
        assert one.spans.starts.tolist() == spans.starts.tolist()
        assert one.spans.ends.tolist() == spans.ends.tolist()
        assert one.spans.confidence == pytest.approx(spans.confidence, abs=1e-5)
    (one,), _ = search.decode(log_probs, lengths)
    found = [(word.text, word.start, word.end) for word in search.spelling(0.04).words(one.spans, start=1.0)]
    assert found == [("ab", pytest.approx(1.04), pytest.approx(1.2)), ("ab", pytest.approx(1.28), pytest.approx(1.32)),
                     ("a", pytest.approx(1.36), pytest.approx(1.4))]


def test_a_transcript_is_as_sure_as_its_tokens_are_in_the_mean():
    frames = np.concatenate([peaked([1, 0], sure=0.9), peaked([2, 0, 3, 3], sure=0.6)])
    (one,), (silent,) = decode(BeamSearch(PIECES), frames, peaked([0, 0, 0]))
    assert one.spans.ids.tolist() == [1, 2, 3]
    assert one.confidence == pytest.approx((0.9 + 0.6 + 0.6) / 3, abs=1e-4)
    assert silent.text == "" and silent.confidence is None


def test_a_token_begins_where_it_is_most_likely_not_where_it_first_could():
    log_probs = peaked([0, 0, 0, 1, 0])
    log_probs[0] = np.log([0.97, 0.01, 0.01, 0.005, 0.005])
    (one,), = decode(BeamSearch(PIECES), log_probs)
    assert one.spans.starts.tolist() == [3]


# -------------------------------------------------- lexicon and hot words


def unsure(*choices):
    """One frame per choice of {token: probability}, a blank between."""
    frames = []
    for choice in choices:
        frame = np.full(len(PIECES), 1e-4)
        for token, share in choice.items():
            frame[token] = share
        frames += [frame, np.eye(len(PIECES))[0] * 0.99 + 0.002]
    frames = np.array(frames)
    return np.log(frames / frames.sum(-1, keepdims=True)).astype(np.float32)


def test_a_lexicon_allows_its_words_alone_however_they_are_spelled(tmp_path):
    log_probs = unsure({1: 0.9, 3: 0.05}, {2: 0.4, 4: 0.35, 1: 0.2})
    assert decode(BeamSearch(PIECES, word_score=0.0), log_probs)[0][0].text == "ab"
    listed = tmp_path / "lexicon.txt"
    listed.write_text("a\t▁a\nb ▁ b\n")
    for lexicon in (listed, ["a", "b"]):
        assert decode(BeamSearch(PIECES, lexicon=lexicon, word_score=0.0), log_probs)[0][0].text == "a"
    assert decode(BeamSearch(PIECES, lexicon=["bbbb"]), peaked([1, 0, 1]))[0][0].text == ""


def test_long_noise_costs_no_words_with_a_language_model_or_hot_words(tmp_path):
    letters = ["<unk>", "▁", *"abcdefgh"]
    _, lm = exhaustive.language_model(tmp_path / "words.arpa", ["he had bad eggs", "bed", "he had head"])

    def noise(seed):  # of a model that isn't sure that nobody speaks
        others = 0.1 * np.random.default_rng(seed).dirichlet(np.full(9, 0.3), 250)
        return np.log(np.concatenate([np.full((250, 1), 0.9), others], 1) + 1e-9).astype(np.float32)

    said = np.concatenate([noise(0), peaked([1, 9, 0, 6, 0, 1, 9, 2, 2, 5], labels=10), noise(1)])
    for options in ({}, {"lm": lm}, {"hot_words": ["bed", "he"]}):
        (silent, *_), (spoken, *_) = decode(BeamSearch(letters, **options), noise(2), said)
        assert (silent.text, spoken.text) == ("", "he had")
        assert spoken.spans.starts[0] >= 249 and spoken.spans.ends[-1] <= 261


def test_hot_words_win_where_the_sound_leaves_a_choice(lm):
    log_probs = unsure({1: 0.8, 3: 0.15})
    assert decode(BeamSearch(PIECES), log_probs)[0][0].text == "a"
    assert decode(BeamSearch(PIECES, hot_words=["ab"]), log_probs)[0][0].text == "ab"
    assert decode(BeamSearch(PIECES, hot_words={"ab": 0.5}), log_probs)[0][0].text == "a"
    # One that the language model lacks is no unknown word.
    frames = unsure({1: 0.6, 3: 0.39}, {2: 0.9})
    with_model = {"lm": lm, "lexicon": None, "lm_weight": 0.5}
    assert decode(BeamSearch(PIECES, **with_model), frames)[0][0].text == "ab"
    assert decode(BeamSearch(PIECES, hot_words={"abb": 6.0}, **with_model), frames)[0][0].text == "abb"


def test_scripts_without_spaces_make_a_word_of_every_token():
    pieces = ["<unk>", "▁你", "好", "世"]
    search = BeamSearch(pieces, separator=None)
    (one,), = search.decode(*batch(peaked([1, 0, 2, 3], labels=4)))
    assert one.text == "你好世"
    assert [word.text for word in search.spelling(0.04).words(one.spans)] == ["你", "好", "世"]


def test_letters_spelled_by_bytes_are_letters():
    pieces = ["<unk>", "▁gr", "<0xC3>", "<0xB6>", "n"]
    (one,), = BeamSearch(pieces, lexicon=["grön"]).decode(*batch(peaked([1, 0, 2, 3, 4])))
    assert one.text == "grön"


# ------------------------------------------------------------- bad input


@pytest.mark.parametrize("options, code", [
    ({"beam": 0}, "bad-value"), ({"workers": -1}, "bad-value"), ({"width": 0.0}, "bad-value"),
    ({"lm_weight": -1.0}, "bad-value"), ({"hot_words": {"ab": -2}}, "bad-hot-word"),
    ({"hot_words": "ab"}, "bad-hot-word"), ({"hot_words": ["ab", " "]}, "bad-hot-word"),
    ({"hot_words": {"": 5}}, "bad-hot-word"), ({"hot_words": [("ab", 6)]}, "bad-hot-word"),
])
def test_options_out_of_range_are_named(options, code):
    with refused(code):
        BeamSearch(PIECES, **options)


@pytest.mark.parametrize("options, code", [
    ({"hot_words": ["Kiew"]}, "unspellable-word"), ({"lexicon": ["A", "AB"]}, "unspellable-word"),
    ({"lm": "/none/such.arpa"}, "no-such-path"), ({"lexicon": "/none/words.txt"}, "no-such-path"),
])
def test_what_does_not_fit_is_said_when_it_is_loaded(options, code):
    search = BeamSearch(PIECES, **options)  # the constructor touches no file
    with refused(code):
        search.load()


def test_scores_that_are_no_log_probabilities_are_refused():
    search = BeamSearch(PIECES)
    good = peaked([1, 0, 2])
    with refused("not-log-probabilities"):
        decode(search, good + 3)
    with refused("nan-output"):
        decode(search, good, np.where(np.arange(3)[:, None] == 1, np.nan, good))
    with refused("tokenizer-mismatch"):
        decode(search, good[:, :4])
    with pytest.raises(ValueError, match="integers"):
        search.decode(good[None], np.array([1.0]))
    with pytest.raises(ValueError, match="have the shapes"):
        search.decode(good, np.array([3]))
    with refused("no-tokenizer"):
        decode(BeamSearch(), good)


def test_the_tokenizer_can_come_later(lm):
    search = BeamSearch(lm=lm)
    search.tokenizer = PIECES
    assert decode(search, peaked([1, 0, 3]))[0][0].text == "a ab"
