"""Sampling: whatever a model gives, no id comes that isn't in its codebook, and no end within a frame."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbkit.codes import Books, NoChoice, Sampled, Sequences, Slots, SlotState, Special
from sbkit.errors import SbkitError

BOOKS = Books((1000, 64, 1), 50.0, 16000, "ab" * 32)
SLOTS = Slots(BOOKS)
STEPS = 10_000
PADDING = 61  # columns behind a level's own, as models have that round their tables up


def working_against_it(rng, rows, width, size):
    """Logits of a model that learnt nothing, or of one that works against the sampler."""
    logits, kind = rng.normal(size=(rows, width)), rng.integers(8)
    if kind == 1:  # all that is no code is far likelier
        logits[:, size:] = 1e30
    elif kind == 2:
        logits[:], logits[:, -1] = -1e300, 1e300
    elif kind == 3:  # what pads the table was never trained
        logits[:, size + len(Special) :] = np.nan
    elif kind == 4:
        logits = rng.choice([-1.7e308, 1.7e308], size=(rows, width))
    elif kind == 5:  # one code is left, and perhaps the end
        logits[:], logits[:, rng.integers(size)] = -np.inf, -1e308
        logits[:, size + Special.END] = rng.choice([-np.inf, 1e308])
    elif kind == 6:
        logits = np.zeros((rows, width), np.float16)
    elif kind == 7:
        logits = (logits * 1e37).astype(np.float32)
    return logits


@pytest.mark.slow
def test_ten_thousand_steps_of_whatever_logits_give_no_invalid_id():
    rows, most = 3, 20
    rng = np.random.default_rng(0)
    running, finished = Sequences(SLOTS, rows, most), 0
    for step in range(STEPS):
        slot, size = running.slot, BOOKS.sizes[running.slot]
        logits = working_against_it(rng, rows, SLOTS.width(slot) + PADDING, size)
        before = running.state
        found = SLOTS.sample(logits, slot, before, rng, temperature=rng.choice([0.0, 1e-300, 0.7, 1.0, 1e300]),
                             top_k=rng.choice([None, 1, 2, 50, 10**6]))
        assert ((found.codes >= 0) & (found.codes < size)).all(), (step, found)
        for was, special in zip(before.tolist(), found.special.tolist(), strict=True):
            assert special in {SlotState.INSIDE: (-1,), SlotState.BOUNDARY: (-1, Special.END),
                               SlotState.FULL: (Special.END,), SlotState.ENDED: (Special.PAD,)}[was]
            assert slot == 0 or special != Special.END, "the end comes at a frame's boundary"
        running.take(found)
        if running.done and running.slot == 0:
            for row in range(rows):
                codes = running.codes(row)
                assert 1 <= len(codes) <= most
                BOOKS.check(codes, "what was sampled")
            running, finished = Sequences(SLOTS, rows, most), finished + 1
    assert finished > 10


@given(st.data())
def test_any_finite_logits_give_what_may_come(data):
    slot = data.draw(st.integers(0, 2))
    states = [SlotState.INSIDE, SlotState.ENDED, *([SlotState.BOUNDARY, SlotState.FULL] if slot == 0 else [])]
    state = np.array(data.draw(st.lists(st.sampled_from(states), min_size=1, max_size=3)))
    width = min(SLOTS.width(slot), 67)
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    logits = np.zeros((len(state), SLOTS.width(slot)))
    logits[:, -width:] = data.draw(st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=len(state),
                                            max_size=len(state)))
    found = SLOTS.sample(logits, slot, state, np.random.default_rng(0),
                         data.draw(st.floats(0, allow_infinity=False)), data.draw(st.none() | st.integers(1, 10)))
    column = np.where(found.special < 0, found.codes, BOOKS.sizes[slot] + found.special)
    assert SLOTS.mask(slot, state)[np.arange(len(state)), column].all()


@pytest.mark.parametrize("slot, state, codes, end, pad", [
    (0, SlotState.INSIDE, True, False, False), (0, SlotState.BOUNDARY, True, True, False),
    (0, SlotState.FULL, False, True, False),
    (0, SlotState.ENDED, False, False, True), (1, SlotState.INSIDE, True, False, False),
    (2, SlotState.ENDED, False, False, True)])
def test_what_may_come_where(slot, state, codes, end, pad):
    [mask] = SLOTS.mask(slot, np.array([state]))
    size = BOOKS.sizes[slot]
    assert len(mask) == size + len(Special) and mask[:size].all() == mask[:size].any() == codes
    assert mask[size:].tolist() == [False, end, pad], "a sequence never begins again"


@pytest.mark.parametrize("slot, state",
                         [(1, SlotState.BOUNDARY), (2, SlotState.FULL), (3, SlotState.INSIDE), (-1, SlotState.INSIDE),
                                         (0, 9)])
def test_slots_and_states_that_do_not_exist_are_refused(slot, state):
    with pytest.raises(ValueError, match=r"slot|state"):
        SLOTS.mask(slot, np.array([state]))


def of(slot, **values):
    """Equal logits but for some columns."""
    logits = np.zeros((1, SLOTS.width(slot)))
    for column, value in values.items():
        logits[0, int(column[1:])] = value
    return logits


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused_where_they_could_be_taken(value):
    with pytest.raises(NoChoice, match=rf"the model gives {value} for id 7 in slot 0, row 0"):
        SLOTS.sample(of(0, c7=value), 0, np.array([SlotState.INSIDE]), np.random.default_rng(0))
    found = SLOTS.sample(of(0, c1001=value), 0, np.array([SlotState.INSIDE]), np.random.default_rng(0))
    assert found.special.tolist() == [-1]


def test_a_model_that_rules_everything_out_is_refused():
    logits = np.full((1, 1003), -np.inf)
    logits[0, 1000 + Special.PAD] = 0.0
    with pytest.raises(NoChoice, match="rules out all that may come in slot 0, row 0"):
        SLOTS.sample(logits, 0, np.array([SlotState.BOUNDARY]), np.random.default_rng(0))


def test_behind_the_end_the_model_is_not_asked():
    state = np.array([SlotState.ENDED, SlotState.FULL])
    for width in (1003, 1000):
        found = SLOTS.sample(np.full((2, width), np.nan), 0, state, np.random.default_rng(0))
        assert found.special.tolist() == [Special.PAD, Special.END] and found.codes.tolist() == [0, 0]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"temperature": np.nan}, {"temperature": np.inf},
                                     {"top_k": 0}, {"top_k": -3}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(SbkitError, match=next(iter(options))):
        SLOTS.sample(of(0), 0, np.array([SlotState.INSIDE]), np.random.default_rng(0), **options)


@pytest.mark.parametrize("shape, state", [((1, 999), SlotState.INSIDE), ((1, 1001), SlotState.BOUNDARY), ((2, 1003), 0),
                                          ((1003,), 0)])
def test_logits_without_a_column_for_all_that_may_come_are_refused(shape, state):
    with pytest.raises(SbkitError, match=r"the logits of slot 0 are .* must be \[1, 1003\]"):
        SLOTS.sample(np.zeros(shape), 0, np.array([state]), np.random.default_rng(0))


def test_within_frames_a_head_needs_no_columns_for_special_tokens():
    found = SLOTS.sample(np.eye(4, 1000), 0, np.full(4, SlotState.INSIDE), np.random.default_rng(0), temperature=0)
    assert found.codes.tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- what is sampled


def test_samples_follow_the_probabilities():
    logits = np.log([[0.5, 0.3, 0.15, 0.05]] * 20_000)
    slots = Slots(Books((4,), 50.0, 16000, "ab" * 32))
    rng, inside = np.random.default_rng(1), np.full(len(logits), SlotState.INSIDE)
    for options, expected in [({}, [0.5, 0.3, 0.15, 0.05]), ({"top_k": 2}, [0.625, 0.375, 0, 0]),
                              ({"temperature": 0.5}, [0.685, 0.247, 0.062, 0.007]), ({"temperature": 0}, [1, 0, 0, 0])]:
        codes = slots.sample(logits, 0, inside, rng, **options).codes
        np.testing.assert_allclose(np.bincount(codes, minlength=4) / len(codes), expected, atol=0.015)


def test_the_likeliest_are_counted_among_what_may_come():
    """Not among all: the end, likeliest by far, would take the only place."""
    logits = of(0, c5=3.0, c1001=50.0)
    found = SLOTS.sample(logits, 0, np.array([SlotState.INSIDE]), np.random.default_rng(0), top_k=1)
    assert (found.codes.tolist(), found.special.tolist()) == ([5], [-1])
    found = SLOTS.sample(logits, 0, np.array([SlotState.BOUNDARY]), np.random.default_rng(0), top_k=1)
    assert found.special.tolist() == [Special.END]


def test_with_a_generator_of_its_own_a_row_is_the_same_alone_and_among_others():
    logits = np.random.default_rng(3).normal(size=(4, 1003))

    def sample(rows):
        return SLOTS.sample(logits[rows], 0, np.full(len(rows), SlotState.INSIDE),
                            [np.random.default_rng(row) for row in rows]).codes.tolist()

    assert sample([0, 1, 2, 3]) == [*sample([0]), *sample([1, 2]), *sample([3])]
    with pytest.raises(ValueError, match="1 generators are given for 2 rows"):
        SLOTS.sample(logits[:2], 0, np.zeros(2, int), [np.random.default_rng(0)])


# ---------------------------------------------------------------- sequences


def code(*ids):
    return Sampled(np.array(ids), np.full(len(ids), -1))


def test_sequences_end_at_their_own_frames_and_have_whole_frames_only():
    running = Sequences(SLOTS, 2, most=3)
    for ids in ([1, 2], [3, 4], [0, 0]):
        assert running.state.tolist() == [SlotState.INSIDE] * 2
        running.take(code(*ids))
    assert running.slot == 0 and running.state.tolist() == [SlotState.BOUNDARY] * 2
    running.take(Sampled(np.array([0, 9]), np.array([Special.END, -1])))
    assert running.state.tolist() == [SlotState.ENDED, SlotState.INSIDE] and not running.done
    assert running.codes(1).tolist() == [[2, 4, 0]], "the second frame isn't whole"
    for ids in ([0, 8], [0, 0]):
        running.take(Sampled(np.array(ids), np.array([Special.PAD, -1])))
    assert [running.codes(row).tolist() for row in (0, 1)] == [[[1, 3, 0]], [[2, 4, 0], [9, 8, 0]]]


def test_no_sequence_is_longer_or_shorter_than_it_may_be():
    running = Sequences(SLOTS, 1, most=3, least=2)
    states = []
    while not running.done:
        if running.slot == 0:
            states.append(int(running.state[0]))
        allowed = SLOTS.mask(running.slot, running.state)[0]
        running.take(code(0) if allowed[0] else Sampled(np.array([0]), np.array([Special.END])))
    assert states == [SlotState.INSIDE, SlotState.INSIDE, SlotState.BOUNDARY, SlotState.FULL]
    assert running.codes(0).shape == (3, 3)


@pytest.mark.parametrize("wrong", [
    code(-1), code(1000), code(1063), Sampled(np.array([0]), np.array([Special.END])),
    Sampled(np.array([0]), np.array([Special.BEGIN])), Sampled(np.array([0]), np.array([7])),
    Sampled(np.array([0]), np.array([-1001]))])
def test_what_may_not_come_is_not_taken(wrong):
    running = Sequences(SLOTS, 1, most=3)
    with pytest.raises(ValueError, match="may not come in slot 0"):
        running.take(wrong)
    running.take(code(999))
