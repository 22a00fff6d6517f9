"""Words settled stretch by stretch: the same as decoding all of a recording at its end, for what its parts cost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.export.layout import Config
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.assembly import StableWords, join_tokens
from sbkit.infer.decoding import decoder
from tests.decode.streams import listen, log_probs_of, runs

#: With spaces before, behind and amid pieces, alone, and bytes; 1 is silent.
PIECES = ["<blk>", "<s>", "▁", "a", "b", "▁a", "b▁", "a▁b", "▁▁", "<0xC3>", "<0xA4>"]


def vocabulary(**changes):
    options = {"sample_rate": 16_000, "hop_samples": 160, "subsampling": 4, "vocabulary": len(PIECES),
               "silent_ids": [1], "models": {}}
    return Vocabulary(PIECES, Config(**(options | changes)))


def log_probs(labels):
    return log_probs_of(labels, len(PIECES))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(runs(len(PIECES)), st.data(), st.sampled_from(["▁", None]),
       st.sampled_from([None, None, None, {"beam": 2, "token_beam": 2}]))
def test_stable_words_equal_those_of_decoding_everything_at_once(labels, data, separator, search):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(labels) - 1)), max_size=8)))
    known = vocabulary(word_separator=separator)
    how = decoder(known, search)
    stretches = [how.keep(part) for part in np.split(log_probs(labels), cuts) if len(part)]
    settling, shown = StableWords(how, known), []
    for each in stretches:
        settling.add([each])
        assert settling.words[: len(shown)] == shown, "what was settled changed"
        shown = list(settling.words)
    settling.end()
    assert settling.words[: len(shown)] == shown
    reference = join_tokens(how.tokens([stretches])[0], known)
    assert [each.text for each in settling.words] == [each.text for each in reference]
    for mine, other in zip(settling.words, reference, strict=True):
        assert dataclasses.astuple(mine)[1:4] == pytest.approx(dataclasses.astuple(other)[1:4], abs=1e-5)
    assert known.text(settling.words) == known.text(reference)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [
    [2, 3, 0, 4, 0] * 100, [3, 4] * 250, [0] * 500, [3] + [0] * 499, [1, 0] * 250, [7, 0] * 250,
], ids=["speech", "a word without an end", "silence", "a word and silence", "silent tokens", "shared tokens"])
def test_cost_grows_linearly_with_the_recording(labels):
    """Of 20 s each; frames are counted that tokens are looked for in."""
    known = vocabulary()
    how = decoder(known, None)
    kept, looked = how.keep(log_probs(labels)), 0
    real = how.tokens

    def counted(recordings):
        nonlocal looked
        looked += sum(each.frames for stretches in recordings for each in stretches)
        return real(recordings)

    how.tokens = counted
    settling = StableWords(how, known)
    for _ in range(100):
        settling.add([kept])
    settling.end()
    assert looked <= 4 * 100 * 500


@pytest.mark.parametrize("separator", ["▁", None])
@pytest.mark.parametrize("search", [None, {"beam": 4}, {"hot_words": ["ab"], "beam": 4}])
def test_a_stream_has_the_words_of_the_whole_recording(search, separator):
    known = vocabulary(word_separator=separator)
    how, said = decoder(known, search), log_probs([5, 4, 4, 0, 4, 0, 0, 5, 1, 2, 3, 0, 7, 7, 0, 5, 4])
    expected = join_tokens(how.tokens([[how.keep(said)]])[0], known)
    assert len(expected) > 4
    assert listen(how.stream(), np.split(said, [3, 4, 9, 9]), finish=True).settled == expected
