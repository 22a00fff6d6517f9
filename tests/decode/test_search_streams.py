"""A stream decoded as it comes, by any search: it says what decoding all of it at once says, whatever its pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_joint import PIECES as SPOKEN
from random_joint import Joint, drawn
from refusals import refused

from sbkit.decode import spans
from sbkit.decode.beam import BeamSearch
from sbkit.decode.greedy_stream import GreedyStream
from sbkit.decode.spans import Spelling, best_path, collapse
from sbkit.decode.transducer import TransducerSearch, TransducerStream
from sbkit.decode.transducer_beam import TransducerBeam
from tests.decode import exhaustive
from tests.decode.exhaustive import PIECES
from tests.decode.streams import MARKED, cuts, listen, log_probs_of, runs

NO_PAUSE = 0.001  # seconds per frame, so that nothing is long enough to end a line
QUIET = np.tile(np.array([20, 0, 0, 0, 0], np.float32), (30, 1))  # of a transducer


class Kind(NamedTuple):
    """A search of streams."""

    stream: Callable
    """Makes a stream from a spelling."""
    whole: Callable
    """Finds the tokens of all scores at once."""
    spelling: Spelling
    scores: st.SearchStrategy
    """Draws scores with pauses, and others."""
    searches_lines: bool
    """Whether lines are searched by themselves, so that the whole is the same only if there is one."""

    def draw(self, data):
        """Scores: several where it takes no time to decode them."""
        return [data.draw(self.scores) for _ in range(1 if self.searches_lines else 6)]


def greedy(separator):
    spelling = Spelling(MARKED, 0.04, {0, 1}, separator)
    return Kind(GreedyStream, lambda scores: collapse(*best_path(scores[None], np.array([len(scores)])))[0], spelling,
                runs(len(MARKED)).map(lambda labels: log_probs_of(labels, len(MARKED))), False)


def beam(search, pieces, frame, scores):
    return Kind(search.stream, lambda found: search.decode(found[None], np.array([len(found)]))[0][0].spans,
                Spelling(pieces, frame, {0}), scores, True)


def ctc(**options):
    return beam(BeamSearch(PIECES, beam=8, **options), PIECES, 0.04, LOG_PROBS)


SIZE = len(PIECES)
LOG_PROBS = st.builds(
    lambda labels, sharp: log_probs_of(labels, SIZE, sharp),
    runs(SIZE, (1, 1, 2, 3, 9, 18, 40)), st.sampled_from([2.0, 4.0, 8.0])) | st.builds(
    lambda seed, frames, sharp: exhaustive.random_log_probs(np.random.default_rng(seed), frames, SIZE, sharp),
    st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([0.3, 1.0, 2.0, 6.0]))
STATES = st.builds(
    lambda seed, sharp, spoken: np.concatenate([np.zeros((0, 5), np.float32), *(
        part for one in drawn(seed, *spoken) for part in (sharp * one, QUIET[:6]))]),
    st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 4.0]), st.lists(st.integers(0, 12), max_size=5))


def transducer(**options):
    search = TransducerBeam(SPOKEN, beam=8, **options)
    search.joint = Joint(7)
    return beam(search, SPOKEN, 0.25, STATES)  # a pause is three frames


def greedy_transducer():
    return Kind(lambda spelling: TransducerStream(spelling, Joint(7)),
                lambda scores: TransducerSearch(Joint(7)).feed([scores])[0], Spelling(SPOKEN, 0.25, {0}), STATES, False)


HOT = {"ab": 1.5, "a b": 2.5}
KINDS = {
    "greedy": lambda lm: greedy("▁"), "greedy without spaces": lambda lm: greedy(None),
    "greedy transducer": lambda lm: greedy_transducer(),
    "alone": lambda lm: ctc(), "hot words": lambda lm: ctc(hot_words=HOT),
    "words": lambda lm: ctc(lm=lm("words"), hot_words=HOT), "pieces": lambda lm: ctc(lm=lm("pieces")),
    "lexicon": lambda lm: ctc(lexicon=["a", "ab"]),
    "transducer": lambda lm: transducer(hot_words={"ca": 1.5}),
    "transducer, words": lambda lm: transducer(lm=lm("said")),
    "transducer, pieces": lambda lm: transducer(lm=lm("spelled")),
}
SENTENCES = {"words": exhaustive.SENTENCES, "pieces": exhaustive.SPELLED,
             "said": ["a ab c", "ca ab", "a a", "c bb", "a b ca"],
             "spelled": ["▁ a ▁ a b ▁c", "▁c a ▁ a b", "▁ a ▁c", "▁ b ▁c a"]}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    return KINDS[request.param](lambda name: exhaustive.language_model(folder / f"{name}.arpa", SENTENCES[name])[1])


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_words_times_and_confidences_are_those_of_the_whole(kind, data):
    spelling = kind.spelling
    if kind.searches_lines:
        spelling = Spelling(spelling.symbols, NO_PAUSE, spelling.silent)
    for scores in kind.draw(data):
        result = listen(kind.stream(spelling), np.split(scores, cuts(data, len(scores))), finish=True)
        expected = spelling.words(kind.whole(scores))
        assert result.settled == expected and result.partial == []
        counts = [count for count, _ in result.lines]
        assert counts == sorted(set(counts)) and counts[-1:] == [len(expected)] * bool(expected)
        assert all(expected[count].start - expected[count - 1].end >= spans.PAUSE_SECONDS for count in counts[:-1])


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(data=st.data(), longest=st.sampled_from([spans.LONGEST_SECONDS, 1.0, 0.2]))
def test_all_that_is_shown_depends_on_the_frames_and_not_on_how_they_are_split(kind, data, longest):
    for scores in kind.draw(data):
        scores = scores[:data.draw(st.integers(0, len(scores)))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "LONGEST_SECONDS", longest)
            in_pieces = listen(kind.stream(kind.spelling), np.split(scores, cuts(data, len(scores))))
            assert in_pieces == listen(kind.stream(kind.spelling), [scores])


def test_what_is_refused_leaves_the_stream_as_it_was(kind):
    spelling = Spelling(kind.spelling.symbols, NO_PAUSE, kind.spelling.silent, kind.spelling.separator)
    scores = log_probs_of([3, 2, 4, 2, 0, 3, 0, 1, 1, 0], len(spelling.symbols), 12.0)
    stream = kind.stream(spelling)
    first = listen(stream, [scores[:4]])
    with refused("nan-output"):
        stream.feed(np.full((2, scores.shape[1]), np.nan, np.float32))
    rest = listen(stream, [scores[4:]], finish=True)
    assert first.settled + rest.settled == spelling.words(kind.whole(scores))


def test_a_pause_ends_a_line_whose_words_are_those_of_the_whole():
    kind = transducer()
    parts, spelling = drawn(8, 9, 7), Spelling(SPOKEN, 0.1, {0})
    result = listen(kind.stream(spelling), [parts[0], QUIET, parts[1], QUIET], finish=True)
    lines = [spelling.words(kind.whole(each)) for each in parts]
    assert [count for count, _ in result.lines] == list(np.cumsum(list(map(len, lines))))
    assert [word.text for word in result.settled] == [word.text for words in lines for word in words]
