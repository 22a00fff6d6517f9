"""What can't be done in time is refused at once, by the work that is left and the speed of the model."""

import time

import pytest

from sbkit.serve.backlog import Backlog, Work
from sbkit.serve.errors import ApiError


@pytest.fixture
def backlog():
    """Of a model that hears 10 s a second."""
    backlog = Backlog()
    backlog.record_batch(20.0, 2.0)
    return backlog


def hold(backlog, client, share=0.5, seconds=100.0, left=None):
    return Work(backlog, client, share, seconds, time.monotonic() + (seconds if left is None else left))


def refused(audio, seconds):
    with pytest.raises(ApiError) as error:
        audio.grow(seconds)
    return error.value


def test_as_long_as_the_speed_is_unknown_all_are_taken():
    backlog = Backlog()
    assert backlog.speed is None
    hold(backlog, "a").grow(1e6)


def test_the_speed_is_that_of_the_best_batch(backlog):
    backlog.record_batch(30.0, 100.0)
    assert backlog.speed == pytest.approx(10.0)


def test_one_that_takes_too_long_even_alone_is_refused_for_good(backlog):
    error = refused(hold(backlog, None), 1100)
    assert error.status == 504 and error.headers["x-should-retry"] == "false"
    hold(backlog, None).grow(900)


def test_a_client_has_a_share_of_the_audio_and_one_recording_may_be_longer(backlog):
    first, second, third = (hold(backlog, "a") for _ in range(3))
    first.grow(400)
    second.grow(90)
    assert refused(third, 90).status == 429
    second.close()
    third.grow(90)
    first.close()
    third.close()
    hold(backlog, "a").grow(600)


def test_an_estimate_that_was_too_low_is_corrected_and_refused(backlog):
    hold(backlog, "a").grow(400)
    audio = hold(backlog, "a")
    audio.grow(10)
    assert refused(audio, 200).status == 429


def test_one_that_comes_too_late_because_of_others_may_try_again(backlog):
    """Others have their turns between: as much of theirs is heard as of one's own, at most."""
    for client in "bcd":
        hold(backlog, client).grow(900 if client == "b" else 300)
    late = hold(backlog, "a")
    assert refused(late, 300).status == 429, "4 times 300 s are 120 s of work"
    late.grow(200)


def test_what_was_heard_is_no_longer_ahead(backlog):
    first = hold(backlog, None)
    first.grow(900)
    assert refused(hold(backlog, None), 500).status == 429
    first.done(600)
    hold(backlog, None).grow(500)


def test_a_header_that_claimed_too_much_is_corrected(backlog):
    liar = hold(backlog, "a")
    liar.grow(900)
    assert refused(hold(backlog, "a"), 300).status == 429
    liar.correct(60)
    hold(backlog, "a").grow(300)
    liar.done(60)
    liar.close()
    hold(backlog, "a").grow(190)
    assert refused(hold(backlog, "a"), 90).status == 429


def test_one_that_came_before_the_speed_was_known_and_is_too_long_is_ended():
    backlog = Backlog()
    audio = hold(backlog, "a")
    audio.grow(1500)
    audio.done(20)
    backlog.record_batch(20.0, 2.0)
    with pytest.raises(ApiError, match="not finished within 100 s"):
        audio.done(40)
