"""What the beginning of a phrase earns: test_exhaustive.py compares whole searches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbkit.decode import hashing
from sbkit.decode.hotwords import HotWords

words = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4)


@given(words, st.floats(0.01, 20))
def test_each_byte_of_a_phrase_earns_its_share_and_the_last_one_the_whole_boost(phrase, boost):
    hot, size, spelled = HotWords({" ".join(phrase): boost}), len("".join(phrase).encode()), 0
    state, gain = np.array([0]), 0.0
    for word in phrase:
        assert hot.expect(state, np.zeros(1, np.uint64)) == pytest.approx(boost * spelled / size)
        hashes = hashing.prefixes([word.encode()])[0]
        for letters, key in enumerate(hashes, start=spelled + 1):
            assert hot.expect(state, np.array([key])) >= boost * letters / size * (1 - 1e-9)
        spelled += len(hashes)
        gain, state = hot.complete(state, hashes[-1:])
    assert gain == boost and (len(set(phrase)) < len(phrase) or state == 0)
