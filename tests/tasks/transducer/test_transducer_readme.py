"""The README of a transducer's bundle shows other programs how to come from states to the words that sbkit says."""

import re

import bundles
import numpy as np
import pytest

import sbkit.infer
from sbkit.tasks.transducer import readme


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundles.make_transducer(tmp_path_factory.mktemp("readme") / "bundle", streams=False)


@pytest.mark.parametrize("pause, expected", [(17, "day youzap x"), (18, "day you zap x")])
def test_the_words_are_ours_also_where_a_pause_ends_one(bundle, monkeypatch, pause, expected):
    """The second sentence's first word has no mark. A token is said in the first of its two frames; a blank follows."""
    second = bundles.spell("zap x")[3:]
    signal = bundles.voiced([*bundles.spell("day you"), *[0] * (pause - 2), *second])
    with sbkit.infer.load(bundle, device="cpu") as model:
        transcript, config = model.transcribe(signal).text, model.engine.config
        [states] = model.engine.run([signal])
        block, = re.findall(r"```python\n(.*?)```", readme.words(config, model.engine.vocabulary.symbols), re.S)
    monkeypatch.chdir(bundle)
    shown = {}
    exec(block, shown)
    assert shown["text"](np.asarray(states)) == transcript == expected
