"""An error of an object is placed where the value to blame was written."""

import pytest

from sbkit.recipe.arguments import parse_overrides
from sbkit.recipe.check import check

RECIPE = """
left_context: [32]
chunks: !new:sbkit.nn.chunks.Chunks
    sizes: [8, 16]
    left_context: !ref <left_context>
    whole: 0.1
    validate: 16
"""


def blamed(tmp_path, words, text=RECIPE):
    (tmp_path / "recipe.yaml").write_text(text)
    (error,) = check(tmp_path / "recipe.yaml", parse_overrides(words.split("|") if words else [])).errors
    return error.where.replace(f"{tmp_path}/", ""), error.key


@pytest.mark.parametrize(("words", "key"), [
    ("--chunks.whole|1.5", "chunks.whole"), ("--chunks.sizes|[8, 30]", "chunks.sizes"),
    ("--chunks.left_context|[50]", "chunks.left_context"), ("--chunks.validate|12", "chunks.validate"),
    ("--left_context|[50]", "left_context"), ("--chunks.size|8", "chunks.size"),
    ("--chunks.left_context|[50]|--chunks.sizes|[8, 30]|--chunks.validate|8", "chunks")])
def test_what_the_command_line_gave_is_blamed_there(tmp_path, words, key):
    assert blamed(tmp_path, words) == ("command line", key)


@pytest.mark.parametrize(("written", "instead", "line", "key"), [
    ("whole: 0.1", "whole: 1.5", 6, "chunks.whole"), ("validate: 16", "validate: 12", 3, "chunks"),
    ("[32]", "[50]", 3, "chunks")])
def test_what_the_recipe_says_is_blamed_in_it(tmp_path, written, instead, line, key):
    assert blamed(tmp_path, "", RECIPE.replace(written, instead)) == (f"recipe.yaml:{line}", key)


def test_what_a_recipe_gives_to_the_one_it_is_based_on_is_blamed_in_it(tmp_path):
    (tmp_path / "base.yaml").write_text(RECIPE)
    text = "recipe: !include:base.yaml\n    chunks:\n        validate: 12\n"
    where, key = blamed(tmp_path, "", text)
    assert (where.partition(":")[0], key) == ("recipe.yaml", "chunks.validate")


def test_an_object_that_another_file_builds_is_not_to_blame_for_who_refers_to_it(tmp_path):
    (tmp_path / "base.yaml").write_text("layer: !new:torch.nn.ReLU\n")
    text = ("recipe: !include:base.yaml\n    normed: !apply:torch.nn.utils.parametrizations.weight_norm\n"
            "        module: !ref <layer>\n")
    assert blamed(tmp_path, "", text) == ("recipe.yaml:2", "normed")


def test_a_recipe_told_to_freeze_everything_on_the_command_line_is_told_so_there(tmp_path):
    (tmp_path / "model.yaml").write_text("""
freeze: {}
brain: !name:sbkit.tasks.ctc.CTC
layer: !new:torch.nn.Linear [3, 3]
modules: {layer: !ref <layer>}
""")
    report = check(tmp_path / "model.yaml", parse_overrides(["--freeze", "{'*': true}"]))
    assert [error.where for error in report.errors if error.key == "freeze"] == ["command line"]
