"""A decoder's stream says what the decoder says of the whole."""

import numpy as np
import pytest

from sbkit.export.layout import Config
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.assembly import words
from sbkit.infer.decoding import decoder
from tests.decode.streams import listen, log_probs_of

PIECES = ["<blk>", "<s>", "▁", "a", "b", "▁a", "b▁", "a▁b"]


@pytest.mark.parametrize("separator", ["▁", None])
@pytest.mark.parametrize("search", [None, {"beam": 4}, {"hot_words": ["ab"], "beam": 4}])
def test_a_stream_says_what_the_decoder_says_of_the_whole(search, separator):
    known = Vocabulary(PIECES, Config(sample_rate=16_000, hop_samples=160, subsampling=4, vocabulary=len(PIECES),
                                      silent_ids=[1], models={}, word_separator=separator))
    how = decoder(known, search)
    log_probs = log_probs_of([5, 4, 4, 0, 4, 0, 0, 5, 1, 2, 3, 0, 7, 7, 0, 5, 4], len(PIECES))
    expected = words(how.tokens([[how.keep(log_probs)]])[0], known)
    assert len(expected) > 4
    assert listen(how.stream(), np.split(log_probs, [3, 4, 9, 9]), finish=True).settled == expected
