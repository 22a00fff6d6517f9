"""The bundle's README shows other programs how to come from log-probabilities to the words that sbkit says."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbkit.export.layout import TOKENS, Config
from sbkit.export.vocabulary import Vocabulary, write_tokens
from sbkit.infer.decoding import Greedy
from sbkit.tasks.ctc import readme

PIECES = ["<s>", "▁", "▁the", "<blk>", "ro", "w", "<unk>", "</s>", "▁a"]


@pytest.fixture(scope="module", params=["▁", None])
def bundle(request, tmp_path_factory):
    """A configuration, and what its README makes of log-probabilities."""
    folder = tmp_path_factory.mktemp("bundle")
    config = Config(sample_rate=16_000, hop_samples=160, subsampling=4, vocabulary=len(PIECES), language="en",
                    blank_id=3, silent_ids=[0, 7], word_separator=request.param, models={"onnx": "model.onnx"})
    write_tokens(folder / TOKENS, PIECES, config.blank_id)
    block, = re.findall(r"```python\n(.*?)```", readme.words(config), re.S)
    shown = {}
    exec(block.replace(TOKENS, str(folder / TOKENS)), shown)
    return config, shown["text"]


@given(labels=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30))
def test_the_words_are_ours(bundle, labels):
    config, text = bundle
    log_probs = np.log(np.full((len(labels), len(PIECES)), 0.01, np.float32))
    log_probs[np.arange(len(labels)), labels] = -0.01
    vocabulary = Vocabulary(PIECES, config)
    decoder = Greedy(vocabulary)
    [[found]] = decoder.tokens([[decoder.keep(log_probs)]])
    assert text(log_probs) == vocabulary.text(vocabulary.spelling.words(found.spans))
