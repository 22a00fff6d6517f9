"""A stream searched as it comes: lines, when words settle, and constant memory."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from refusals import refused

from sbkit.decode.beam import BeamSearch
from sbkit.decode.spans import LONGEST_SECONDS, Spelling
from tests.decode import exhaustive
from tests.decode.exhaustive import PIECES
from tests.decode.streams import listen, log_probs_of

FRAME = 0.04
NO_PAUSE = 0.001  # seconds per frame, so that nothing is long enough


@pytest.fixture(scope="module")
def searches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    for name, sentences in (("word", exhaustive.SENTENCES), ("piece", exhaustive.SPELLED)):
        exhaustive.language_model(folder / f"{name}.arpa", sentences)
    hot = {"ab": 1.5, "a b": 2.5}
    return {
        "alone": BeamSearch(PIECES, beam=8),
        "words": BeamSearch(PIECES, lm=folder / "word.arpa", hot_words=hot, beam=8),
        "pieces": BeamSearch(PIECES, lm=folder / "piece.arpa", beam=8),
    }


def stream(search, frame=FRAME):
    return search.stream(Spelling(PIECES, frame, {0}))


def whole(search, log_probs):
    spelling = Spelling(PIECES, FRAME, {0})
    (best, *_), = search.decode(log_probs[None], np.array([len(log_probs)]))
    return spelling.words(best.spans)


def say(labels, sharp=12.0):
    return log_probs_of(labels, len(PIECES), sharp)


SPEECH = [1, 2, 4, 2, 0, 3, 0, 1, 1, 0]  # ab b ab a; 0 is the blank


@pytest.mark.parametrize("how", ["alone", "words", "pieces"])
def test_each_line_is_what_the_whole_search_finds_in_it(how, searches):
    lines = [say(SPEECH * count + [0] * 30) for count in (1, 2, 3)]
    result = listen(stream(searches[how]), np.split(np.concatenate(lines), range(7, sum(map(len, lines)), 7)))
    assert [count for count, _ in result.lines] == list(
        np.cumsum([len(whole(searches[how], line)) for line in lines]))
    assert [word.text for word in result.settled] == [word.text for line in lines
                                                      for word in whole(searches[how], line)]
    assert result.partial == []


def test_words_settle_once_all_hypotheses_share_them_and_what_they_need_is_forgotten():
    decoder = stream(BeamSearch(PIECES, beam=8, width=4.0), NO_PAUSE)
    said = [each for _ in range(40) for each in decoder.feed(say(SPEECH))]
    assert sum(len(each.settled) for each in said) >= 40 * 4 - 2 and all(len(each.partial) < 4 for each in said)
    assert decoder.events.frame[0] > 380


def test_words_that_hypotheses_never_agree_about_settle_after_a_while(searches):
    decoder, words = stream(searches["words"]), 0
    for tenth in range(1, 101):
        said, = decoder.feed(say(SPEECH))
        words += len(said.settled)
        assert words + len(said.partial) == pytest.approx(4 * tenth, abs=1) and not said.endpoint
        assert 4 * tenth - words <= 10 * LONGEST_SECONDS + 10, "there are 10 words a second"


def test_a_pause_ends_a_line_once_though_unlikely_tokens_are_in_it(searches):
    quiet = np.log(np.array([0.98, 0.005, 0.005, 0.005, 0.005], np.float32))[None].repeat(60, 0)
    decoder = stream(searches["alone"])
    said = [each for piece in (say([0, 1, 2, 0]), *np.split(quiet, 6)) for each in decoder.feed(piece)]
    assert [each.endpoint for each in said].count(True) == 1
    assert [word.text for each in said for word in each.settled] == ["ab"]
    assert not decoder.finish().endpoint


def test_noise_shows_nothing_and_ends_a_line(searches):
    tokens = 0.03 * np.random.default_rng(0).dirichlet([0.3] * 4, 240)
    noise = np.split(np.log(np.concatenate([np.full((240, 1), 0.97), tokens], 1) + 1e-9).astype(np.float32), 30)
    for how in ("alone", "pieces"):
        decoder = stream(searches[how])
        assert not any(each.partial or each.settled for piece in noise for each in decoder.feed(piece))
        shown = [each for piece in (say([0, 1, 2, 0]), *noise) for each in decoder.feed(piece)]
        [end] = [each for each in shown if each.endpoint]
        assert end.seconds < 12 and [word.text for each in shown for word in each.settled] == ["ab"]
        assert not any(each.partial for each in shown[shown.index(end) + 1:])


def test_a_word_that_just_begins_keeps_the_pause_before_it_from_ending_the_line(searches):
    decoder = stream(searches["alone"])
    decoder.feed(say([1, 2] + [0] * 16))
    begins = np.log(np.array([[0.6, 0.4, 1e-9, 1e-9, 1e-9]], np.float32))  # after 16 frames, and the blank is likelier
    waiting, = decoder.feed(np.concatenate([begins, say([0] * 4)]))
    assert not waiting.endpoint
    said = [each for _ in range(8) for each in decoder.feed(say([0] * 4))]
    assert [each.endpoint for each in said].count(True) == 1


def test_a_stream_of_other_tokens_is_refused(searches):
    with refused("tokenizer-mismatch"):
        searches["words"].stream(Spelling(["a"], FRAME))


def size(decoder):
    """The bytes that the stream keeps, without what all streams share."""
    line = decoder.line
    return len(pickle.dumps([line.history, line.beams, line.scale, decoder.events]))


LONG = {
    "speech": SPEECH + [0] * 15, "lines": [*SPEECH, *SPEECH] + [0] * 30, "silence": [0] * 10,
    "an endless word": [2, 0, 0], "one token": [2] * 10,
}
NOISE = {"babble": 0.3, "mumbling": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in ("speech", "babble")))
                                  for kind in [*LONG, *NOISE]])
def test_memory_is_constant(kind, searches):
    seconds, frames = 300 if kind in ("speech", "lines") else 120, int(10 / FRAME)
    if kind in LONG:
        piece = say(np.resize(LONG[kind], frames))
    else:
        piece = exhaustive.random_log_probs(np.random.default_rng(0), frames, len(PIECES), NOISE[kind])
    decoder, sizes, longest = stream(searches["words"]), [], 0
    for _ in range(seconds // 10):
        for part in np.split(piece, range(16, frames, 16)):
            said = decoder.feed(part)
            longest = max(longest, *(len(each.settled) + len(each.partial) for each in said))
            sizes.append(size(decoder))
    warm = len(sizes) * 60 // seconds
    assert max(sizes[warm:]) <= 1.5 * max(sizes[:warm]), "the first minute needs as much"
    assert longest <= 1.5 * LONGEST_SECONDS / FRAME


class FewerBlanks(BeamSearch):
    """Takes a penalty from the blank of each frame."""

    def events(self, scores, lengths, tokens_may_begin=None):
        penalised = scores.copy()
        penalised[..., self.blank_id] -= 3.0
        return super().events(penalised, lengths, tokens_may_begin)


def test_a_class_that_overrides_events_searches_streams_as_it_does_whole_utterances():
    log_probs = say(SPEECH, sharp=2.0)
    changed = FewerBlanks(PIECES, beam=8)
    texts = [[word.text for word in whole(search, log_probs)] for search in (changed, BeamSearch(PIECES, beam=8))]
    assert texts[0] != texts[1], "the penalty has an effect"
    result = listen(stream(changed, NO_PAUSE), np.split(log_probs, [3, 5]), finish=True)
    assert [word.text for word in result.settled] == texts[0]
