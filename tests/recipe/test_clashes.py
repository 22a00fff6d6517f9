"""Keys that are right by themselves and wrong together are refused wherever a recipe becomes a Brain."""


import pytest
import torch
from refusals import refused
from written import BASED, write

from sbkit.recipe import load
from sbkit.recipe.check import check
from sbkit.tasks.ctc.keys import CTCKeys

TWO = f"{BASED}    seed: 2\n\nencoder: !new:torch.nn.Identity\n"


@pytest.fixture
def two(tmp_path):
    """A recipe with an encoder of its own beside the Transformer of the one it rests on."""
    return write(tmp_path, TWO)


def test_two_encoders_are_refused_at_load_with_file_and_line(two, tmp_path):
    with refused("clash") as error:
        load.open_recipe(two, {"output_folder": str(tmp_path)})
    assert str(error.value) == (
        f"{two}:4: encoder: Transformer and encoder are both set, but a recogniser has one encoder; "
        "write Transformer: null, or leave encoder out")


def test_and_where_a_script_makes_the_brain(two, tmp_path):
    made = load.load(two, {"output_folder": str(tmp_path)})
    with refused("clash"):
        made["brain"](made["modules"], hparams=made, run_opts={"device": "cpu"})


def test_one_encoder_under_both_names_is_one(two, tmp_path):
    two.write_text(TWO.replace("encoder: !new:torch.nn.Identity", "encoder: !ref <Transformer>")
                   .replace("\n\nencoder", "\n    encoder"))
    assert load.open_recipe(two, {"output_folder": str(tmp_path)}).keys.encoder_key == "Transformer"


@pytest.mark.parametrize("given, key", [
    ({"Transformer": torch.nn.Identity()}, "Transformer"), ({"encoder": torch.nn.Identity()}, "encoder"),
    ({"Transformer": None, "encoder": torch.nn.Identity()}, "encoder")])
def test_an_encoder_has_either_name(given, key):
    keys = CTCKeys.read({"compute_features": torch.nn.Identity(), **given})
    assert list(keys.clashes()) == [] and keys.encoder_key == key


def test_a_search_of_transducers_is_none_of_ctc(tmp_path):
    path = write(tmp_path, f"{BASED}    seed: 2\n\ndecoder: !new:sbkit.decode.transducer_beam.TransducerBeam\n")
    with refused("clash") as error:
        load.open_recipe(path, {"output_folder": str(tmp_path)})
    assert str(error.value) == (
        f"{path}:4: decoder: it is a TransducerBeam, which searches the outputs of a transducer, but this is CTC; "
        "write !new:sbkit.decode.beam.BeamSearch, or decoder: null")


def test_all_that_a_load_refuses_is_told_with_its_line(tmp_path):
    needed = ("corpus", "batching", "epoch_counter", "checkpointer")
    nulls = "".join(f"    {key}: null\n" for key in needed)
    path = write(tmp_path, f"{BASED}    ctc_weight: 0\n    n_mels: 40\n{nulls}label_smoothing: 2\n")
    with refused("bad-value", key="ctc_weight") as error:
        load.open_recipe(path, {"output_folder": str(tmp_path)})
    wrong, hint = str(error.value).rsplit("; docs/reference/", 1)
    assert set(wrong.split("; ")) == {
        f"{path}:2: ctc_weight is 0, and must be a number above 0, up to 1",
        f"{path}:8: label_smoothing is 2, and must be a number from 0 to 1",
        *(f"{path}:{line}: {key} is null, and a run needs it" for line, key in enumerate(needed, 4))}
    assert hint == "keys.md says what each key may be; hparams/ has a complete recipe for each task"


def test_a_wrong_value_for_an_included_recipe_is_told_where_it_stands(tmp_path):
    path = write(tmp_path, f'{BASED}    seed: 2\n    d_model: "16"\n')
    assert [(finding.key, finding.file, finding.line) for finding in check(path, run=False).errors] == [
        ("Transformer.d_model", str(path), 3)]
