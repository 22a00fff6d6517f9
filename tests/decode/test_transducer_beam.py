"""A transducer's beam search finds what adding up all paths finds; a stream says what the whole says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_joint import PIECES, Joint, drawn

from sbkit.decode import transducer_beam
from sbkit.decode.spans import Spelling
from sbkit.decode.transducer import TransducerSearch
from sbkit.decode.transducer_beam import States, TransducerBeam
from sbkit.errors import SbkitError
from tests.decode import exhaustive
from tests.decode.streams import cuts, listen

pytestmark = pytest.mark.slow

EVERYTHING = {"token_threshold": -1e4, "width": 1e4, "beam": 10_000, "token_beam": 100}
MOST = 2  # tokens in a frame, so that all paths can be added up
NO_PAUSE = 0.001  # seconds per frame, so that nothing is long enough


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("lm"), {}
    for unit, sentences in (("word", ["a ab c", "ca ab", "a a", "c bb", "a b ca"]),
                            ("piece", ["▁ a ▁ a b ▁c", "▁c a ▁ a b", "▁ a ▁c", "▁ b ▁c a"])):
        made[unit] = exhaustive.language_model(folder / f"{unit}.arpa", sentences)
    return made


def beam(joint, **options):
    search = TransducerBeam(PIECES, **options)
    search.joint = joint
    return search


def best_few(scores, count):
    return pytest.approx(sorted(scores.values(), reverse=True)[:count], abs=1e-3)


def few_in_a_frame(patch):
    patch.setattr(transducer_beam, "MAX_TOKENS_PER_FRAME", MOST)


# ------------------------------------------------------------- all paths


@given(seed=st.integers(0, 10**6), frames=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_without_a_language_model_it_finds_the_most_likely_texts(seed, frames):
    joint, [states] = Joint(seed), drawn(seed, frames)
    with pytest.MonkeyPatch.context() as patch:
        few_in_a_frame(patch)
        [found] = beam(joint, word_score=0.0, nbest=5, **EVERYTHING).search(States([states]))
    expected = exhaustive.transducer_texts(joint, states, MOST, PIECES)
    assert [one.acoustic for one in found] == best_few(expected, 5)
    for one in found:
        assert one.acoustic == pytest.approx(expected[one.text], abs=1e-3) and one.score == pytest.approx(one.acoustic)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), frames=st.integers(1, 3), hot=st.booleans())
@settings(max_examples=25, deadline=None)
def test_with_a_language_model_over_words_it_finds_the_best_of_all_texts(seed, frames, hot, models):
    joint, [states] = Joint(seed), drawn(seed, frames)
    (model, path), boosts = models["word"], {"ca": 1.5, "a b": 2.5} if hot else {}
    with pytest.MonkeyPatch.context() as patch:
        few_in_a_frame(patch)
        search = beam(joint, lm=path, lm_weight=0.7, word_score=0.4, unknown_score=-3.0, nbest=4,
                      hot_words=boosts, **EVERYTHING)
        [found] = search.search(States([states]))
    expected = exhaustive.with_words(exhaustive.transducer_texts(joint, states, MOST, PIECES), model, boosts)
    assert [one.score for one in found] == best_few(expected, 4)
    for one in found:
        assert one.score == pytest.approx(expected[one.text], abs=1e-3)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), frames=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_with_a_language_model_over_pieces_it_finds_the_best_of_all_spellings(seed, frames, models):
    joint, [states] = Joint(seed), drawn(seed, frames)
    model, path = models["piece"]
    with pytest.MonkeyPatch.context() as patch:
        few_in_a_frame(patch)
        search = beam(joint, lm=path, lm_weight=0.7, word_score=0.4, nbest=3, **EVERYTHING)
        [found] = search.search(States([states]))
    best = exhaustive.with_pieces(exhaustive.transducer_sequences(joint, states, MOST), model, PIECES)
    assert found[0].score == pytest.approx(max(best.values()), abs=1e-3)
    assert found[0].score == pytest.approx(best[found[0].text], abs=1e-3)


# ------------------------------------------------------------- tokens


@given(seed=st.integers(0, 100), lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4), with_model=st.booleans())
@settings(deadline=None, max_examples=25)
def test_an_utterance_is_transcribed_alike_alone_and_in_any_company(seed, lengths, with_model, models):
    states = drawn(seed, *lengths)
    search = beam(Joint(seed), beam=8, nbest=3, lm=models["word"][1] if with_model else None)
    for together, one in zip(search.search(States(states)), states, strict=True):
        [alone] = search.search(States([one]))
        assert [each.text for each in alone] == [each.text for each in together]
        assert [each.score for each in alone] == pytest.approx([each.score for each in together], abs=1e-6)


def test_where_all_is_clear_tokens_lie_where_greedy_decoding_puts_them():
    joint, states = Joint(blank=4.0), 0.3 * drawn(3, 20)[0]
    joint.table[:] = -50 * np.eye(5, dtype=np.float32)  # none is said twice
    states[range(20), [4, 2, 0, 0, 3, 2, 3, 0, 1, 2, 0, 0, 4, 0, 2, 3, 0, 0, 0, 2]] += 12
    [greedy] = TransducerSearch(joint).feed([states])
    [[best]] = beam(joint).search(States([states]))
    assert best.spans.ids.tolist() == greedy.ids.tolist() == [4, 2, 3, 2, 3, 1, 2, 4, 2, 3, 2]
    assert best.spans.starts.tolist() == greedy.starts.tolist() and best.spans.ends.tolist() == greedy.ends.tolist()
    np.testing.assert_allclose(best.spans.confidence, greedy.confidence, rtol=1e-5)


def test_padding_is_not_searched():
    joint, [states] = Joint(5), drawn(5, 9)
    padded = np.full((2, 12, len(PIECES)), 9.0, np.float32)
    padded[0, :9] = states
    found, empty = beam(joint).decode(padded, np.array([9, 0]))
    assert found[0].text == beam(joint).search(States([states]))[0][0].text and empty[0].text == ""


def test_hot_words_win_where_the_sound_leaves_a_choice():
    states = [np.log(np.array([[0.08, 1e-4, 1e-4, 1e-4, 0.92], [0.02, 0.01, 0.5, 0.4, 0.07]], np.float32))]
    joint = Joint(blank=0.0)
    joint.table[:] = 0
    joint.table[:, 2:4], joint.table[:, 4] = [9, 0, 0, 0, 0], [0, 0, 0, 0, -20]  # none is said twice
    assert [beam(joint, hot_words=hot).search(States(states))[0][0].text for hot in ((), ["cb"], {"cb": 0.1})] == \
        ["ca", "cb", "ca"]


@pytest.mark.parametrize("where", ["states", "scores"])
def test_what_is_no_number_is_refused(where):
    joint, [states] = Joint(), drawn(0, 4)
    if where == "states":
        states[2] = np.nan
    else:
        joint.table[0, 0] = np.nan
    with pytest.raises(SbkitError, match="not a number"):
        beam(joint).search(States([states]))


# ------------------------------------------------------------- streams


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), frames=st.integers(0, 40), sharp=st.sampled_from([0.3, 1.0, 4.0]),
       unit=st.sampled_from([None, "word", "piece"]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_stream_cut_anywhere_says_what_the_whole_says(seed, frames, sharp, unit, data, models):
    [states] = drawn(seed, frames)
    states, spelling = sharp * states, Spelling(PIECES, NO_PAUSE, {0})
    search = beam(Joint(seed), beam=8, lm=unit and models[unit][1], hot_words={"ca": 1.5})
    result = listen(search.stream(spelling), np.split(states, cuts(data, frames)), finish=True)
    [[best]] = search.search(States([states]))
    assert result.settled == spelling.words(best.spans)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), spoken=st.lists(st.integers(0, 12), max_size=5), data=st.data())
@settings(max_examples=25, deadline=None)
def test_all_that_is_shown_depends_on_the_frames_and_not_on_how_they_are_split(seed, spoken, data, models):
    quiet = np.tile(np.array([20, 0, 0, 0, 0], np.float32), (6, 1))  # a pause is three frames
    states = np.concatenate([np.zeros((0, 5), np.float32), *(part for one in drawn(seed, *spoken)
                                                             for part in (one, quiet))])
    search, spelling = beam(Joint(seed), beam=8, lm=models["word"][1]), Spelling(PIECES, 0.25, {0})
    frames = data.draw(st.integers(0, len(states)))
    at_once = listen(search.stream(spelling), [states[:frames]])
    assert at_once == listen(search.stream(spelling), np.split(states[:frames], cuts(data, frames)))


def test_a_pause_ends_a_line_whose_words_are_those_of_the_whole():
    joint, [first, second] = Joint(8), drawn(8, 9, 7)
    quiet = np.tile(np.array([20, 0, 0, 0, 0], np.float32), (30, 1))
    search, spelling = beam(joint), Spelling(PIECES, 0.1, {0})
    result = listen(search.stream(spelling), [first, quiet, second, quiet], finish=True)
    texts = [search.search(States([each]))[0][0].text for each in (first, second)]
    assert [count for count, _ in result.lines] == list(np.cumsum([len(text.split()) for text in texts]))
    assert [word.text for word in result.settled] == " ".join(texts).split()


def test_a_stream_that_gets_what_is_no_number_stays_as_it_was():
    joint, [states] = Joint(1), drawn(1, 8)
    stream = beam(joint).stream(Spelling(PIECES, NO_PAUSE, {0}))
    first = listen(stream, [states[:4]])
    with pytest.raises(SbkitError, match="not a number"):
        stream.feed(np.full((2, 5), np.nan, np.float32))
    rest = listen(stream, [states[4:]], finish=True)
    assert [word.text for word in first.settled + rest.settled] == \
        beam(joint).search(States([states]))[0][0].text.split()
