"""A pretrained encoder is taken from a run that has the same, and kept as pretrained where the run has another."""

from __future__ import annotations

from pathlib import Path

import encoders
import pytest
import torch
from run_folders import run_with_model
from starts import lines_of, started, state, target

from sbkit.errors import SbkitError
from sbkit.nn.pretrained import Encoder
from sbkit.recipe.check import check
from sbkit.runs import initial

RECIPE = Path(__file__).parents[3] / "hparams" / "ssl.yaml"
TINY = {"num_workers": 0, "least_steps": 0}


@pytest.fixture(scope="module")
def run(english, tmp_path_factory):
    """A run with a layer-normed wav2vec 2.0."""
    home = tmp_path_factory.mktemp("encoders")
    encoders.make(home / "source", "wav2vec2-layer")
    made = run_with_model(home / "run", english, rates=(40.0,), recipe=RECIPE, tiny=TINY,
                          encoder_source=str(home / "source"))
    Encoder(str(home / "source"), made / "save").keep()
    return made


@pytest.fixture(scope="module")
def lone_head(run):
    """A file with nothing but the head of that run."""
    (path,) = run.glob("save/*epoch1*/model.ckpt")
    torch.save({f"ctc_lin{name[1:]}": value for name, value in torch.load(path, weights_only=True).items()
                if name.startswith("1.")}, run.parent / "head.ckpt")
    return run.parent / "head.ckpt"


def begun(tmp_path, english, kind, run, caplog, more=None, **keys):
    """A Brain with its pretrained weights before and after it took those of the run, and the rows of the table."""
    source = encoders.make(tmp_path / "other", kind, seed=1, **(more or {}))
    brain, before, table = started(tmp_path / "new", english, caplog, RECIPE, TINY, encoder_source=str(source),
                                   init_from=str(run), **keys)
    return before, state(brain), lines_of(table)


def errors(tmp_path, run, **keys):
    return check(RECIPE, {**TINY, "output_folder": str(tmp_path / "new"), "encoder_source": str(tmp_path / "other"),
                          "init_from": str(run), **keys}, starting=True).errors


@pytest.mark.slow
@pytest.mark.parametrize("kind, fields", [
    ("whisper", "model_type: wav2vec2 there, whisper here"),
    ("hubert-group", "model_type: wav2vec2 there, hubert here, feat_extract_norm: layer there, group here, "
                     "do_stable_layer_norm: True there, False here"),
    ("wav2vec2-group", "feat_extract_norm: layer there, group here"),
])
def test_another_encoder_is_refused_in_the_check_and_at_the_start(english, run, tmp_path, caplog, kind, fields):
    with pytest.raises(SbkitError, match=r"encoder of the run .* is another pretrained encoder") as raised:
        begun(tmp_path, english, kind, run, caplog)
    assert fields in raised.value.message and raised.value.hint.endswith('--init_leave "[encoder]"')
    (error,) = errors(tmp_path, run)
    assert (error.code, error.key) == ("start", "init_from") and fields in error.message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whisper", "hubert-group"])
def test_another_encoder_that_is_left_out_is_kept_as_pretrained(english, run, tmp_path, caplog, kind):
    before, after, rows = begun(tmp_path, english, kind, run, caplog, init_leave=["encoder"], mask_time_prob=0)
    kept = [name for name in before if name.startswith("model.0.")]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    assert not torch.equal(before["model.1.weight"], after["model.1.weight"])
    assert [row for row in rows if row.endswith(" kept as pretrained: init_leave")]
    assert not [row for row in rows if "reinitialised" in row]
    assert not errors(tmp_path, run, init_leave=["encoder"])


def test_what_a_source_lacks_is_kept_as_pretrained(english, lone_head, tmp_path, caplog):
    _, _, rows = begun(tmp_path, english, "whisper", lone_head, caplog, mask_time_prob=0)
    assert "kept as pretrained: not in the source" in rows[3] and rows[3].startswith("encoder ")
    assert not [row for row in rows if "reinitialised" in row]


def test_what_pretraining_did_not_have_is_reinitialised(english, lone_head, tmp_path):
    made = encoders.make(tmp_path / "other", "wav2vec2-layer")
    tensors = encoders.start(made, "wav2vec2-layer")
    del tensors["masked_spec_embed"]
    (made / "model.safetensors").unlink()
    torch.save(tensors, made / "pytorch_model.bin")
    brain = target(tmp_path / "new", english, RECIPE, TINY, encoder_source=str(made), init_from=str(lone_head))
    _, fates = initial.check(brain.keys, brain)
    told = {fate.name: (fate.what, fate.why) for fate in fates}
    assert told["encoder.network.masked_spec_embed"] == ("reinitialised", "not in the source")
    assert told["encoder.network.encoder.layer_norm.weight"] == ("kept", "as pretrained: not in the source")


@pytest.mark.slow
def test_an_encoder_that_differs_in_nothing_but_training_is_the_same(english, run, tmp_path, caplog):
    more = {"hidden_dropout": 0.3, "attention_dropout": 0.2, "mask_time_prob": 0.4, "layerdrop": 0.0, "vocab_size": 77,
            "num_negatives": 3, "initializer_range": 0.5}
    source = tmp_path / "other"
    before, after, rows = begun(tmp_path, english, "wav2vec2-layer", run, caplog, more=more)
    encoders.change(source, _name_or_path="elsewhere", transformers_version="4.0.0", torch_dtype="float16",
                    architectures=["Wav2Vec2ForCTC"])
    assert not errors(tmp_path, run)
    (path,) = run.glob("save/*epoch1*/model.ckpt")
    assert all(torch.equal(value, after[f"model.{name}"]) for name, value in
               torch.load(path, weights_only=True).items())
    assert not torch.equal(before["model.1.weight"], after["model.1.weight"]) and not any("kept" in row for row in rows)
