"""The stages of a run: what preparing gives to the ones after it."""

import pytest
from corpora import common_voice

from sbkit.data.corpus import Corpus
from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.runs.preparation import prepare_data
from sbkit.tasks.ctc import CTC

NEEDED = 3 + len({*"▁" "aben"})  # blank, bos, eos, and what TEXT is made of
TEXT = ["Eben an.", "Nabe"]


@pytest.fixture
def hparams(tmp_path):
    release = common_voice(tmp_path / "release", train=TEXT, dev=["Na"], test=["Nein"])
    return {"brain": CTC, "corpus": Corpus(release, folder=tmp_path / "manifests"), "output_neurons": 28,
            "tokenizer": Tokenizer(tmp_path / "save", 28, "char")}


def prepared(hparams, given):
    return prepare_data(CTC.Keys.read(hparams), given, None)


def test_a_vocabulary_of_characters_follows_from_the_corpus(hparams, capsys):
    assert prepared(hparams, {}) == {"output_neurons": NEEDED}
    assert f"output_neurons: {NEEDED}, the number of characters in this corpus (the recipe has 28)" in (
        capsys.readouterr().err)
    assert hparams["tokenizer"].load().size == NEEDED
    again = hparams | {"output_neurons": NEEDED, "tokenizer": Tokenizer(hparams["tokenizer"].folder, NEEDED, "char")}
    assert prepared(again, {"output_neurons": NEEDED}) == {}
    resumed = hparams | {"tokenizer": Tokenizer(hparams["tokenizer"].folder, 28, "char")}
    assert prepared(resumed, {}) == {"output_neurons": NEEDED}


@pytest.mark.parametrize("change", ["on the command line", "not the tokenizer's"])
def test_a_number_that_is_meant_is_not_changed(hparams, change):
    overrides = {"output_neurons": 28} if change == "on the command line" else {}
    if not overrides:
        hparams["output_neurons"] = 30
    with pytest.raises(SbkitError, match=rf"exactly {NEEDED} entries; set output_neurons \(.*\) to {NEEDED}"):
        prepared(hparams, overrides)
