"""Keys that build an object when it is read, for what is done before the model is built."""

from pathlib import Path

import pytest
import torch
from refusals import refused

from sbkit.data.corpus import Corpus
from sbkit.data.tokens import Tokenizer
from sbkit.recipe import load
from sbkit.recipe.on_demand import keys_on_demand

SMALL = Path(__file__).with_name("small.yaml")
COUNTED = f"!new:{__name__}.Counted"


class Counted(torch.nn.Linear):
    """A layer that counts how many were built."""

    built = 0

    def __init__(self):
        super().__init__(16, 20)
        Counted.built += 1


class Failing:
    """An object that can't be built."""

    def __init__(self):
        raise ValueError("no such thing")


def keys_of(tmp_path, text="", **overrides):
    """The keys of a recipe that is based on the small one."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: !include:{SMALL}\n    output_folder: {tmp_path / 'run'}\n{text}")
    return keys_on_demand(path, overrides, load.resolved(path, overrides))


def test_builds_only_what_is_read(tmp_path):
    Counted.built = 0
    keys = keys_of(tmp_path, f"    ctc_lin: {COUNTED}\n")
    assert isinstance(vars(keys)["corpus"], Corpus) and "tokenizer" not in vars(keys)

    assert isinstance(keys.tokenizer, Tokenizer) and keys.tokenizer is keys.tokenizer
    assert keys.checkpointer.list_checkpoints() == [] and Path(keys.checkpointer.checkpoints_dir).is_dir()
    assert Counted.built == 0

    assert keys.ctc_lin is keys.modules["model"][3] and Counted.built == 1


def test_a_key_with_a_default_is_the_recipes_and_not_the_default(tmp_path):
    keys = keys_of(tmp_path)
    assert "normalize" not in vars(keys) and keys.normalize.norm_type == "sentence"
    assert keys.spec_augment is None, "the recipe has none"


def test_methods_of_the_keys_read_what_they_need(tmp_path):
    keys = keys_of(tmp_path, "    nonspeech: !new:sbkit.data.nonspeech.NonSpeech\n")
    assert keys.folder == tmp_path / "run" and isinstance(keys, keys.brain.Keys)
    assert keys.nonspeech is not None


@pytest.mark.parametrize("text, code, key", [
    ("    ctc_weight: 2\n", "setting", "ctc_weight"), ("    corpus: null\n", "missing-key", "corpus"),
    ("    checkpointer: null\n", "missing-key", "checkpointer"),
])
def test_wrong_values_are_refused_before_anything_is_built(tmp_path, text, code, key):
    with refused(code, key=key, line=3):
        keys_of(tmp_path, text)


def test_an_object_that_cannot_be_built_is_an_error_with_its_recipe(tmp_path):
    keys = keys_of(tmp_path, f"    augment: !new:{__name__}.Failing\n")
    with refused("not-built"):
        assert keys.augment
