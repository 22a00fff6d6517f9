"""Rows of a vocabulary by what they stand for, and a table that says what became of a model in a few lines."""

import pytest

from sbkit.runs.initial.loading import collapsed, text
from sbkit.runs.initial.matching import LEFT, REINITIALISED, TAKEN, ParameterOutcome
from sbkit.runs.initial.source import TokenRows


@pytest.mark.parametrize("own, there, rows", [
    ((["<unk>", "<s>", "</s>", "▁", "ñ", "a"], {"blank": 0, "bos": 1, "eos": 2}),
     (["a", "b", "<blank>", "▁", "end", "start"], {"blank": 2, "eos": 4, "bos": 5}), [2, 5, 4, 3, -1, 0]),
    ((["_", "<s>", "a"], {"blank": 0, "bos": 1}), (["_", "<s>", "a"], {"blank": 0}), [0, -1, 2]),
    ((["_", "end"], {"blank": 0}), (["_", "end"], {"blank": 0, "eos": 1}), [0, -1])])
def test_equal_pieces_have_equal_rows_and_parts_go_by_their_part_alone(own, there, rows):
    assert TokenRows(*own).rows_in(TokenRows(*there)) == rows


def layers(what, *numbers):
    return [ParameterOutcome(f"encoder.layers.{i}.{name}", 3, what) for i in numbers for name in ("norm.weight",
                                                                                                  "norm.bias")]


def test_whole_modules_and_layers_in_a_row_are_one_line():
    fates = [ParameterOutcome("CNN.conv.weight", 4, TAKEN), ParameterOutcome("CNN.conv.bias", 1, TAKEN),
             *layers(TAKEN, 0, 1, 2),
             *layers(REINITIALISED, 3, 4),
             ParameterOutcome("head.weight", 2, TAKEN, "for 3 of 4 tokens, 1 are reinitialised"),
             ParameterOutcome("old.a", 1, LEFT), ParameterOutcome("old.b", 1, LEFT)]
    assert [(fate.name, fate.numbers, fate.what) for fate in collapsed(fates)] == [
        ("CNN", 5, TAKEN), ("encoder.layers.0-2", 18, TAKEN), ("encoder.layers.3-4", 12, REINITIALISED),
        ("head", 2, TAKEN), ("old", 2, LEFT)]


def test_a_tensor_with_a_fate_of_its_own_has_its_own_line():
    fates = [ParameterOutcome("a.b.weight", 1, TAKEN), ParameterOutcome("a.b.bias", 1, REINITIALISED),
             ParameterOutcome("a.c", 1, TAKEN)]
    assert [fate.name for fate in collapsed(fates)] == ["a.b.weight", "a.b.bias", "a.c"]


def test_the_table_says_where_the_weights_come_from():
    lines = text("the run there", [ParameterOutcome("head.weight", 1200, REINITIALISED, "init_leave")]).splitlines()
    assert lines[0] == "Starting from the run there"
    assert lines[-1].split() == ["head", "1,200", "reinitialised", "init_leave"]
