"""Estimates are Kneser-Ney's, to the digits of another implementation, and probabilities sum to one."""

from __future__ import annotations

import math
import random

import kneser_ney_reference
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.decode import arpa, kneser_ney, workspace
from sbkit.decode.lm import prune_by_entropy
from sbkit.decode.ngram import NEVER, NGram

TINY = ["a b", "a b c", "b c a a"]
# What KenLM's lmplz -o 3 --discount_fallback makes of it.
TINY_BY_KENLM = {
    "<unk>": -1, "</s>": -0.57403123, "a": -0.57403123, "b": -0.6754889, "c": -0.80811447,
    "a </s>": -0.5228787, "b </s>": -0.5228787, "c </s>": -0.41642344, "<s> a": -0.33099318, "a a": -0.5228787,
    "c a": -0.41642344, "<s> b": -0.5650765, "a b": -0.5650765, "b c": -0.38604078,
    "a a </s>": -0.18708666, "a b </s>": -0.39794, "b c </s>": -0.35490537, "c a a": -0.18708666,
    "b c a": -0.35490537, "<s> a b": -0.196467, "<s> b c": -0.15146878, "a b c": -0.34145865,
}

texts = st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=8).map(" ".join), min_size=1, max_size=12)


def zipf(sentences, seed=0):
    """Sentences of frequent and rare words, where a word depends on the one before."""
    rng = random.Random(seed)
    for _ in range(sentences):
        sentence, last = [], 0
        for _ in range(rng.randrange(3, 13)):
            following = rng.randrange(1, rng.randrange(2, rng.randrange(3, 400)))
            last = (last * 7 + following) % 50 if rng.randrange(2) else following * following % 5000
            sentence.append(f"w{last}")
        yield " ".join(sentence)


def estimate(sentences, order=3, cutoffs=()):
    return kneser_ney.estimate(kneser_ney.read(sentences), order, cutoffs)


def listed(model):
    """N-gram -> (log10 probability, back-off)."""
    found, names = {}, []
    for number, level in enumerate(model.levels):
        names = [model.words[word] if not number else f"{names[context]} {model.words[word]}"
                 for context, word in zip(level.context, level.word, strict=True)]
        found.update(zip(names, zip(level.log10.tolist(), level.backoff.tolist(), strict=True), strict=True))
    return found


# ---------------------------------------------------------- known numbers


def test_a_bigram_model_is_what_a_pencil_makes_of_it():
    """<s> a </s>, <s> b </s>: discounts 0.5 for what was seen once, 1 for twice; 4 words with the unknown one."""
    found = listed(estimate(["a", "b"], order=2).model)
    # Continuations: a and b follow one word, </s> follows two: (1 - 0.5) / 4 and (2 - 1) / 4, and the 2 / 4
    # taken off is spread over 4 words.
    alone = {"a": 0.5 / 4 + 0.5 / 4, "b": 0.5 / 4 + 0.5 / 4, "</s>": 1 / 4 + 0.5 / 4, "<unk>": 0.5 / 4}
    for word, probability in alone.items():
        assert 10 ** found[word][0] == pytest.approx(probability)
    # After <s> two words once each: half of the mass is taken off. After a only </s>, once.
    assert 10 ** found["<s> a"][0] == pytest.approx(0.5 / 2 + 0.5 * alone["a"])
    assert 10 ** found["a </s>"][0] == pytest.approx(0.5 / 1 + 0.5 * alone["</s>"])
    assert 10 ** found["<s>"][1] == pytest.approx(0.5)
    assert found["<s>"][0] == NEVER


def test_probabilities_are_those_of_kenlm():
    found = listed(estimate(TINY).model)
    assert found.keys() - TINY_BY_KENLM.keys() == {"<s>"}
    for name, expected in TINY_BY_KENLM.items():
        assert found[name][0] == pytest.approx(expected, abs=1e-6), name


def test_discounts_and_perplexities_are_those_of_kenlm():
    """lmplz -o 3 and query on the same texts; and with --prune 0 0 1."""
    train, held_out = list(zipf(3000)), list(zipf(200, seed=1))
    whole = estimate(train)
    assert whole.model.counts == [334, 11029, 21197]
    assert whole.discounts[0].values == pytest.approx((0.408451, 1.0664, 1.77465), rel=1e-4)
    assert whole.discounts[1].values == pytest.approx((0.63975, 1.18263, 1.74193), rel=1e-4)
    assert whole.discounts[2].values == pytest.approx((0.931643, 1.58301, 1.79138), rel=1e-4)
    assert not any(each.fallback for each in whole.discounts)
    quality = whole.model.quality(held_out)
    assert (quality.words + quality.sentences, quality.unknown) == (1724, 1)
    assert (quality.perplexity, quality.perplexity_with_unknown) == pytest.approx((116.527532, 116.945092), rel=1e-5)
    pruned = estimate(train, cutoffs=(0, 0, 1))
    assert pruned.counted == whole.model.counts
    assert pruned.model.counts == [334, 11029, 917]
    assert pruned.model.quality(held_out).perplexity == pytest.approx(114.712836, rel=1e-5)


def test_perplexity_and_unknown_words_are_those_of_the_sentences_one_by_one():
    model = estimate(TINY).model
    held_out = ["a c", "b x a", "x"]
    quality = model.quality(iter(held_out))
    assert (quality.sentences, quality.words, quality.unknown) == (3, 6, 2)
    total = sum(map(model.sentence, held_out))
    assert quality.perplexity_with_unknown == pytest.approx(math.exp(-total / 9), rel=1e-5)
    assert quality.perplexity < quality.perplexity_with_unknown
    assert model.quality([]).words == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=texts, order=st.integers(1, 5), cutoffs=st.sampled_from([(), (0, 1), (0, 0, 1), (0, 2)]),
       min_count=st.integers(1, 3), chunk=st.integers(1, 40), on_disk=st.booleans())
def test_estimates_in_chunks_on_disk_are_those_of_all_in_memory(texts, order, cutoffs, min_count, chunk, on_disk,
                                                                tmp_path, monkeypatch):
    wanted = kneser_ney_reference.estimate(kneser_ney_reference.read(texts, min_count), order, cutoffs)
    monkeypatch.setattr(workspace, "CHUNK", chunk)
    files = workspace.Workspace(tmp_path if on_disk else None)
    corpus = kneser_ney.read(iter(texts), min_count, files)
    found = kneser_ney.estimate(corpus, order, cutoffs)
    same(found, wanted)
    pruned = wanted._replace(model=kneser_ney_reference.prune_by_entropy(wanted.model, 0.01))
    same(found._replace(model=prune_by_entropy(found.model, 0.01)), pruned)
    assert list(tmp_path.iterdir()) == []
    known = set(wanted.model.words)
    plain = [" ".join(word if word in known else "<unk>" for word in text.split()) for text in texts]
    assert list(corpus.texts()) == plain
    assert found.model.quality(texts) == pytest.approx(wanted.model.quality(texts), rel=1e-6)


def same(found, wanted):
    """Two estimates are equal, probabilities to the rounding of their 32 bits."""
    assert (found.model.words, found.counted) == (wanted.model.words, wanted.counted)
    assert found.discounts == wanted.discounts
    for one, other in zip(found.model.levels, wanted.model.levels, strict=True):
        assert np.array_equal(one.context, other.context) and np.array_equal(one.word, other.word)
        np.testing.assert_allclose(one.log10, other.log10, rtol=3e-7)
        np.testing.assert_allclose(one.backoff, other.backoff, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("order, cutoffs", [(3, ()), (4, (0, 0, 1))])
def test_a_language_in_chunks_on_disk_is_that_of_all_in_memory(tmp_path, monkeypatch, order, cutoffs):
    sentences = list(zipf(3000))
    wanted = kneser_ney_reference.estimate(kneser_ney_reference.read(sentences), order, cutoffs)
    arpa.write(wanted.model, tmp_path / "wanted.arpa")
    monkeypatch.setattr(workspace, "CHUNK", 1000)
    files = workspace.Workspace(tmp_path)
    found = kneser_ney.estimate(kneser_ney.read(sentences, files=files), order, cutoffs)
    same(found, wanted)
    arpa.write(found.model, tmp_path / "found.arpa")
    assert (tmp_path / "found.arpa").read_text() == (tmp_path / "wanted.arpa").read_text()


# ------------------------------------------------------------- properties


def sums(model):
    """The probabilities of all words after every history, added up."""
    predicted = np.array([i for i, word in enumerate(model.words) if word != "<s>"])
    states = np.arange(sum(model.counts[:-1]) + 1)
    ends = {0} | {1 + i for i, word in enumerate(model.words) if word == "</s>"}
    for state in states:
        if state not in ends:
            scores, _ = model.score(np.full(len(predicted), state), predicted)
            yield np.exp(scores.astype(np.float64)).sum()


@settings(max_examples=50, deadline=None)
@given(texts=texts, order=st.integers(1, 4), cutoff=st.integers(0, 2))
def test_probabilities_after_any_history_sum_to_one(texts, order, cutoff):
    model = estimate(texts, order, (0, 0, cutoff)).model
    assert list(sums(model)) == pytest.approx([1.0] * len(list(sums(model))), abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(texts=texts, order=st.integers(2, 4), threshold=st.sampled_from([1e-6, 1e-3, 1e-2, 0.5]))
def test_pruning_by_entropy_keeps_probabilities_that_sum_to_one(texts, order, threshold):
    model = estimate(texts, order).model
    pruned = prune_by_entropy(model, threshold)
    assert list(sums(pruned)) == pytest.approx([1.0] * len(list(sums(pruned))), abs=1e-4)
    assert all(few <= many for few, many in zip(pruned.counts, model.counts, strict=True))
    assert pruned.counts[0] == model.counts[0]
    assert listed(pruned).keys() <= listed(model).keys()


def test_pruning_by_entropy_takes_little_from_what_the_model_knows():
    train, held_out = list(zipf(3000)), list(zipf(200, seed=1))
    model = estimate(train, 3).model
    small = prune_by_entropy(model, 1e-6)
    assert small.counts[2] < 0.6 * model.counts[2]
    assert small.quality(held_out).perplexity < 1.03 * model.quality(held_out).perplexity
    # What it takes is what costs least: as many n-grams taken by their counts cost more of the text itself.
    by_count = estimate(train, 3, (0, 0, 1)).model
    smaller = prune_by_entropy(model, 1e-5)
    assert sum(smaller.counts) < sum(by_count.counts)
    assert smaller.quality(held_out).perplexity < 1.02 * by_count.quality(held_out).perplexity


@settings(max_examples=50, deadline=None)
@given(texts=texts, order=st.integers(1, 4), sentence=st.lists(st.sampled_from("abcdex"), max_size=7))
def test_scores_are_those_of_the_definition(texts, order, sentence):
    """Back off by hand, from a dictionary: the longest known n-gram, and the back-offs of the longer histories."""
    model = estimate(texts, order).model
    known = listed(model)

    def score(history, word):
        name = " ".join([*history, word])
        if name in known:
            return known[name][0]
        return known.get(" ".join(history), (0, 0))[1] + score(history[1:], word)

    words = ["<s>", *(word if word in known else "<unk>" for word in sentence), "</s>"]
    expected = sum(score(words[max(0, i - order + 1):i], words[i]) for i in range(1, len(words)))
    assert model.sentence(" ".join(sentence)) / math.log(10) == pytest.approx(expected, abs=1e-4)


def test_states_that_say_nothing_of_their_own_are_the_shorter_ones():
    """What makes two hypotheses the same for all that follows has to have one number."""
    model = estimate(["a b c d", "x b c e"], 4).model
    state = lambda text: model.score(  # noqa: E731
        np.array([state(text[:-1])]), model.lookup([text[-1]]))[1][0] if text else model.start
    assert state(["a", "b", "c"]) != state(["x", "b", "c"])
    assert state(["a", "d"]) == state(["x", "d"]) == state(["d"])


# --------------------------------------------------------------- choices


def test_rare_words_become_unknown():
    model = kneser_ney.estimate(kneser_ney.read(["a a b", "a c"], min_count=2), 2).model
    assert set(model.words) == {"<unk>", "<s>", "</s>", "a"}
    assert listed(model)["a <unk>"]
    assert model.quality(["a b"]).unknown == 1


def test_discounts_of_a_tiny_text_are_set_and_said_to_be():
    few = estimate(["a b", "b a"], 2)
    assert [each.fallback for each in few.discounts] == [True, True]
    assert few.discounts[0].values == kneser_ney.FALLBACK


def test_a_text_that_is_none_is_refused():
    with refused("no-text"):
        kneser_ney.read(["", "  "])
    with refused("reserved-word"):
        kneser_ney.read(["a <s> b"])


def test_a_vocabulary_without_an_unknown_word_gets_one_that_never_comes():
    model = estimate(TINY, 2).model
    closed = NGram(model.words[1:], [
        model.levels[0]._replace(**{name: column[1:] - (name == "word")
                                    for name, column in model.levels[0]._asdict().items()}),
        model.levels[1]._replace(word=model.levels[1].word - 1, context=model.levels[1].context - 1)])
    assert closed.sentence("a b") == pytest.approx(model.sentence("a b"), abs=1e-5)
    assert closed.sentence("a x") < -200
