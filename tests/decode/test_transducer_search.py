"""Greedy decoding of a transducer: alone and in a batch, whole and in pieces, as tokens and as words of a stream."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_joint import Joint, drawn
from refusals import refused

from sbkit.decode.transducer import MAX_TOKENS_PER_FRAME, TransducerSearch


def plain(joint, states):
    """The same for one utterance, token by token."""
    last, found = [0, 0], []
    for frame, state in enumerate(states):
        for _ in range(MAX_TOKENS_PER_FRAME):
            log_probs = joint.join(state[None], joint.predict(np.array([last])))[0]
            best = int(log_probs.argmax())
            if best == joint.blank:
                break
            found.append((best, frame, float(np.exp(log_probs[best]))))
            last = [last[1], best]
    return found


def listed(spans):
    assert (spans.ends == spans.starts + 1).all()
    return list(zip(spans.ids.tolist(), spans.starts.tolist(), spans.confidence.tolist(), strict=True))


@given(st.integers(0, 100), st.lists(st.integers(0, 12), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_utterances_of_a_batch_are_decoded_as_alone(seed, lengths):
    joint, states = Joint(seed), drawn(seed, *lengths)
    for spans, alone in zip(TransducerSearch(joint, len(states)).feed(states), states, strict=True):
        assert [each[:2] for each in listed(spans)] == [each[:2] for each in plain(joint, alone)]
        np.testing.assert_allclose(spans.confidence, [each[2] for each in plain(joint, alone)], rtol=1e-5)


def test_a_frame_says_no_more_than_speech_can():
    [spans] = TransducerSearch(Joint(blank=-50.0)).feed(drawn(0, 3))
    assert spans.starts.tolist() == [frame for frame in range(3) for _ in range(MAX_TOKENS_PER_FRAME)]


def test_what_is_no_number_is_refused():
    states = drawn(0, 4)
    states[0][2] = np.nan
    with refused("nan-output"):
        TransducerSearch(Joint()).feed(states)
