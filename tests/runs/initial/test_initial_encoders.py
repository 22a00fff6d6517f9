"""A run's encoder is enough to start from: neither the pretrained one nor its name need be there. It is taken where the
run has the same, and kept as pretrained where it has another.
"""

from __future__ import annotations

from pathlib import Path

import encoders
import pytest
import torch
from refusals import refused
from run_folders import run_with_model
from safetensors.torch import load_file, save_file
from starts import lines_of, started, state, target

from sbkit.errors import SbkitError
from sbkit.nn.pretrained import Encoder
from sbkit.recipe.check import check
from sbkit.recipe.load import Recipe
from sbkit.runs import initial, pretrained
from sbkit.runs.restore import load_run

pytestmark = pytest.mark.slow  # each takes a fraction of a second, and there are many

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "hparams" / "finetune.yaml"
LORA = ROOT / "recipes" / "CommonVoice" / "ASR" / "CTC" / "hparams" / "lora.yaml"
TINY = {"num_workers": 0, "min_steps": 0}


def kept(folder, data, recipe=RECIPE, **keys):
    """A run as training leaves it, with its encoder's config."""
    made = run_with_model(folder, data, rates=(40.0,), recipe=recipe, tiny=TINY, **keys)
    options = {"init_from": keys["init_from"]} if "init_from" in keys else {}
    Encoder(keys.get("encoder_source"), made / "save", **options).keep()
    return made


@pytest.fixture(scope="module")
def home(english, tmp_path_factory):
    """A folder with runs of an encoder that is gone; it is in ``away`` now."""
    folder = tmp_path_factory.mktemp("without")
    source = str(encoders.make(folder / "source", "wav2vec2-layer"))
    kept(folder / "run", english, encoder_source=source)
    kept(folder / "half", english, encoder_source=source, encoder_layers=1, mask_time_prob=0)
    kept(folder / "lora", english, LORA, encoder_source=source, language="en", precision="fp32")
    Path(source).rename(folder / "away")
    return folder


@pytest.fixture(scope="module")
def run(home):
    return home / "run"


def begun(folder, data, run, recipe=RECIPE, **keys):
    """The Brain of a run that has begun, as ``sbkit train`` does it."""
    brain = target(folder, data, recipe, TINY, init_from=str(run), **keys)
    pretrained.load(brain.keys.pretrainer, initial.filled(Recipe(vars(brain.hparams), brain.keys, None)))
    initial.load(brain)
    return brain


def weights(run):
    (path,) = run.glob("save/*epoch1*/model.ckpt")
    return torch.load(path, weights_only=True)


def is_all_of(brain, run):
    mine = state(brain)
    return all(torch.equal(value, mine[f"model.{name}"]) for name, value in weights(run).items())


@pytest.mark.parametrize("named", [True, False])
def test_a_run_begins_without_the_source_of_the_one_before(home, english, tmp_path, named):
    brain = begun(tmp_path, english, home / "run", encoder_source=str(home / "source") if named else None)
    assert is_all_of(brain, home / "run")
    assert Encoder(None, tmp_path / "save").source == str(home / "source"), "the new run has the config too"


@pytest.mark.parametrize("below", ["", "save", "save/*epoch1*", "save/*epoch1*/model.ckpt"])
def test_so_it_does_from_a_checkpoint_or_a_file_in_it(home, english, tmp_path, below):
    (there,) = (home / "run").glob(below) if below else [home / "run"]
    assert is_all_of(begun(tmp_path, english, there), home / "run")


def test_a_run_that_began_so_needs_neither_and_another_begins_from_it(home, english, tmp_path):
    first = home / "run"
    second = kept(tmp_path / "second", english, init_from=str(first))
    moved = first.rename(home / "moved")
    try:
        _, brain = load_run(second, "cpu")
        assert is_all_of(brain, second)
        assert is_all_of(begun(tmp_path / "third", english, second), second)
    finally:
        moved.rename(first)


def test_a_run_without_masking_lends_its_encoder_to_one_with(home, english, tmp_path):
    brain = begun(tmp_path, english, home / "half", encoder_layers=1)
    assert brain.hparams.encoder.network.masked_spec_embed.requires_grad


def test_lora_begins_on_a_run_and_a_run_on_lora(home, english, tmp_path):
    more = {"language": "en", "precision": "fp32", "encoder_source": None}
    assert is_all_of(begun(tmp_path / "lora", english, home / "run", LORA, **more), home / "run")
    assert begun(tmp_path / "on", english, home / "lora", LORA, **more).hparams.trained.base_hash() == \
        weights(home / "lora")["base"]
    begun(tmp_path / "whole", english, home / "lora")


@pytest.mark.parametrize("run, keys, why, first", [
    ("run", {"init_leave": ["encoder"]}, "init_leave", "feature_extractor.conv_layers.0.conv.weight"),
    ("half", {}, "the run .* lacks them", "encoder.layers.1.attention.k_proj.weight")])
def test_what_only_the_source_has_is_told_in_the_check_and_at_the_start(home, english, tmp_path, run, keys, why, first):
    said = rf"tensors of the pretrained encoder have to come from its source \({why}\), such as encoder.network.{first}"
    with pytest.raises(SbkitError, match=rf"{said}, and the pretrained source .*/source does not exist"):
        begun(tmp_path, english, home / run, **keys)
    (error,) = check(RECIPE, {**TINY, **keys, "output_folder": str(tmp_path), "init_from": str(home / run)},
                     starting=True).errors
    assert (error.code, error.key) == ("start", "init_from") and "have to come from its source" in error.message


def test_where_the_source_is_the_rest_comes_from_it(home, english, tmp_path):
    (home / "away").rename(home / "source")
    try:
        brain = begun(tmp_path, english, home / "half")
        start = encoders.start(home / "source", "wav2vec2-layer")
    finally:
        (home / "source").rename(home / "away")
    mine, name = state(brain), "encoder.layers.{}.attention.k_proj.weight"
    assert torch.equal(mine[f"model.0.network.{name.format(1)}"], start[name.format(1)])
    assert torch.equal(mine[f"model.0.network.{name.format(0)}"],
                       weights(home / "half")[f"0.network.{name.format(0)}"])


@pytest.mark.parametrize("start", [None, "nowhere"])
def test_without_either_it_says_what_to_give(tmp_path, start):
    error, *others = check(RECIPE, {"output_folder": str(tmp_path), "init_from": start}).errors
    assert [other.key for other in others] == ([] if start is None else ["init_from"])
    assert "source names no pretrained encoder" in error.message
    assert ("nowhere is no run" in error.message) == bool(start)
    assert "--encoder_source owner/name" in error.suggestion


def test_what_no_checkpoint_would_hold_is_not_taken(home, english, tmp_path):
    path = tmp_path / "head_alone.yaml"
    path.write_text(f"recipe: !include:{RECIPE}\n    freeze: {{encoder: true}}\n    checkpointer:\n"
                    "        recoverables:\n            model: !ref <ctc_lin>\n")
    with refused("unsaved-weights", key="init_from"):
        begun(tmp_path / "new", english, home / "run", path)


def language_adapter(source, language, value):
    model = load_file(Path(source) / "model.safetensors")
    layers = {name: torch.full_like(tensor, value) for name, tensor in model.items() if ".adapter_layer." in name}
    save_file(layers, Path(source) / f"adapter.{language}.safetensors")


def adapters_of(brain):
    return {float(value.unique()) for name, value in state(brain).items() if ".adapter_layer." in name}


def test_adapters_of_another_language_are_not_taken_in_its_place(english, tmp_path):
    source = str(encoders.make(tmp_path / "mms", "mms-adapters"))
    language_adapter(source, "fra", 7.0)
    language_adapter(source, "deu", 9.0)
    run = kept(tmp_path / "fra", english, encoder_source=source, adapter_language="fra")
    Encoder(source, run / "save", adapter_language="fra").keep()
    with refused("init-mismatch", key="init_from") as caught:
        begun(tmp_path / "refused", english, run, encoder_source=source, adapter_language="deu")
    leave = ["*.adapter_layer.*"]
    assert str(leave) in caught.value.hint
    brain = begun(tmp_path / "left", english, run, encoder_source=source, adapter_language="deu", init_leave=leave)
    assert adapters_of(brain) == {9.0}
    assert is_all_of(begun(tmp_path / "same", english, run, encoder_source=source, adapter_language="fra"), run)


@pytest.mark.parametrize("code", ["../../x", False, 12])
def test_what_is_no_code_of_a_language_is_refused_without_a_source_too(home, tmp_path, code):
    with pytest.raises(SbkitError, match="no language code"):
        Encoder(None, init_from=home / "run", adapter_language=code)


@pytest.mark.parametrize("content", ["{}", '{"source": "x"}', '{"a": 1, "b": 2}', "[]", '{"source": 1, "config": []}',
                                     '{"source": "x", "config": [], "preprocessor": {}}'])
def test_a_file_of_the_same_name_is_not_taken_for_an_encoders(tmp_path, content):
    (tmp_path / "encoder.json").write_text(content)
    with pytest.raises(SbkitError):
        Encoder(None, init_from=tmp_path)


def test_a_copy_of_an_earlier_start_does_not_outlast_another_init_from(home, english, tmp_path):
    other = kept(tmp_path / "other", english, encoder_source=str(encoders.make(tmp_path / "hubert", "hubert-group")))
    folder = tmp_path / "new"
    Encoder(None, folder, init_from=home / "run").keep()
    assert Encoder(None, folder, init_from=other).settings.config["model_type"] == "hubert"
    (folder / "CKPT+x").mkdir()
    assert Encoder(None, folder, init_from=other).settings.config["model_type"] == "wav2vec2"


# ------------------------------------------------------------------ another encoder


@pytest.fixture(scope="module")
def lone_head(run):
    """A file with nothing but the head of that run."""
    torch.save({f"ctc_lin{name[1:]}": value for name, value in weights(run).items() if name.startswith("1.")},
               run.parent / "head.ckpt")
    return run.parent / "head.ckpt"


def begun_other(tmp_path, english, kind, run, caplog, more=None, **keys):
    """A Brain with its pretrained weights before and after it took those of the run, and the rows of the table."""
    source = encoders.make(tmp_path / "other", kind, seed=1, **(more or {}))
    brain, before, table = started(tmp_path / "new", english, caplog, RECIPE, TINY, encoder_source=str(source),
                                   init_from=str(run), **keys)
    return before, state(brain), lines_of(table)


def errors(tmp_path, run, **keys):
    return check(RECIPE, {**TINY, "output_folder": str(tmp_path / "new"), "encoder_source": str(tmp_path / "other"),
                          "init_from": str(run), **keys}, starting=True).errors


@pytest.mark.parametrize("kind, fields", [
    ("whisper", "model_type: wav2vec2 there, whisper here"),
    ("hubert-group", "model_type: wav2vec2 there, hubert here, feat_extract_norm: layer there, group here, "
                     "do_stable_layer_norm: True there, False here"),
    ("wav2vec2-group", "feat_extract_norm: layer there, group here"),
])
def test_another_encoder_is_refused_in_the_check_and_at_the_start(english, run, tmp_path, caplog, kind, fields):
    with refused("init-mismatch", key="init_from") as raised:
        begun_other(tmp_path, english, kind, run, caplog)
    assert fields in raised.value.message and raised.value.hint.endswith('--init_leave "[encoder]"')
    (error,) = errors(tmp_path, run)
    assert (error.code, error.key) == ("start", "init_from") and fields in error.message


@pytest.mark.parametrize("kind", ["whisper", "hubert-group"])
def test_another_encoder_that_is_left_out_is_kept_as_pretrained(english, run, tmp_path, caplog, kind):
    before, after, rows = begun_other(tmp_path, english, kind, run, caplog, init_leave=["encoder"], mask_time_prob=0)
    kept = [name for name in before if name.startswith("model.0.")]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    assert not torch.equal(before["model.1.weight"], after["model.1.weight"])
    assert [row for row in rows if row.endswith(" kept as pretrained: init_leave")]
    assert not [row for row in rows if "reinitialised" in row]
    assert not errors(tmp_path, run, init_leave=["encoder"])


def test_what_a_source_lacks_is_kept_as_pretrained(english, lone_head, tmp_path, caplog):
    _, _, rows = begun_other(tmp_path, english, "whisper", lone_head, caplog, mask_time_prob=0)
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


def test_an_encoder_that_differs_in_nothing_but_training_is_the_same(english, run, tmp_path, caplog):
    more = {"hidden_dropout": 0.3, "attention_dropout": 0.2, "mask_time_prob": 0.4, "layerdrop": 0.0, "vocab_size": 77,
            "num_negatives": 3, "initializer_range": 0.5}
    source = tmp_path / "other"
    before, after, rows = begun_other(tmp_path, english, "wav2vec2-layer", run, caplog, more=more)
    encoders.change(source, _name_or_path="elsewhere", transformers_version="4.0.0", torch_dtype="float16",
                    architectures=["Wav2Vec2ForCTC"])
    assert not errors(tmp_path, run)
    assert all(torch.equal(value, after[f"model.{name}"]) for name, value in weights(run).items())
    assert not torch.equal(before["model.1.weight"], after["model.1.weight"]) and not any("kept" in row for row in rows)
