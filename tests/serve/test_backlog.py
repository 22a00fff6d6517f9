"""What can't be done in time is refused at once, by the work that is left and the speed of the model."""

import time

import pytest
from refusals import refused

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


def refusal(audio, seconds):
    with pytest.raises(ApiError) as error:
        audio.grow(seconds)
    return error.value


def test_as_long_as_the_speed_is_unknown_all_are_taken():
    backlog = Backlog()
    assert backlog.speed is None
    hold(backlog, "a").grow(1e6)


@pytest.fixture
def clock(monkeypatch):
    """The time, which passes when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_speed_is_what_was_delivered_lately_and_not_that_of_the_best_batch(clock):
    backlog = Backlog()
    backlog.running = True
    for _ in range(20):
        backlog.record_batch(20.0, 2.0)
        clock[0] += 2.0
    assert backlog.speed == pytest.approx(10.0)
    for _ in range(4):
        backlog.record_batch(20.0, 10.0)
        clock[0] += 10.0
    assert backlog.speed == pytest.approx(2.0, rel=0.05)
    for _ in range(10):
        backlog.record_batch(20.0, 2.0)
        clock[0] += 2.0
    assert backlog.speed == pytest.approx(10.0, rel=0.2)


def test_a_model_that_was_slow_is_trusted_again_after_it_had_nothing_to_do(clock):
    backlog = Backlog()
    backlog.record_batch(20.0, 2.0)
    backlog.running = True
    for _ in range(4):
        clock[0] += 20.0
        backlog.record_batch(20.0, 20.0)
    assert backlog.speed == pytest.approx(1.0, rel=0.05)
    clock[0] += 100.0
    assert backlog.speed == pytest.approx(1.0, rel=0.05), "its batch takes long"
    backlog.running = False
    assert backlog.speed == pytest.approx(10.0, rel=0.1)


def test_one_that_fits_at_the_usual_speed_may_try_again_when_the_model_is_slow(clock):
    backlog = Backlog()
    backlog.record_batch(20.0, 2.0)
    for _ in range(4):
        clock[0] += 20.0
        backlog.record_batch(20.0, 20.0)
    assert refusal(hold(backlog, None), 500).status == 429
    assert refusal(hold(backlog, None), 1100).status == 504


def test_there_is_a_margin_for_what_is_ahead_and_none_for_one_alone(backlog):
    first = hold(backlog, None)
    first.grow(900)
    first.close()
    for _ in range(2):
        hold(backlog, None).grow(350)
    assert refusal(hold(backlog, None), 350).status == 429, "70 s with a margin, and 35 s"


def test_an_upload_is_refused_before_it_is_read_by_what_others_were(backlog):
    """Ten seconds of audio were 1000 bytes, so 40,000 bytes are 400 s."""
    backlog.record_upload(10.0, 1000)
    first, second, third = (hold(backlog, None) for _ in range(3))
    first.expect(40_000)
    second.expect(40_000)
    with refused("rate_limit_exceeded", kind=ApiError, wording=False) as error:
        third.expect(40_000)
    assert error.value.status == 429 and 1 <= int(error.value.headers["retry-after"]) <= 80
    second.close()
    third.expect(40_000)


def test_few_uploads_are_read_at_once_until_a_batch_of_uploads_has_run():
    """How fast uploads are read is not known before; here each is of 100 s, and a model at 10 s a second."""
    backlog = Backlog()
    backlog.record_upload(100.0, 10_000)
    backlog.record_batch(20.0, 2.0, uploaded=False)
    first, second, third = (hold(backlog, None) for _ in range(3))
    first.expect(10_000)
    second.expect(10_000)
    with refused("rate_limit_exceeded", kind=ApiError, wording=False) as error:
        third.expect(10_000)
    assert error.value.status == 429
    first.grow(100.0)  # it is read
    third.expect(10_000)
    backlog.record_batch(20.0, 2.0)
    hold(backlog, None).expect(10_000)


def test_after_uploads_that_were_late_fewer_are_read_at_once(backlog):
    backlog.record_batch(20.0, 2.0)
    backlog.record_upload(100.0, 10_000)
    backlog.record_late_upload()
    first, second, third = (hold(backlog, None) for _ in range(3))
    first.expect(10_000)
    second.expect(10_000)
    with refused("rate_limit_exceeded", kind=ApiError, wording=False):
        third.expect(10_000)
    backlog.record_batch(20.0, 2.0)
    third.expect(10_000)


def test_what_an_upload_may_hold_refuses_nobody_who_is_alone(backlog):
    backlog.record_upload(10.0, 1)
    only = hold(backlog, None)
    only.expect(1_000_000)
    only.grow(800)


def test_those_that_are_refused_are_asked_back_one_after_another(backlog):
    for _ in range(2):
        hold(backlog, None).grow(380)
    waits = [int(refusal(hold(backlog, None), 190).headers["retry-after"]) for _ in range(3)]
    assert waits[0] < waits[1] < waits[2] <= 77


def test_of_equal_length_the_earliest_deadline_is_due_first_and_a_short_one_before_long_ones(backlog):
    late = hold(backlog, None, left=90.0)
    early = hold(backlog, None, left=80.0)
    short = hold(backlog, None, left=95.0)
    for work, units in ((late, 200), (early, 200), (short, 5)):
        work.grow(units)
    assert short.due < early.due < late.due


def test_what_was_accepted_is_dropped_when_the_model_is_too_slow_and_what_is_due_first_still_finishes(clock):
    backlog = Backlog()
    backlog.record_batch(20.0, 2.0)
    works = [hold(backlog, None) for _ in range(3)]
    for work in works:
        work.grow(200)
        clock[0] += 0.1
    backlog.running = True
    for _ in range(4):
        backlog.record_batch(20.0, 5.0)
        clock[0] += 5.0
    assert set(backlog.late()) == {works[1], works[2]}, "80 s are left, for 4 s of audio a second"
    works[0].check()
    with refused("rate_limit_exceeded", kind=ApiError, wording=False) as error:
        works[2].check()
    assert error.value.status == 429


def test_one_that_takes_too_long_even_alone_is_refused_for_good(backlog):
    error = refusal(hold(backlog, None), 1100)
    assert error.status == 504 and error.headers["x-should-retry"] == "false"
    hold(backlog, None).grow(900)


def test_a_client_has_a_share_of_the_audio_and_one_recording_may_be_longer(backlog):
    first, second, third = (hold(backlog, "a") for _ in range(3))
    first.grow(400)
    second.grow(90)
    assert refusal(third, 90).status == 429
    second.close()
    third.grow(90)
    first.close()
    third.close()
    hold(backlog, "a").grow(600)


def test_an_estimate_that_was_too_low_is_corrected_and_refused(backlog):
    hold(backlog, "a").grow(400)
    audio = hold(backlog, "a")
    audio.grow(10)
    assert refusal(audio, 200).status == 429


def test_one_that_comes_too_late_because_of_others_may_try_again(backlog):
    """Others have their turns between: as much of theirs is heard as of one's own, at most."""
    for client in "bcd":
        hold(backlog, client).grow(900 if client == "b" else 300)
    late = hold(backlog, "a")
    assert refusal(late, 300).status == 429, "4 times 300 s are 120 s of work"
    late.grow(200)


def test_what_was_heard_is_no_longer_ahead(backlog):
    first = hold(backlog, None)
    first.grow(900)
    assert refusal(hold(backlog, None), 500).status == 429
    first.done(600)
    hold(backlog, None).grow(500)


def test_parts_of_a_batch_that_was_computed_are_no_work_while_the_first_of_them_is_read(clock):
    """The rest was judged to take 4 s of the 3.5 that are left, and a request that was done was refused."""
    backlog = Backlog()
    backlog.record_batch(20.0, 2.0)
    request = hold(backlog, None)
    request.grow(500)
    clock[0] += 60.0  # of its 100 s
    for _ in range(5):
        request.computed(100)
    request.done(20)
    assert request.remaining == 0


def test_a_header_that_claimed_too_much_is_corrected(backlog):
    liar = hold(backlog, "a")
    liar.grow(900)
    assert refusal(hold(backlog, "a"), 300).status == 429
    liar.correct(60)
    hold(backlog, "a").grow(300)
    liar.done(60)
    liar.close()
    hold(backlog, "a").grow(190)
    assert refusal(hold(backlog, "a"), 90).status == 429


def test_one_that_came_before_the_speed_was_known_and_is_too_long_is_ended():
    backlog = Backlog()
    audio = hold(backlog, "a")
    audio.grow(1500)
    audio.done(20)
    backlog.record_batch(20.0, 2.0)
    with refused("deadline_exceeded", kind=ApiError):
        audio.done(40)
