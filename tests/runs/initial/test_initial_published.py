"""A run starts from a CTC model that others have published, with its head."""

from __future__ import annotations

from pathlib import Path

import encoders
import published
import pytest
import speechbrain_models
import torch
import transformers
from refusals import refused
from starts import lines_of, spanish, started, target

from sbkit.errors import SbkitError
from sbkit.nn.pretrained import Encoder
from sbkit.recipe.check import check
from sbkit.runs import initial
from sbkit.runs.initial import published as sources
from sbkit.score.metric import Metric
from sbkit.score.weights import ChosenWeights

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[3] / "hparams" / "finetune.yaml"
TINY = {"num_workers": 0, "min_steps": 0, "head_kernel": 0}
SMALL = [letter.lower() if len(letter) == 1 else letter for letter in published.LETTERS]


def begun(tmp_path, data, model, caplog, **keys):
    """A Brain that took what the model has, that model, and the rows of the table."""
    brain, _, table = started(tmp_path / "new", data, caplog, RECIPE, TINY, init_from=str(model), **keys)
    return brain, transformers.AutoModelForCTC.from_pretrained(model), lines_of(table)


@pytest.mark.parametrize("letters", [SMALL, published.LETTERS], ids=["small", "capitals"])
def test_rows_of_equal_tokens_are_taken_and_the_whole_encoder(english, tmp_path, caplog, letters):
    """No encoder_source is named, and the case of a vocabulary of capitals doesn't count."""
    model = published.make(tmp_path / "model", letters=letters)
    brain, own, table = begun(tmp_path, english, model, caplog)
    pieces, head, ids = brain.keys.tokenizer.pieces(), brain.keys.ctc_lin, dict(zip(SMALL, range(32), strict=True))
    assert len(pieces) > 10
    for row, piece in enumerate(pieces):
        there = ids[{"▁": "|", "<unk>": "<pad>"}.get(piece, piece)]
        torch.testing.assert_close(head.weight[row], own.lm_head.weight[there], rtol=0, atol=0)
        torch.testing.assert_close(head.bias[row], own.lm_head.bias[there], rtol=0, atol=0)
    encoder = brain.keys.encoder.network.encoder
    torch.testing.assert_close(encoder.layer_norm.weight, own.wav2vec2.encoder.layer_norm.weight, rtol=0, atol=0)
    assert any(f"for all {len(pieces)} tokens" in row for row in table)
    assert "layerdrop is 0 instead of the config's 0.1: no layer is skipped" in table


def test_tokens_that_it_lacks_are_reinitialised(tmp_path, caplog):
    model = published.make(tmp_path / "model", letters=SMALL)
    brain, _, table = begun(tmp_path, spanish(tmp_path / "data", train=6, dev=2, test=2), model, caplog)
    own = {*brain.keys.tokenizer.pieces()} - {"▁", "<unk>"}
    assert own - {*SMALL} == {"ñ"} and any("1 are reinitialised" in row for row in table)


@pytest.mark.parametrize("letters", [SMALL, [*SMALL[3:], *SMALL[:3]], ["<pad>", *SMALL[4:]]],
                         ids=["first", "last", "no ends"])
def test_its_tokenizer_may_be_kept(english, tmp_path, caplog, letters):
    """Whatever its blank's place, and also where it has no ends of a sentence."""
    model = published.make(tmp_path / "model", letters=letters, **(
        {} if "<s>" in letters else {"bos_token": None, "eos_token": None, "unk_token": "<pad>"}))
    brain, own, table = begun(tmp_path, english, model, caplog, init_tokenizer="keep")
    keys, blank = brain.keys, letters.index("<pad>")
    order = [blank, *(place for place in range(len(letters)) if place != blank)]
    torch.testing.assert_close(keys.ctc_lin.weight, own.lm_head.weight[order], rtol=0, atol=0)
    assert keys.output_neurons == len(letters) and keys.blank_index == 0
    assert (keys.bos_index is None) == ("<s>" not in letters)
    text = "a low test"
    assert keys.tokenizer.decode(keys.tokenizer.encode(text)) == text
    assert any(f"for all {len(letters)} tokens" in row for row in table)


@pytest.mark.slow
def test_the_check_shows_what_will_be_taken_and_what_can_not(english, tmp_path):
    model = published.make(tmp_path / "model", letters=SMALL)
    keys = {**TINY, "output_folder": str(tmp_path / "new"), "data_folder": str(english), "init_from": str(model)}
    report = check(RECIPE, keys, starting=True)
    assert not report.errors and report.sections["start"].values["from"] == f"the CTC model {model}"
    published.tokenizer(model, "wav2vec2", SMALL[:-1])
    (error,) = check(RECIPE, keys, starting=True).errors
    assert error.key == "init_from" and "doesn't fit its head" in error.message
    with pytest.raises(SbkitError, match="doesn't fit its head"):
        begun(tmp_path, english, model, None, init_tokenizer="keep")


@pytest.mark.slow
def test_layers_between_encoder_and_head_are_taken_too_or_the_head_is_refused(english, tmp_path, caplog):
    model = published.make(tmp_path / "model", "w2v-bert", SMALL)
    with pytest.raises(SbkitError, match="has layers between encoder and head, but add_adapter is false") as raised:
        begun(tmp_path, english, model, caplog)
    assert raised.value.hint == "--encoder.add_adapter true"
    brain, own, _ = begun(tmp_path, english, model, caplog, encoder={"add_adapter": True})
    keys = {**TINY, "output_folder": str(tmp_path / "other"), "data_folder": str(english), "init_from": str(model)}
    assert not check(RECIPE, {**keys, "encoder": {"add_adapter": True}}, starting=True).errors, "a frame takes 80 ms"
    for name, value in own.wav2vec2_bert.adapter.state_dict().items():
        torch.testing.assert_close(brain.keys.encoder.network.adapter.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("kind, wrapper, named", [
    ("wav2vec2-layer", "wav2vec2.Wav2Vec2", "."), ("hubert-layer", "hubert.HuBERT", "wav2vec2.ckpt"),
    ("wavlm-layer", "wavlm.WavLM", "."), ("hubert-layer", "wav2vec2.Wav2Vec2", ".")])
def test_of_a_model_of_speechbrains_the_encoder_that_it_wraps_is_taken(english, tmp_path, named, kind, wrapper):
    """Its kind is what its config says: SpeechBrain's Wav2Vec2 takes a HuBERT too."""
    theirs, source = (encoders.make(tmp_path / f"{seed}", kind, seed=seed) for seed in (1, 2))
    model = speechbrain_models.make(tmp_path / "model", pretrained=theirs, wrapper=wrapper)
    held = torch.load(model / "wav2vec2.ckpt")
    for now, once in (("parametrizations.weight.original0", "weight_g"), ("parametrizations.weight.original1",
                                                                           "weight_v")):  # as an older torch wrote it
        held = {name.replace(now, once): value for name, value in held.items()}
    assert any(name.endswith("weight_g") for name in held)
    torch.save(held, model / "wav2vec2.ckpt")
    brain = target(tmp_path / "new", english, RECIPE, TINY, init_from=str(model / named), encoder_source=str(source))
    initial.load(brain)
    expected, found = Encoder(str(theirs)), brain.keys.encoder.network.state_dict()
    expected.load()
    for name, value in expected.network.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("here", ["hubert-layer", "wav2vec2-group"])
def test_an_encoder_of_another_kind_in_speechbrains_wrapper_is_refused(english, tmp_path, here):
    model = speechbrain_models.make(tmp_path / "model", pretrained=encoders.make(tmp_path / "1", "wav2vec2-layer"))
    with refused("init-mismatch", key="init_from"):
        initial.load(target(tmp_path / "new", english, RECIPE, TINY, init_from=str(model),
                            encoder_source=str(encoders.make(tmp_path / "2", here))))


def test_an_encoder_whose_head_is_left_out_says_how_to_take_it(tmp_path):
    model = published.make(tmp_path / "model")
    assert f"--init_from {model} loads its CTC head and its tokens too" in Encoder(str(model)).check_source()[1]
    with pytest.raises(SbkitError, match="has no layers between encoder and head, but add_adapter is true"):
        Encoder(str(model), add_adapter=True)


def test_a_name_beside_folders_that_are_here_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "first").mkdir(parents=True)
    with refused("no-such-path", key="init_from", file="results/frist"):
        sources.find("results/frist", ChosenWeights(), Metric("WER"))


def test_a_head_is_taken_with_its_convolution_or_not_at_all(english, tmp_path, caplog):
    model = published.make(tmp_path / "model", letters=SMALL)
    with refused("init-mismatch", key="init_from"):
        begun(tmp_path, english, model, caplog, head_kernel=5)
    _, _, table = begun(tmp_path, english, model, caplog, head_kernel=5, init_leave=["ctc_lin"])
    assert any(row.startswith("ctc_lin ") and "reinitialised init_leave" in row for row in table)
