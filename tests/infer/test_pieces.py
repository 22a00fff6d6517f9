"""Long recordings are cut in pauses alone, no word is lost or said twice, and pieces don't overlap."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sbkit.decode.spans import Word
from sbkit.infer.labelling import MARGIN_SECONDS, PAUSE_SECONDS, cut_at_pauses


def spoken(lengths, pauses):
    """Words of so many seconds after so long pauses."""
    found, time = [], 0.0
    for number, (length, pause) in enumerate(zip(lengths, pauses, strict=False)):
        found.append(Word(str(number), time + pause, time + pause + length, 0.5))
        time = found[-1].end
    return found


@given(st.lists(st.tuples(st.floats(0.05, 3), st.floats(0, 4)), max_size=60), st.floats(2, 30), st.floats(0, 9))
def test_every_word_is_in_one_piece_with_what_is_around_it(words, longest, silence):
    heard = spoken(*zip(*words, strict=True)) if words else []
    duration = (heard[-1].end if heard else 0.0) + silence
    pieces = cut_at_pauses(heard, duration, longest)
    assert [word for piece in pieces for word in piece.words] == heard
    assert all(0 <= each.start <= each.end <= duration for each in pieces)
    assert all(one.end <= other.start for one, other in itertools.pairwise(pieces))
    for one, other in itertools.pairwise(pieces):
        assert other.words[0].start - one.words[-1].end >= PAUSE_SECONDS, "a cut goes through a pause"
    for piece in pieces:
        assert piece.start <= (piece.words[0].start if piece.words else 0.0)
        assert piece.end >= (piece.words[-1].end if piece.words else duration)
        pauses = [after.start - before.end for before, after in itertools.pairwise(piece.words)]
        whole = duration <= longest or not words
        assert whole or piece.end - piece.start <= longest / 2 + 2 * MARGIN_SECONDS or (
            max(pauses, default=0.0) < PAUSE_SECONDS), "only without a pause it may be longer"


def test_a_short_recording_is_one_piece_with_its_silence():
    words = spoken([1, 1], [3, 5])
    assert cut_at_pauses(words, 20.0, 20.0) == [(0.0, 20.0, words)]


def test_a_recording_without_words_is_one_piece():
    assert cut_at_pauses([], 3.0, 20.0) == [(0.0, 3.0, [])] and cut_at_pauses([], 30.0, 20.0) == [(0.0, 30.0, [])]


def test_a_piece_keeps_some_of_a_long_pause_and_half_of_a_short_one():
    words = spoken([4, 4, 4], [2, 0.6, 5])
    pieces = cut_at_pauses(words, 30.0, 8.0)
    assert [(round(each.start, 3), round(each.end, 3)) for each in pieces] == [(1.5, 6.3), (6.3, 11.1), (15.1, 20.1)]
