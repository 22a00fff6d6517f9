"""A transducer's beam search: its tokens, hot words and what it refuses; a stream says what the whole says."""

from __future__ import annotations

import numpy as np
import pytest
from random_joint import PIECES, Joint, drawn
from refusals import refused

from sbkit.decode.spans import Spelling
from sbkit.decode.transducer import TransducerSearch
from sbkit.decode.transducer_beam import TransducerBeam

pytestmark = pytest.mark.slow


def beam(joint, **options):
    search = TransducerBeam(PIECES, **options)
    search.joint = joint
    return search


# ------------------------------------------------------------- tokens


def test_where_all_is_clear_tokens_lie_where_greedy_decoding_puts_them():
    joint, states = Joint(blank=4.0), 0.3 * drawn(3, 20)[0]
    joint.table[:] = -50 * np.eye(5, dtype=np.float32)  # none is said twice
    states[range(20), [4, 2, 0, 0, 3, 2, 3, 0, 1, 2, 0, 0, 4, 0, 2, 3, 0, 0, 0, 2]] += 12
    [greedy] = TransducerSearch(joint).feed([states])
    [[best]] = beam(joint).decode(states[None], np.array([20]))
    assert best.spans.ids.tolist() == greedy.ids.tolist() == [4, 2, 3, 2, 3, 1, 2, 4, 2, 3, 2]
    assert best.spans.starts.tolist() == greedy.starts.tolist() and best.spans.ends.tolist() == greedy.ends.tolist()
    np.testing.assert_allclose(best.spans.confidence, greedy.confidence, rtol=1e-5)


@pytest.mark.parametrize("where", ["states", "scores"])
def test_what_is_no_number_is_refused(where):
    joint, [states] = Joint(), drawn(0, 4)
    if where == "states":
        states[2] = np.nan
    else:
        joint.table[0, 0] = np.nan
    with refused("nan-output"):
        beam(joint).decode(states[None], np.array([4]))


def test_long_noise_costs_no_words_with_hot_words_and_shows_none():
    joint, noise = Joint(blank=4.0), 0.3 * drawn(5, 200)[0]  # each token has some share in each frame
    joint.table[:] = 0
    said = noise.copy()
    said[100, 2] += 12
    search = beam(joint, hot_words={"ca": 9.0, "a": 7.0})
    [silent], [spoken] = search.decode(np.stack([noise, said]), np.array([200, 200]))
    assert silent.text == "" and spoken.text and abs(spoken.spans.starts - 100).max() <= 8
    stream = search.stream(Spelling(PIECES, 0.04, {0}))
    assert not any(each.partial or each.settled for piece in np.split(noise, 10) for each in stream.feed(piece))
