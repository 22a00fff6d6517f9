"""The bundle's README shows other programs how to come from log-probabilities to the words that sbkit says."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbkit.export.layout import TOKENS, Config
from sbkit.export.vocabulary import Vocabulary, write_tokens
from sbkit.infer.assembly import join_tokens
from sbkit.infer.decoding import Greedy
from sbkit.tasks.ctc import readme

PIECES = ["<s>", "▁", "▁the", "<blk>", "ro", "w", "<unk>", "</s>", "▁a"]
BYTES = [*PIECES, "<0xC3>", "<0xB6>"]


def made(folder, pieces, separator):
    """A vocabulary, and what the bundle's README makes of log-probabilities."""
    config = Config(sample_rate=16_000, hop_samples=160, subsampling=4, vocabulary=len(pieces), language="en",
                    blank_id=3, silent_ids=[0, 7], word_separator=separator, models={"onnx": "model.onnx"})
    write_tokens(folder / TOKENS, pieces, config.blank_id)
    block, = re.findall(r"```python\n(.*?)```", readme.words(config, pieces), re.S)
    shown = {}
    exec(block.replace(TOKENS, str(folder / TOKENS)), shown)
    return Vocabulary(pieces, config), shown["text"]


@pytest.fixture(scope="module", params=["▁", None])
def bundle(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp("bundle"), PIECES, request.param)


def transcribed(vocabulary, log_probs):
    """What sbkit transcribes."""
    decoder = Greedy(vocabulary)
    [found] = decoder.tokens([[decoder.keep(log_probs)]])
    return vocabulary.text(join_tokens(found, vocabulary))


def scores(labels, count):
    log_probs = np.log(np.full((len(labels), count), 0.01, np.float32))
    log_probs[np.arange(len(labels)), labels] = -0.01
    return log_probs


#: Labels, each for so many frames: 18 frames are 0.7 s.
run = st.tuples(st.integers(0, len(PIECES) - 1), st.sampled_from([1, 2, 17, 18, 40]))


@given(runs=st.lists(run, min_size=1, max_size=30))
def test_the_words_are_ours_also_where_pauses_end_them(bundle, runs):
    vocabulary, text = bundle
    log_probs = scores([label for label, count in runs for _ in range(count)], len(PIECES))
    assert text(log_probs) == transcribed(vocabulary, log_probs)


def test_a_pause_of_seven_tenths_of_a_second_ends_a_word(tmp_path):
    vocabulary, text = made(tmp_path, PIECES, "▁")
    for pause, expected in ((17, "therow"), (18, "the row")):
        log_probs = scores([2, *[3] * pause, 4, 5], len(PIECES))
        assert text(log_probs) == transcribed(vocabulary, log_probs) == expected


@pytest.mark.parametrize("separator", ["▁", None])
def test_bytes_become_their_character(tmp_path, separator):
    vocabulary, text = made(tmp_path, BYTES, separator)
    log_probs = scores([2, 9, 10, 4, 3, 3, 9, 10], len(BYTES))
    assert text(log_probs) == transcribed(vocabulary, log_probs) == "theöroö"
